"""The declaration of an architecture as 26.x has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from max.pipelines.registry.architecture import SupportedArchitecture

__all__ = ["V26Architecture"]


@dataclass(frozen=False)
class V26Architecture(SupportedArchitecture):
    """A `SupportedArchitecture` with arguments of 26.x.

    Args:
        context_type: The class of a request's state: `TextContext` or `EmbeddingsContext`.
        config: The class of its config, which a model without ``model_config_cls`` gets as that.
        input_modalities: What requests consist of: text.
        reasoning_parser: The name of a parser of reasoning; not used: reasoning is found by the chat template.
        default_structured_output_backend: Not used: grammars are llguidance's.
        default_structured_output_any_whitespace: Not used.
        batching: Not used: the batch processor of the model's class makes batches.
        memory_planner: A class whose objects estimate the memory of weights and activations.
        checkpoints_recurrent_state: Whether states of recurrent layers are kept for prefixes; they are not.
        supports_overlap_scheduler: Not used: steps are not overlapped.
        supports_device_graph_capture: Not used, as are the next three: they are for GPUs and drafts.
        supports_nvfp4_kv_cache: Not used.
        supports_spec_decode_mixed_batches: Not used.
        checkpoint_draft_width: Not used: nothing drafts tokens.
        denoising_cache_defaults: Only None: for diffusion.
        cascade_pipeline_factory: Only None: for diffusion.

    Raises:
        NotImplementedError: An argument requests what this release lacks.
    """

    context_type: type[Any] | None = None
    config: type[Any] | None = None
    input_modalities: set[str] = field(default_factory=lambda: {"text"})
    reasoning_parser: str | None = None
    default_structured_output_backend: str | None = None
    default_structured_output_any_whitespace: bool | None = None
    batching: type[Any] | None = None
    memory_planner: type[Any] | None = None
    checkpoints_recurrent_state: bool = False
    supports_overlap_scheduler: bool = True
    supports_device_graph_capture: bool = True
    supports_nvfp4_kv_cache: bool = False
    supports_spec_decode_mixed_batches: bool = False
    checkpoint_draft_width: Callable[..., int] | None = None
    denoising_cache_defaults: None = None
    cascade_pipeline_factory: None = None

    def __post_init__(self) -> None:
        super().__post_init__()
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
        model: Any = self.pipeline_model
        own = model.__module__.startswith("max.")
        if self.config is not None and not own and getattr(model, "model_config_cls", None) is None:
            # methods of the class read it before an object exists
            model.model_config_cls = self.config
