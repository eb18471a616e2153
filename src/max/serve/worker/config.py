"""The configuration of a served model, the same in the worker and in the API process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from max._lazy import lazy_module
from max.interfaces import PipelineTask
from max.pipelines.config.pipeline_config import PipelineConfig

if TYPE_CHECKING:
    from max.pipelines.registry import registry
else:
    # it loads the model's classes
    registry = lazy_module("max.pipelines.registry.registry")

PREFILL_CHUNK = 512
"""The default of prompt tokens a step: it bounds how long running sequences wait for a long prompt."""


def served_config(values: dict[str, Any]) -> tuple[PipelineConfig, PipelineTask]:
    """The configuration of a model, and its task.

    Args:
        values: The fields that are set.

    Raises:
        UserError: A field does not fit.
    """
    config = PipelineConfig(**values)
    task = registry.PIPELINE_REGISTRY.retrieve_pipeline_task(config)
    if task is PipelineTask.TEXT_GENERATION:
        if "prefill_chunk_size" not in values:
            config.prefill_chunk_size = PREFILL_CHUNK
        if "enable_in_flight_batching" not in values:
            config.enable_in_flight_batching = True
    return config, task
