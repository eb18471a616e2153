"""The form of 26.x: how `max.pipelines` runs declarations of architectures and configurations of 26.x.

`max.pipelines` sets this module as the forms of `max.pipelines.forms`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from max._compat.pipelines.v26_adapter import V26Entry, adapted_model, is_of_26
from max._compat.pipelines.v26_architecture import V26Architecture
from max._compat.pipelines.v26_config import attribute, own_options
from max.interfaces import PipelineTask
from max.pipelines.encoders.context import EncoderTokenizer
from max.pipelines.registry.architecture import SupportedArchitecture
from max.pipelines.tokenization.tokenizer import TextTokenizer

__all__ = ["adapt_architecture", "attribute", "own_options", "subclasses"]


def subclasses(cls: type[Any]) -> Collection[type[Any]]:
    """The subclasses of a dataclass with further fields.

    Args:
        cls: The dataclass.
    """
    return [V26Architecture] if cls is SupportedArchitecture else []


def adapt_architecture(architecture: SupportedArchitecture) -> None:
    """Lets the pipelines of this package run an architecture, whatever interface its model has.

    Args:
        architecture: The architecture, changed in place.
    """
    declared: Any = architecture
    if (
        declared.tokenizer is TextTokenizer
        and architecture.task is PipelineTask.EMBEDDINGS_GENERATION
    ):
        declared.tokenizer = EncoderTokenizer
    model = architecture.pipeline_model
    planner = getattr(architecture, "memory_planner", None)
    if not issubclass(model, V26Entry) and (planner is not None or is_of_26(model)):
        architecture.pipeline_model = adapted_model(model, planner)
