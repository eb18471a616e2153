"""Fits a configuration to the memory: shortens ``max_length``, lowers ``max_batch_size``, or refuses the model with a plan."""

from __future__ import annotations

import logging
import sys

from max.pipelines.checkpoints.encodings import QUANTISED_KINDS
from max.pipelines.config.model_config import PLAIN_FLOATS
from max.pipelines.config.pipeline_config import PipelineConfig
from max.pipelines.core.exceptions import ConfigError
from max.pipelines.models.kv_cache import KVCacheMixin
from max.pipelines.registry.architecture import SupportedArchitecture

__all__ = ["fit_to_memory"]

logger = logging.getLogger("max.pipelines")


def fit_to_memory(config: PipelineConfig, architecture: SupportedArchitecture) -> None:
    """Lowers ``max_length`` and a given ``max_batch_size`` to what the memory holds, with a warning each.

    Args:
        config: The configuration, changed in place; ``max_length`` is set.
        architecture: The architecture of its model.

    Raises:
        ConfigError: Not even one page of the KV cache fits beside the weights; the message has the plan and what would fit.
    """
    pipeline_model, model = architecture.pipeline_model, config.model_config
    encoding = model.quantization_encoding
    if config.max_length is None or encoding is None:
        return
    if not issubclass(pipeline_model, KVCacheMixin):
        return
    needed = pipeline_model.estimate_kv_cache_size(
        config,
        sys.maxsize,
        model.devices,
        model.huggingface_config,
        config.kv_cache_config,
        encoding.cache_dtype,
    ) // (config.max_batch_size or 1)
    page = config.kv_cache_config.kv_cache_page_size
    pages = -(-config.max_length // page)
    page_bytes = max(needed // pages, 1)
    fitting = config.available_cache_memory() // page_bytes
    if fitting < 1:
        raise _refusal(config, page_bytes)
    if fitting < pages:
        logger.warning(
            "the KV cache of one sequence of %d tokens does not fit into memory; max_length is "
            "%d (--max-length sets it)",
            config.max_length,
            fitting * page,
        )
        config.max_length = fitting * page
    if config.max_batch_size is not None and config.max_batch_size > fitting:
        logger.warning(
            "the KV cache has %d pages of %d tokens, and max_batch_size is %d, a page for each "
            "sequence; max_batch_size is now %d",
            fitting,
            page,
            config.max_batch_size,
            fitting,
        )
        config.max_batch_size = fitting


def _refusal(config: PipelineConfig, page_bytes: int) -> ConfigError:
    """The plan of a model that does not fit, and what would."""
    model = config.model_config
    free = config.free_memory() or 0
    share = int(free * config.kv_cache_config.device_memory_utilization)
    weights = model.weights_size()
    page = config.kv_cache_config.kv_cache_page_size
    plan = (
        f"{model.model_path} does not fit into memory: {_size(weights)} of weights and {_size(page_bytes)} for a page of "
        f"{page} tokens of KV cache, where {_size(share)} are available ({_size(free)} are free, "
        f"{_size(free - share)} of them kept as slack)"
    )
    encoding = model.quantization_encoding
    if weights + page_bytes // page <= share < weights + page_bytes:
        return ConfigError(plan, "Give a smaller --kv-cache-page-size, so that a page fits.")
    if model.quantize is None and encoding in PLAIN_FLOATS:
        for kind in QUANTISED_KINDS[:-1]:
            size = model.weights_size(kind)
            if size + page_bytes <= share:
                return ConfigError(plan, f"--quantize {kind} would fit: {_size(size)} of weights.")
    return ConfigError(
        plan, f"Take a smaller model, or free {_size(weights + page_bytes - share)} of memory."
    )


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
