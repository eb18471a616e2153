"""The configuration of a served model, the same in the worker and in the API process."""

from __future__ import annotations

from typing import Any

from max.interfaces import PipelineTask
from max.pipelines.config.pipeline_config import PipelineConfig
from max.pipelines.registry.registry import PIPELINE_REGISTRY

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
    task = PIPELINE_REGISTRY.retrieve_pipeline_task(config)
    if task is PipelineTask.TEXT_GENERATION:
        if "prefill_chunk_size" not in values:
            config.prefill_chunk_size = PREFILL_CHUNK
        if "enable_in_flight_batching" not in values:
            config.enable_in_flight_batching = True
    return config, task
