"""The use of memory as 26.x plans it: what models are told, and what an architecture can say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from max.driver import Device
from max.pipelines.config.pipeline_config import PipelineConfig

__all__ = ["MemoryPlan", "MemoryPlanner"]


@dataclass(frozen=True)
class MemoryPlan:
    """The planned use of memory, as passed to constructors of 26.x.

    Args:
        planned_max_batch_size: The maximum number of concurrent requests.
        footprint: The bytes of the weights.
        planned_max_length: The longest sequence, in tokens.
        available_cache_memory: Bytes for the KV cache.
        planned_max_batch_total_tokens: The maximum number of tokens of all requests of a batch; None: no limit.
    """

    planned_max_batch_size: int
    footprint: int
    planned_max_length: int | None
    available_cache_memory: int | None = None
    planned_max_batch_total_tokens: int | None = None


class MemoryPlanner:
    """Estimates of memory; an architecture names its subclass as ``SupportedArchitecture(memory_planner=…)``.

    Args:
        config: The config of the architecture; None where it has none.
    """

    def __init__(self, config: object) -> None:
        self.config = config

    def estimate_weights_size(self, pipeline_config: PipelineConfig) -> int:
        """The bytes of the weights in memory.

        Args:
            pipeline_config: The configuration of the pipeline.
        """
        return pipeline_config.model_config.weights_size()

    def estimate_activation_memory(
        self, pipeline_config: PipelineConfig, huggingface_config: Any
    ) -> int:
        """The bytes of the activations of one execution; 0 without an estimate.

        Args:
            pipeline_config: The configuration of the pipeline.
            huggingface_config: The model's config.json.
        """
        return 0

    def infer_max_batch_size(
        self, pipeline_config: PipelineConfig, devices: list[Device], weights_size: int
    ) -> int | None:
        """The default number of requests that run at once; None: as many as the memory holds.

        Args:
            pipeline_config: The configuration of the pipeline.
            devices: Where the model runs.
            weights_size: The bytes of the weights.
        """
        return None
