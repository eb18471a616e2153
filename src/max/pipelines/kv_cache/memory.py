"""Computes the number of pages of a cache, and their memory.

Each group of layers has a pool of pages. If memory is short, all pools have the same number of pages, but none has
more than a full batch holds at once: short sequences need equally many pages in groups with and without a window,
while the pool of a group with a window stays small for long sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

from max._host.machine import byte_size
from max.nn.kv_cache.cache_params import KVCacheParams
from max.pipelines.kv_cache.page_pool import held_pages, pages_of

_MOST_SAVED = 8
"""The maximum number of recurrent states that are saved at once."""


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


def group_shapes(params: KVCacheParams, num_layers: int) -> list[tuple[KVCacheParams, int]]:
    """The shape and the number of layers of each group.

    Args:
        params: The cache's shape.
        num_layers: The number of layers of the first group.
    """
    further_groups = [
        (params.group(index), group.layers) for index, group in enumerate(params.groups, 1)
    ]
    return [(params.group(0), num_layers), *further_groups]


def page_bytes(params: KVCacheParams, num_layers: int) -> int:
    """The bytes of one page of the first group over all devices: keys and values, or latents, of its tokens in all
    layers of the group.

    Args:
        params: The cache's shape.
        num_layers: The number of layers of the group.
    """
    return params.n_devices * params.page_bytes(num_layers, page_size_of(params))


def state_bytes(params: KVCacheParams) -> int:
    """The bytes of the recurrent states of one sequence.

    Args:
        params: The cache's shape.
    """
    return sum(state.bytes_per_slot for state in params.states)


def spare_slots(params: KVCacheParams, max_batch_size: int, available_bytes: int | None) -> int:
    """The number of recurrent states that can be saved at once, as steps with drafts need it: a few, as drafts do not
    pay in large batches, and at most a fourth of the memory.

    Args:
        params: The cache's shape.
        max_batch_size: The maximum number of concurrent requests.
        available_bytes: The bytes for the cache; None: no limit.
    """
    size = state_bytes(params)
    if not size:
        return 0
    most = min(max_batch_size, _MOST_SAVED)
    # a quarter at most
    return most if available_bytes is None else min(most, available_bytes // 4 // size)


def _held_pages(params: KVCacheParams, max_seq_len: int, step_tokens: int | None) -> int:
    """The number of pages of the first group that a sequence holds at once: for all tokens, or for those that a step
    and the window span.
    """
    step = max_seq_len if step_tokens is None else step_tokens
    return held_pages(max_seq_len, params.window, step, page_size_of(params))


def sequence_bytes(
    params: KVCacheParams, num_layers: int, max_seq_len: int, step_tokens: int | None = None
) -> int:
    """The bytes of the pages that a sequence holds at once, over all groups.

    Args:
        params: The cache's shape.
        num_layers: The number of layers of the first group.
        max_seq_len: The longest sequence, in tokens.
        step_tokens: The maximum number of new tokens per step; None: all tokens of a sequence.
    """
    return sum(
        _held_pages(shape, max_seq_len, step_tokens) * page_bytes(shape, layers)
        for shape, layers in group_shapes(params, num_layers)
    )


def fitting_length(
    params: KVCacheParams,
    num_layers: int,
    max_seq_len: int,
    available_bytes: int,
    step_tokens: int | None = None,
) -> int:
    """The longest sequence whose pages fit into memory: `max_seq_len`, or fewer tokens that fill whole pages.

    Args:
        params: The cache's shape.
        num_layers: The number of layers of the first group.
        max_seq_len: The longest requested sequence, in tokens.
        available_bytes: The bytes for its pages.
        step_tokens: The maximum number of new tokens per step; None: all tokens of a sequence.
    """
    page = page_size_of(params)

    def fits(length: int) -> bool:
        return sequence_bytes(params, num_layers, length, step_tokens) <= available_bytes

    if fits(max_seq_len):
        return max_seq_len
    # in pages: `low` fits, `high` does not
    low, high = 0, pages_of(max_seq_len, page)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * page) else (low, middle)
    return low * page


def swap_slots(
    params: KVCacheParams, num_layers: int, num_pages: Sequence[int], host_memory: int | None
) -> int:
    """The number of pages of each group that fit into a swap area in host memory; 0: there is no swap area.

    Args:
        params: The cache's shape.
        num_layers: The number of layers of the first group.
        num_pages: The number of pages of each group of the cache.
        host_memory: The bytes of host memory for cache and swap area; None: no limit.
    """
    space = params.host_kvcache_swap_space_gb
    if not params.enable_kvcache_swapping_to_host or space is None or num_layers == 0:
        return 0
    sizes = [page_bytes(*group) for group in group_shapes(params, num_layers)]
    used = sum(count * size for count, size in zip(num_pages, sizes, strict=True))
    requested_bytes = int(space * 2**30)
    left = requested_bytes if host_memory is None else min(requested_bytes, host_memory - used)
    return max(left // sum(sizes), 0)


def cache_bytes(
    params: KVCacheParams,
    num_layers: int,
    *,
    max_batch_size: int,
    max_seq_len: int,
    step_tokens: int | None = None,
) -> int:
    """The bytes of a cache for a full batch of sequences of full length: pages and recurrent states.

    Args:
        params: The cache's shape.
        num_layers: The number of layers of the first group.
        max_batch_size: The maximum number of concurrent sequences.
        max_seq_len: The longest sequence, in tokens.
        step_tokens: The maximum number of new tokens of a sequence per step; None: all its tokens.
    """
    pages = sequence_bytes(params, num_layers, max_seq_len, step_tokens)
    return max_batch_size * (pages + state_bytes(params))


def pages_for_memory(
    params: KVCacheParams,
    num_layers: int,
    *,
    max_batch_size: int,
    max_seq_len: int,
    available_bytes: int | None,
    step_tokens: int | None = None,
) -> tuple[int, ...]:
    """The number of pages of each group for a full batch, limited by the memory that the states leave.

    If no layer has keys, a page stands for a sequence and has no memory.

    Args:
        params: The cache's shape.
        num_layers: The number of layers of the first group.
        max_batch_size: The maximum number of concurrent sequences.
        max_seq_len: The longest sequence, in tokens.
        available_bytes: The bytes for the cache; None: no limit.
        step_tokens: The maximum number of new tokens of a sequence per step; None: all its tokens.

    Raises:
        ValueError: The states or one sequence of full length do not fit.
    """
    states = max_batch_size * state_bytes(params)
    if available_bytes is not None and states > available_bytes:
        raise ValueError(
            f"recurrent states: {max_batch_size} sequences need {byte_size(states)}, and "
            f"{byte_size(available_bytes)} are available; give a smaller max_batch_size"
        )
    if num_layers == 0:
        # no layer has keys: a page per sequence stands for it
        return (max_batch_size,)
    groups = group_shapes(params, num_layers)
    held = [_held_pages(shape, max_seq_len, step_tokens) for shape, _ in groups]
    if available_bytes is None:
        return tuple(max_batch_size * count for count in held)
    available_bytes -= states
    needed = sequence_bytes(params, num_layers, max_seq_len, step_tokens)
    if needed > available_bytes:
        raise ValueError(
            f"KV cache: one sequence of max_length {max_seq_len} needs "
            f"{byte_size(needed)}, and "
            f"{byte_size(available_bytes)} are available; give a smaller max_length"
        )
    sizes = [page_bytes(*group) for group in groups]
    # shrink the pools of window groups, one sequence at a time, until one sequence of full length fits in all pools
    batch = max_batch_size
    while True:
        pages = _equal_pools([batch * count for count in held], sizes, available_bytes)
        # one sequence fits, as was checked above
        if all(count >= least for count, least in zip(pages, held, strict=True)):
            return pages
        batch -= 1


def _equal_pools(max_pages: Sequence[int], sizes: Sequence[int], available: int) -> tuple[int, ...]:
    """Pools of equal size that fill the memory; a pool is smaller only if its maximum is smaller.

    Args:
        max_pages: The maximum number of pages of each pool.
        sizes: The bytes of one page of each pool.
        available: The bytes for all pools.
    """
    low, high = 0, max(max_pages)
    while low < high:
        middle = (low + high + 1) // 2
        used_bytes = sum(
            min(middle, count) * size for count, size in zip(max_pages, sizes, strict=True)
        )
        low, high = (middle, high) if used_bytes <= available else (low, middle - 1)
    return tuple(min(low, count) for count in max_pages)
