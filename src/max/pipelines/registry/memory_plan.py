"""Fits a configuration to the memory: shortens ``max_length``, lowers ``max_batch_size``, or refuses the model with a
plan.
"""

from __future__ import annotations

import logging

from max._host.machine import byte_size
from max.pipelines.checkpoints.encodings import QUANTIZED_KINDS
from max.pipelines.config.model_config import PLAIN_FLOATS
from max.pipelines.config.pipeline_config import PipelineConfig
from max.pipelines.core.exceptions import ConfigError
from max.pipelines.kv_cache.memory import (
    fitting_length,
    group_shapes,
    page_bytes,
    sequence_bytes,
    state_bytes,
)
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
        ConfigError: Not even one page of the KV cache fits beside the weights; the message has the plan and what would
            fit.
    """
    pipeline_model, model = architecture.pipeline_model, config.model_config
    encoding = model.quantization_encoding
    if config.max_length is None or encoding is None:
        return
    if not issubclass(pipeline_model, KVCacheMixin):
        return
    params, layers = pipeline_model.cache_shape(
        config,
        model.huggingface_config,
        model.replica_devices[0],
        config.kv_cache_config,
        config.kv_cache_config.cache_dtype(encoding.cache_dtype),
    )
    states, step = state_bytes(params), config.step_tokens
    page = config.kv_cache_config.kv_cache_page_size
    # a sequence has a page of each group of layers at least
    min_sequence_bytes = sum(page_bytes(*group) for group in group_shapes(params, layers))
    available = config.available_cache_memory()
    if available < states + min_sequence_bytes:
        raise _refusal(config, min_sequence_bytes, states)
    length = fitting_length(params, layers, config.max_length, available - states, step)
    if length < config.max_length:
        logger.warning(
            "the KV cache of one sequence of %d tokens does not fit into memory; max_length is "
            "%d (--max-length sets it)",
            config.max_length,
            length,
        )
        config.max_length = length
    if config.max_batch_size is None:
        return
    fitting = (
        (available - states) // min_sequence_bytes if min_sequence_bytes else config.max_batch_size
    )
    if config.max_batch_size > fitting:
        logger.warning(
            "the KV cache has %d pages of %d tokens, and max_batch_size is %d, a page for each "
            "sequence; max_batch_size is now %d",
            fitting,
            page,
            config.max_batch_size,
            fitting,
        )
        config.max_batch_size = fitting
    # beside the states one sequence has all its pages, and each one a page
    longest = sequence_bytes(params, layers, config.max_length, step)
    max_sequences = (
        min(available // (states + min_sequence_bytes), (available - longest) // states)
        if states
        else 0
    )
    if states and config.max_batch_size > max_sequences:
        logger.warning(
            "the recurrent states of a sequence take %s, and max_batch_size is %d; it is now %d",
            byte_size(states),
            config.max_batch_size,
            max_sequences,
        )
        config.max_batch_size = max_sequences


def _refusal(config: PipelineConfig, page_bytes: int, states: int) -> ConfigError:
    """The plan of a model that does not fit, and what would."""
    model = config.model_config
    free_bytes = config.free_memory() or 0
    available_bytes = int(free_bytes * config.kv_cache_config.device_memory_utilization)
    weights = model.weights_size()
    page = config.kv_cache_config.kv_cache_page_size
    plan = (
        f"{model.model_path} does not fit into memory: {byte_size(weights)} of weights and "
        f"{_cache(page, page_bytes, states)}, where {byte_size(available_bytes)} are available "
        f"({byte_size(free_bytes)} are free, {byte_size(free_bytes - available_bytes)} of them kept as slack)"
    )
    page_bytes += states
    encoding = model.quantization_encoding
    # a token fits, and a page does not
    if not states and weights + page_bytes // page <= available_bytes < weights + page_bytes:
        return ConfigError(plan, "Give a smaller --kv-cache-page-size, so that a page fits.")
    if model.quantize is None and encoding in PLAIN_FLOATS:
        for kind in QUANTIZED_KINDS[:-1]:  # int8 takes what q8_0 takes
            size = model.weights_size(kind)
            if size + page_bytes <= available_bytes:
                return ConfigError(
                    plan, f"--quantize {kind} would fit: {byte_size(size)} of weights."
                )
    return ConfigError(
        plan,
        f"Take a smaller model, or free {byte_size(weights + page_bytes - available_bytes)} of memory.",
    )


def _cache(page: int, page_bytes: int, states: int) -> str:
    """The least that one sequence needs besides the weights."""
    page_text = (
        f"{byte_size(page_bytes)} for a page of {page} tokens of KV cache" if page_bytes else ""
    )
    state_text = f"{byte_size(states)} for the recurrent states of a sequence" if states else ""
    return " and ".join(part for part in (page_text, state_text) if part)
