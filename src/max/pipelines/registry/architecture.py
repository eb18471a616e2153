"""The declaration of an architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from max.graph.weights import WeightData, WeightsFormat
from max.interfaces import PipelineTask, PipelineTokenizer
from max.nn.kv_cache.cache_params import KVCacheStrategy
from max.pipelines.checkpoints.encodings import SupportedEncoding
from max.pipelines.checkpoints.hub import HuggingFaceRepo
from max.pipelines.config.enums import RopeType
from max.pipelines.core import TextAndVisionContext, TextContext
from max.pipelines.models.pipeline_model import PipelineModel


@dataclass(frozen=False)
class SupportedArchitecture:
    """The declaration of an architecture: all that a pipeline needs to run its models.

    Args:
        name: The class's name in ``architectures`` of config.json, such as ``LlamaForCausalLM``.
        example_repo_ids: Models of this architecture on the Hugging Face hub.
        default_encoding: The encoding if neither the user nor the checkpoint states one.
        supported_encodings: The encodings it runs with, and the cache strategies of each. A list without strategies, as
            in later versions, is for the paged cache.
        pipeline_model: The model's class.
        task: The task of its models.
        tokenizer: The constructor of its tokenizer.
        default_weights_format: The format whose weight names are the model's.
        rope_type: The RoPE layout.
        weight_adapters: The function that renames a checkpoint's weights, per format.
        multi_gpu_supported: Whether it runs on several devices.
        required_arguments: Values that fields of the configuration must have.
        context_validators: Check each request before the model sees it.
        supports_empty_batches: Whether it runs without requests.
        context_type: The class of a request's state in 26.x: `TextContext` or `EmbeddingsContext`.
        config: The class of its config in 26.x, which a model without ``model_config_cls`` gets as that.
        input_modalities: What requests consist of: text.
        tool_parser: The name of the format of tool calls, or a function that returns it for a repository; None: as the
            chat template teaches.
        reasoning_parser: The name of a parser of reasoning; not used: reasoning is found by the chat template.
        default_structured_output_backend: Not used: grammars are llguidance's.
        default_structured_output_any_whitespace: Not used.
        batching: Not used: the batch processor of the model's class makes batches.
        memory_planner: A class whose objects estimate the memory of weights and activations.
        requires_max_batch_context_length: Whether the tokens of a batch must be bounded; the default bound is
            the longest sequence.
        checkpoints_recurrent_state: Whether states of recurrent layers are kept for prefixes; they are not.
        supports_overlap_scheduler: Not used: steps are not overlapped.
        supports_device_graph_capture: Not used, as are the next three: they are for GPUs and drafts.
        supports_nvfp4_kv_cache: Not used.
        supports_spec_decode_mixed_batches: Not used.
        checkpoint_draft_width: Not used: nothing drafts tokens.
        denoising_cache_defaults: Only None: for diffusion.
        cascade_pipeline_factory: Only None: for diffusion.
        pipeline_cls: The class of the pipeline; None: that of the task.

    Members of enumerations may be given by name: ``"bfloat16"``, ``"paged"``, ``"normal"``.

    Raises:
        ValueError: A name is unknown.
        NotImplementedError: An argument requests what this release lacks.
    """

    name: str
    example_repo_ids: list[str]
    default_encoding: SupportedEncoding
    supported_encodings: dict[SupportedEncoding, list[KVCacheStrategy]]
    pipeline_model: type[PipelineModel[Any]]
    task: PipelineTask
    tokenizer: Callable[..., PipelineTokenizer[Any, Any, Any]]
    default_weights_format: WeightsFormat
    rope_type: RopeType = RopeType.none
    weight_adapters: dict[WeightsFormat, Callable[..., dict[str, WeightData]]] = field(
        default_factory=dict
    )
    multi_gpu_supported: bool = False
    required_arguments: dict[str, bool | int | float] = field(default_factory=dict)
    context_validators: list[Callable[[TextContext | TextAndVisionContext], None]] = field(
        default_factory=list
    )
    supports_empty_batches: bool = False
    context_type: type[Any] | None = None
    config: type[Any] | None = None
    input_modalities: set[str] = field(default_factory=lambda: {"text"})
    tool_parser: str | Callable[[HuggingFaceRepo], str] | None = None
    reasoning_parser: str | None = None
    default_structured_output_backend: str | None = None
    default_structured_output_any_whitespace: bool | None = None
    batching: type[Any] | None = None
    memory_planner: type[Any] | None = None
    requires_max_batch_context_length: bool = False
    checkpoints_recurrent_state: bool = False
    supports_overlap_scheduler: bool = True
    supports_device_graph_capture: bool = True
    supports_nvfp4_kv_cache: bool = False
    supports_spec_decode_mixed_batches: bool = False
    checkpoint_draft_width: Callable[..., int] | None = None
    denoising_cache_defaults: None = None
    cascade_pipeline_factory: None = None
    pipeline_cls: type[Any] | None = None

    def __post_init__(self) -> None:
        others = {getattr(kind, "value", kind) for kind in self.input_modalities} - {"text"}
        if others:
            raise NotImplementedError(
                f"{self.name}: input_modalities has {', '.join(sorted(others))}; requests here are text"
            )
        for name in ("denoising_cache_defaults", "cascade_pipeline_factory"):
            if getattr(self, name) is not None:
                raise NotImplementedError(
                    f"{self.name}: {name} is for diffusion, which is not in this release"
                )
        if (
            self.config is not None
            and getattr(self.pipeline_model, "model_config_cls", ...) is None
        ):
            # methods of the class read it before an object exists
            self.pipeline_model.model_config_cls = self.config
        self.default_encoding = SupportedEncoding(self.default_encoding)
        self.rope_type = RopeType(self.rope_type)
        declared: Any = self.supported_encodings
        if not isinstance(declared, Mapping):
            declared = {encoding: [KVCacheStrategy.PAGED] for encoding in sorted(declared)}
        self.supported_encodings = {
            SupportedEncoding(encoding): [KVCacheStrategy(strategy) for strategy in strategies]
            for encoding, strategies in declared.items()
        }

    @property
    def tokenizer_cls(self) -> type[PipelineTokenizer[Any, Any, Any]]:
        """The tokenizer's class, also if ``tokenizer`` is a ``functools.partial`` of it."""
        constructor = getattr(self.tokenizer, "func", self.tokenizer)
        if isinstance(constructor, type):
            return constructor
        raise TypeError(f"{self.name}: the tokenizer is {constructor!r}, not a class")
