"""The pages of a cache and their memory: against counts by trying all numbers, and all places of a sequence."""

from __future__ import annotations

import random
from dataclasses import replace
from math import prod

import pytest

from max.dtype import DType
from max.nn.kv_cache.cache_params import CacheGroup, KVCacheParams
from max.nn.kv_cache.recurrent_state import RecurrentState
from max.pipelines.kv_cache import memory


def shapes(draw: random.Random) -> tuple[KVCacheParams, int, list[tuple[int, int | None]]]:
    """A cache, the layers of its first group, and the bytes of a page and the window of each group."""
    page, devices = draw.randrange(1, 6), draw.choice([1, 2])
    heads, dim, layers = draw.randrange(1, 3) * devices, draw.randrange(1, 5), draw.randrange(1, 4)
    windows = [draw.choice([None, draw.randrange(1, 12)]) for _ in range(draw.randrange(1, 4))]
    groups = [
        CacheGroup(
            draw.randrange(1, 4), devices * draw.randrange(1, 3), draw.randrange(1, 5), window
        )
        for window in windows[1:]
    ]
    params = KVCacheParams(
        DType.float32, heads, dim, page_size=page, n_devices=devices, window=windows[0], groups=tuple(groups)
    )  # fmt: skip
    first = CacheGroup(layers, heads, dim, windows[0])
    # keys and values of 4 bytes
    pages = [
        (2 * 4 * page * each.layers * each.n_kv_heads * each.head_dim, each.window)
        for each in (first, *groups)
    ]
    return params, layers, pages


def most_pages(page: int, length: int, window: int | None, step: int | None) -> int:
    """The most pages that the tokens which a step reads or sees lie on, wherever it begins."""
    most = 0
    for begin in range(length):
        end = length if step is None else min(begin + step, length)
        first = 0 if window is None or step is None else max(begin - window + 1, 0)
        most = max(most, (end - 1) // page - first // page + 1)
    return most


def held_pages(
    params: KVCacheParams,
    layers: int,
    pages: list[tuple[int, int | None]],
    length: int,
    step: int | None,
) -> list[int]:
    """What the estimate has for a full batch of one, which is all that a sequence holds."""
    held = memory.pages_for_memory(
        params, layers, max_batch_size=1, max_seq_len=length, available_bytes=None, step_tokens=step
    )
    page = params.page_size or 0
    for count, (_, window) in zip(held, pages, strict=True):
        least = most_pages(page, length, window, step)
        assert count == least
    return list(held)


def test_a_sequence_holds_what_its_steps_see() -> None:
    draw = random.Random(0)
    for _ in range(150):
        params, layers, pages = shapes(draw)
        length, step = draw.randrange(1, 40), draw.choice([None, 1, draw.randrange(1, 9)])
        held = held_pages(params, layers, pages, length, step)
        whole = sum(count * size for count, (size, _) in zip(held, pages, strict=True))
        assert memory.sequence_bytes(params, layers, length, step) == whole
        assert memory.page_bytes(params, layers) == pages[0][0]
        for batch in (1, 3):
            of_batch = memory.cache_bytes(
                params, layers, max_batch_size=batch, max_seq_len=length, step_tokens=step
            )
            assert of_batch == batch * whole
            counts = memory.pages_for_memory(
                params, layers, max_batch_size=batch, max_seq_len=length, available_bytes=None, step_tokens=step
            )  # fmt: skip
            assert list(counts) == [batch * count for count in held]


def test_the_longest_sequence_that_fits() -> None:
    draw = random.Random(1)
    for _ in range(100):
        params, layers, _ = shapes(draw)
        length, step = draw.randrange(1, 40), draw.choice([None, 2])
        page = params.page_size or 0

        def needed(tokens: int) -> int:
            return memory.sequence_bytes(params, layers, tokens, step)  # noqa: B023

        full = needed(length)
        for room in (full, full - 1, full // 2, 0, draw.randrange(full + 1)):
            lengths = [length, *range(0, length, page)]
            longest = max(each for each in lengths if needed(each) <= room)
            assert memory.fitting_length(params, layers, length, room, step) == longest
        # weights may take more than there is
        assert memory.fitting_length(params, layers, length, -1, step) == 0


def test_the_pages_that_fit() -> None:
    """The pools are equal but for those that a full batch does not need more of, and no page more fits."""
    draw = random.Random(2)
    for _ in range(150):
        params, layers, pages = shapes(draw)
        length, batch, step = draw.randrange(1, 30), draw.randrange(1, 5), draw.choice([None, 3])
        held, sizes = held_pages(params, layers, pages, length, step), [size for size, _ in pages]

        def used(counts: list[int]) -> int:
            return sum(count * size for count, size in zip(counts, sizes, strict=True))  # noqa: B023

        one, full = used(held), used([batch * count for count in held])
        for room in (
            one,
            full,
            max(full - 1, one),
            (one + full) // 2,
            draw.randrange(one, full + 1),
        ):
            found = memory.pages_for_memory(
                params, layers, max_batch_size=batch, max_seq_len=length, available_bytes=room, step_tokens=step
            )  # fmt: skip
            tried = (
                [min(level, part * count) for count in held]
                for part in range(batch, 0, -1)
                for level in range(batch * max(held), 0, -1)
            )
            # the largest batch whose pools hold one sequence, then the largest pools
            best = next(
                counts for counts in tried
                if used(counts) <= room and all(a >= b for a, b in zip(counts, held, strict=True))
            )  # fmt: skip
            assert list(found) == best, (held, sizes, room)
        with pytest.raises(ValueError, match=f"one sequence of max_length {length} needs"):
            memory.pages_for_memory(
                params, layers, max_batch_size=batch, max_seq_len=length, available_bytes=one - 1,
                step_tokens=step,
            )  # fmt: skip


def test_the_pages_of_a_swap_area() -> None:
    draw = random.Random(3)
    for _ in range(50):
        params, layers, pages = shapes(draw)
        one = sum(size for size, _ in pages)
        counts = [draw.randrange(1, 5) for _ in pages]
        used = sum(count * size for count, (size, _) in zip(counts, pages, strict=True))
        swapping = replace(
            params, enable_prefix_caching=True, enable_kvcache_swapping_to_host=True,
            host_kvcache_swap_space_gb=(3 * one + 1) / 2**30,
        )  # fmt: skip
        for limit, expected in (
            (None, 3), (used + 4 * one, 3), (used + 3 * one, 3), (used + 3 * one - 1, 2), (used, 0), (0, 0),
        ):  # fmt: skip
            assert memory.swap_slots(swapping, layers, counts, limit) == expected
        assert memory.swap_slots(params, layers, counts, None) == 0
        for name, value in (
            ("host_kvcache_swap_space_gb", None), ("enable_kvcache_swapping_to_host", False)
        ):  # fmt: skip
            without = replace(swapping)
            setattr(without, name, value)
            assert memory.swap_slots(without, layers, counts, None) == 0
        assert memory.swap_slots(swapping, 0, counts, None) == 0


def with_states(params: KVCacheParams, draw: random.Random) -> tuple[KVCacheParams, int]:
    """A cache of a model with recurrent states, and their bytes of a sequence."""
    states, nbytes = [], 0
    for number in range(draw.randrange(1, 4)):
        layers, shape = (
            draw.randrange(1, 4),
            tuple(draw.randrange(1, 5) for _ in range(draw.randrange(1, 4))),
        )
        states.append(RecurrentState(f"s{number}", layers, shape))
        nbytes += 4 * layers * prod(shape)
    return replace(params, states=tuple(states)), nbytes


def test_states_have_their_memory_before_the_pages() -> None:
    draw = random.Random(4)
    for _ in range(60):
        plain, layers, _ = shapes(draw)
        params, nbytes = with_states(plain, draw)
        batch, length = draw.randrange(1, 5), draw.randrange(1, 30)
        sizes = {"max_batch_size": batch, "max_seq_len": length}
        assert memory.state_bytes(params) == nbytes and memory.state_bytes(plain) == 0
        both = memory.cache_bytes(params, layers, **sizes)
        assert both == memory.cache_bytes(plain, layers, **sizes) + batch * nbytes
        least = memory.sequence_bytes(plain, layers, length)
        for room in (None, least, both):
            rest = None if room is None else room + batch * nbytes
            assert memory.pages_for_memory(
                params, layers, **sizes, available_bytes=rest
            ) == memory.pages_for_memory(plain, layers, **sizes, available_bytes=room)
        with pytest.raises(ValueError, match="one sequence of max_length"):
            memory.pages_for_memory(
                params, layers, **sizes, available_bytes=least - 1 + batch * nbytes
            )
        with pytest.raises(ValueError, match=f"recurrent states: {batch} sequences need"):
            memory.pages_for_memory(params, layers, **sizes, available_bytes=batch * nbytes - 1)
        # a model whose layers have states only: a page without memory for each sequence
        for room in (None, batch * nbytes):
            found = memory.pages_for_memory(params, 0, **sizes, available_bytes=room)
            assert found == (batch,)


def test_how_many_states_are_saved() -> None:
    """A few, in at most a fourth of the memory."""
    draw = random.Random(5)
    for _ in range(30):
        plain, _, _ = shapes(draw)
        params, nbytes = with_states(plain, draw)
        assert memory.spare_slots(plain, 4, None) == memory.spare_slots(plain, 4, 10**9) == 0
        for batch, most in ((1, 1), (3, 3), (8, 8), (9, 8), (100, 8)):
            assert memory.spare_slots(params, batch, None) == most
            for count in range(12):
                for room in (4 * count * nbytes, 4 * (count + 1) * nbytes - 1):
                    assert memory.spare_slots(params, batch, room) == min(count, most)


def test_a_cache_without_pages() -> None:
    params = KVCacheParams(DType.float32, 1, 4, page_size=2)
    params.page_size = None
    with pytest.raises(ValueError, match="page_size is not set"):
        memory.page_size_of(params)
