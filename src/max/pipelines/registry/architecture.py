"""An architecture, as the registry knows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from max.graph.weights import WeightData, WeightsFormat
from max.interfaces import PipelineTask, PipelineTokenizer
from max.nn.kv_cache.cache_params import KVCacheStrategy
from max.pipelines.checkpoints.encodings import SupportedEncoding
from max.pipelines.config.enums import RopeType
from max.pipelines.core import TextAndVisionContext, TextContext
from max.pipelines.models.pipeline_model import PipelineModel


@dataclass(frozen=False)
class SupportedArchitecture:
    """An architecture, with all that it takes to run a model of it.

    Args:
        name: The class's name in ``architectures`` of config.json, such as ``LlamaForCausalLM``.
        example_repo_ids: Models of this architecture on the Hugging Face hub.
        default_encoding: The encoding when neither the user nor the checkpoint says.
        supported_encodings: The encodings it runs with, and the cache strategies of each; the encodings alone, as later
            versions have them, are for the paged cache.
        pipeline_model: The model's class.
        task: What it makes.
        tokenizer: Makes its tokenizer.
        default_weights_format: The format whose names the model's weights have.
        rope_type: How it rotates queries and keys.
        weight_adapters: For each format a function that renames a checkpoint's weights.
        multi_gpu_supported: Whether it runs on several devices.
        required_arguments: Values that fields of the configuration must have.
        context_validators: Check each request before the model sees it.
        supports_empty_batches: Whether it can run with no requests.
        context_type: The class of its requests' state in later versions; not read: it is `TextContext`.
        config: The class of its form in later versions; not read: the model's class knows it.

    Names stand for members of enumerations too: ``"bfloat16"``, ``"paged"``, ``"normal"``.

    Raises:
        ValueError: One of these names is unknown.
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

    def __post_init__(self) -> None:
        self.default_encoding = SupportedEncoding(self.default_encoding)
        self.rope_type = RopeType(self.rope_type)
        given: Any = self.supported_encodings
        if not isinstance(given, Mapping):
            given = {encoding: [KVCacheStrategy.PAGED] for encoding in sorted(given)}
        self.supported_encodings = {
            SupportedEncoding(encoding): [KVCacheStrategy(strategy) for strategy in strategies]
            for encoding, strategies in given.items()
        }

    @property
    def tokenizer_cls(self) -> type[PipelineTokenizer[Any, Any, Any]]:
        """The tokenizer's class, also where ``tokenizer`` is a ``functools.partial`` of it."""
        made = getattr(self.tokenizer, "func", self.tokenizer)
        if isinstance(made, type):
            return made
        raise TypeError(f"{self.name}: the tokenizer is {made!r}, not a class")
