"""Documented path of the base of models: see `max.pipelines.models`."""

from __future__ import annotations

from max._names import lazy_names
from max.pipelines.generation.mixin import GenerateMixin
from max.pipelines.models.inputs import ModelInputs, ModelOutputs
from max.pipelines.models.kv_cache import KVCacheMixin, get_paged_manager
from max.pipelines.models.pipeline_model import (
    AlwaysSignalBuffersMixin,
    PipelineModel,
    WeightsAdapter,
    upper_bounded_default,
)

__all__ = [
    "GenerateMixin",
    "ModelInputs",
    "ModelOutputs",
    "KVCacheMixin",
    "get_paged_manager",
    "AlwaysSignalBuffersMixin",
    "PipelineModel",
    "WeightsAdapter",
    "upper_bounded_default",
]

__getattr__ = lazy_names(__name__)
