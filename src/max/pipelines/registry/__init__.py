"""The architectures by name, and the resolution of configurations against them. Names load when first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from max._names import lazy_names

if TYPE_CHECKING:
    from max.pipelines.registry.architecture import SupportedArchitecture
    from max.pipelines.registry.registry import (
        PIPELINE_REGISTRY,
        PipelineRegistry,
        get_pipeline_for_task,
    )

__all__ = [
    "PIPELINE_REGISTRY",
    "PipelineRegistry",
    "SupportedArchitecture",
    "get_pipeline_for_task",
]

_REGISTRY = "max.pipelines.registry.registry"

__getattr__ = lazy_names(
    __name__,
    {
        "PIPELINE_REGISTRY": _REGISTRY,
        "PipelineRegistry": _REGISTRY,
        "SupportedArchitecture": "max.pipelines.registry.architecture",
        "get_pipeline_for_task": _REGISTRY,
    },
)
