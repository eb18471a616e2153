"""The number of pages of a cache, and their memory."""

from __future__ import annotations

from max.nn.kv_cache.cache_params import KVCacheParams
from max.pipelines.kv_cache.page_pool import pages_of


def page_size_of(params: KVCacheParams) -> int:
    """Tokens per page.

    Args:
        params: The cache's shape.

    Raises:
        ValueError: It has no page size.
    """
    if params.page_size is None:
        raise ValueError("KV cache: page_size is not set; the paged strategy needs it")
    return params.page_size


def page_bytes(params: KVCacheParams, num_layers: int) -> int:
    """The bytes of one page: keys and values of its tokens in all layers, or their latents.

    Args:
        params: The cache's shape.
        num_layers: The number of layers.
    """
    kinds = 1 if params.is_mla else 2
    rows = kinds * num_layers * page_size_of(params) * params.n_kv_heads_per_device
    return rows * params.stored_head_dim * params.dtype.size_in_bytes


def state_bytes(params: KVCacheParams) -> int:
    """The bytes of the recurrent states of one sequence.

    Args:
        params: The cache's shape.
    """
    return sum(state.bytes_per_slot for state in params.states)


def held_tokens(params: KVCacheParams, max_seq_len: int, step_tokens: int | None) -> int:
    """The tokens of a sequence that hold pages at once: all, or those that a step and its window span.

    Args:
        params: The cache's shape.
        max_seq_len: The longest sequence.
        step_tokens: The most new tokens of a step; None: as many as a sequence has.
    """
    if params.window is None or step_tokens is None:
        return max_seq_len
    return min(max_seq_len, params.window - 1 + step_tokens + page_size_of(params))


def swap_slots(
    params: KVCacheParams, num_layers: int, num_pages: int, host_memory: int | None
) -> int:
    """The pages that the host's swap area has room for; 0 without one.

    Args:
        params: The cache's shape.
        num_layers: The number of layers.
        num_pages: The pages of the cache.
        host_memory: Bytes of the host for cache and area; None: no limit.
    """
    space = params.host_kvcache_swap_space_gb
    if not params.enable_kvcache_swapping_to_host or space is None or num_layers == 0:
        return 0
    page, wanted = page_bytes(params, num_layers), int(space * 2**30)
    left = wanted if host_memory is None else min(wanted, host_memory - num_pages * page)
    return max(left // page, 0)


def cache_bytes(
    params: KVCacheParams, num_layers: int, *, max_batch_size: int, max_seq_len: int
) -> int:
    """The bytes of a cache for a full batch of sequences of full length: pages and states.

    Args:
        params: The cache's shape.
        num_layers: The number of layers.
        max_batch_size: Sequences at once.
        max_seq_len: The longest sequence.
    """
    pages = max_batch_size * pages_of(max_seq_len, page_size_of(params))
    return pages * page_bytes(params, num_layers) + max_batch_size * state_bytes(params)


def pages_for_memory(
    params: KVCacheParams,
    num_layers: int,
    *,
    max_batch_size: int,
    max_seq_len: int,
    available_bytes: int | None,
) -> int:
    """The number of pages that a full batch needs, at most what fits into memory beside its states.

    Where no layer has keys, a page is a sequence and has no memory.

    Args:
        params: The cache's shape.
        num_layers: The number of layers.
        max_batch_size: Sequences at once.
        max_seq_len: The longest sequence.
        available_bytes: Bytes for the cache; None: no limit.

    Raises:
        ValueError: The states do not fit, or one sequence of full length does not.
    """
    states = max_batch_size * state_bytes(params)
    if available_bytes is not None and states > available_bytes:
        raise ValueError(
            f"recurrent states: {max_batch_size} sequences need {states / 2**20:.1f} MiB, and "
            f"{available_bytes / 2**20:.1f} MiB are available; give a smaller max_batch_size"
        )
    if num_layers == 0:
        return max_batch_size
    pages_per_sequence = pages_of(max_seq_len, page_size_of(params))
    needed = max_batch_size * pages_per_sequence
    if available_bytes is None:
        return needed
    available_bytes -= states
    fitting = available_bytes // page_bytes(params, num_layers)
    if fitting < pages_per_sequence:
        raise ValueError(
            f"KV cache: one sequence of max_length {max_seq_len} needs "
            f"{pages_per_sequence * page_bytes(params, num_layers) / 2**20:.0f} MiB, and "
            f"{available_bytes / 2**20:.0f} MiB are available; give a smaller max_length"
        )
    return min(needed, fitting)
