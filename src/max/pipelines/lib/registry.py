"""Documented path of the registry: see `max.pipelines.registry`."""

from __future__ import annotations

from max._names import lazy_names
from max.pipelines.registry.architecture import SupportedArchitecture
from max.pipelines.registry.registry import (
    PIPELINE_REGISTRY,
    PipelineRegistry,
    get_pipeline_for_task,
)

__all__ = [
    "SupportedArchitecture",
    "PIPELINE_REGISTRY",
    "PipelineRegistry",
    "get_pipeline_for_task",
]

__getattr__ = lazy_names(__name__)
