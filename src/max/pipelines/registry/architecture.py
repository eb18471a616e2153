"""The declaration of an architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from max.graph.weights import WeightData, WeightsFormat
from max.interfaces import PipelineTask, PipelineTokenizer
from max.nn.kv_cache.cache_params import KVCacheStrategy
from max.pipelines import forms
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
        supported_encodings: The encodings it runs with, and the cache strategies of each. A list without strategies is
            for the paged cache.
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
        tool_parser: The name of the format of tool calls, or a function that returns it for a repository; None: as the
            chat template teaches.
        requires_max_batch_context_length: Whether the tokens of a batch must be bounded; the default bound is
            the longest sequence.
        pipeline_cls: The class of the pipeline; None: that of the task.

    Members of enumerations may be given by name: ``"bfloat16"``, ``"paged"``, ``"normal"``.

    Raises:
        ValueError: A name is unknown.
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
    tool_parser: str | Callable[[HuggingFaceRepo], str] | None = None
    requires_max_batch_context_length: bool = False
    pipeline_cls: type[Any] | None = None

    def __new__(cls, *args: Any, **options: Any) -> SupportedArchitecture:
        """An object of the class that has these options as fields; a form may have more of them."""
        return object.__new__(forms.class_with(cls, options))

    def __post_init__(self) -> None:
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
