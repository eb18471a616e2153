"""The use of memory as 26.x plans it: what models are told, and what an architecture can say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from max.driver import Device
from max.nn.kv_cache.cache_params import KVCacheParams
from max.pipelines.config.pipeline_config import PipelineConfig
from max.pipelines.kv_cache.memory import cache_bytes

__all__ = ["MemoryPlan", "MemoryPlanner", "estimate_kv_cache_size"]


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


def estimate_kv_cache_size(
    params: KVCacheParams,
    max_batch_size: int | None,
    max_seq_len: int,
    num_layers: int,
    available_cache_memory: int,
    devices: Sequence[Device],
) -> int:
    """The bytes of a cache for a full batch, at most the available memory.

    Args:
        params: The cache's shape.
        max_batch_size: The maximum number of concurrent requests; None: 1.
        max_seq_len: The longest sequence, in tokens.
        num_layers: The number of layers of the first group.
        available_cache_memory: Bytes for the cache.
        devices: The model's devices; not used.
    """
    needed = cache_bytes(
        params, num_layers, max_batch_size=max_batch_size or 1, max_seq_len=max_seq_len
    )
    return min(available_cache_memory, needed)
