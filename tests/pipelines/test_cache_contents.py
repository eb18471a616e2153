"""Contents of cached pages, which files of prefixes hold: bytes of all devices and groups, against NumPy."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from max._host.machine import byte_size
from max.driver import CPU, Tensor
from max.dtype import DType
from max.interfaces import RequestID
from max.nn.kv_cache.cache_params import CacheGroup, KVCacheParams
from max.nn.kv_cache.recurrent_state import RecurrentState
from max.pipelines.core import TextContext
from max.pipelines.kv_cache import manager
from max.pipelines.kv_cache.manager import PagedKVCacheManager, load_kv_manager
from max.pipelines.kv_cache.memory import (
    fitting_length,
    group_shapes,
    page_bytes,
    pages_for_memory,
    spare_slots,
)

# pages of 3 tokens on two devices: 2 layers of 2 heads of 4, and 1 layer of 6 heads of 5
GROUPS = (CacheGroup(1, 6, 5),)
PARAMS = KVCacheParams(
    DType.float32, 2, 4, page_size=3, n_devices=2, enable_prefix_caching=True, groups=GROUPS
)
SIZES = [2 * 2 * 3 * 2 * 4 * 4, 2 * 1 * 3 * 6 * 5 * 4]


def cache_of(pages: int = 6) -> PagedKVCacheManager:
    return PagedKVCacheManager(
        PARAMS, num_layers=2, num_pages=(pages, pages), max_batch_size=2, max_seq_len=30, devices=[CPU(), CPU(1)]
    )  # fmt: skip


def memory(cache: PagedKVCacheManager) -> list[list[np.ndarray[Any, Any]]]:
    """For each group the elements on each device, which share the cache's memory."""
    firsts = [cache.blocks, *cache.group_blocks]
    groups: list[list[Tensor]] = [
        [first, *rest] for first, rest in zip(firsts, cache.other_blocks, strict=True)
    ]
    return [[np.from_dlpack(block) for block in blocks] for blocks in groups]


def filled(cache: PagedKVCacheManager) -> list[list[np.ndarray[Any, Any]]]:
    """Random elements in all pages."""
    arrays, rng = memory(cache), np.random.default_rng(7)
    for array in (array for arrays_of_group in arrays for array in arrays_of_group):
        array[:] = rng.standard_normal(array.shape)
    return arrays


def committed(cache: PagedKVCacheManager, name: str, first: int, tokens: int) -> list[list[int]]:
    """Runs a request; returns the full pages that it held, of each group."""
    request = RequestID(name)
    cache.pages.claim(request)
    cache.pages.reserve(request, tokens)
    tables = [list(table)[: tokens // 3] for table in cache.pages.tables(request)]
    cache.pages.commit(request, np.arange(first, first + tokens))
    cache.pages.release(request)
    return tables


def test_sizes() -> None:
    cache = cache_of()
    assert cache.page_sizes() == SIZES and cache.num_groups == 2
    assert all(pool.swap is None for pool in cache.pages.pools)


def test_pages_go_to_another_cache_byte_by_byte() -> None:
    """The pages of all groups, in order of use; the other cache serves their prefix then."""
    cache, other = cache_of(), cache_of()
    arrays = filled(cache)
    tables = committed(cache, "a", 0, 6)
    groups = cache.cached_prefixes(10**6)
    assert [group.page_bytes for group in groups] == SIZES
    held: dict[bytes, bytes] = {}
    for number, (group, table, devices) in enumerate(zip(groups, tables, arrays, strict=True)):
        contents = [group.content(place) for place in range(len(group.hashes))]
        wanted = [b"".join(array[page].tobytes() for array in devices) for page in table]
        assert sorted(map(bytes, filter(None, contents))) == sorted(wanted)
        for page_hash, content in zip(group.hashes, contents, strict=True):
            assert content is not None and other.fill_page(number, page_hash, content)
            assert not other.fill_page(number, page_hash, b"\0" * len(content))
            held[page_hash] = content
    request = RequestID("b")
    other.pages.claim(request)
    assert other.pages.reuse_prefix(request, np.arange(7)) == 6
    new = other.pages.tables(request)
    for copied, to, devices, own in zip(memory(other), new, arrays, tables, strict=True):
        for array, source in zip(copied, devices, strict=True):
            np.testing.assert_array_equal(array[to[:2]], source[own])
            untouched = [page for page in range(6) if page not in to[:2]]
            assert not array[untouched].any()


def test_a_full_cache_takes_no_page() -> None:
    cache = cache_of(2)
    before = filled(cache)[0][0].copy()
    request = RequestID("a")
    cache.pages.claim(request)
    cache.pages.reserve(request, 6)
    assert not cache.fill_page(0, b"x", bytes(SIZES[0]))
    np.testing.assert_array_equal(memory(cache)[0][0], before)


def test_the_latest_pages_that_fit() -> None:
    cache = cache_of()
    first, second = committed(cache, "a", 0, 6), committed(cache, "b", 50, 6)
    order = [page_hash for page_hash, _ in cache.pages.pools[0].with_content()]
    assert len(order) == 4 and not set(first[0]) & set(second[0])
    both = sum(SIZES)
    cases = ((0, 0), (both - 1, 0), (both, 1), (2 * both + 1, 2), (4 * both, 4), (99 * both, 4))
    for room, count in cases:
        groups = cache.cached_prefixes(room)
        assert [len(group.hashes) for group in groups] == [count, count]
        assert list(groups[0].hashes) == order[4 - count :]
    known = [set(order[1:3]), set[bytes]()]
    groups = cache.cached_prefixes(99 * both, known)
    assert list(groups[0].hashes) == [order[0], order[3]] and len(groups[1].hashes) == 4
    # those that are left out do not take the room of others
    assert list(cache.cached_prefixes(2 * both, known)[0].hashes) == [order[0], order[3]]


def test_what_is_overwritten_meanwhile_is_lost() -> None:
    cache = cache_of(3)
    filled(cache)
    committed(cache, "a", 0, 6)
    group = cache.cached_prefixes(10**6)[0]
    assert all(group.content(place) is not None for place in range(2))
    # the two pages are the only ones with a content; a third one is empty and is taken first
    request = RequestID("b")
    cache.pages.claim(request)
    cache.pages.reserve(request, 6)
    assert [group.content(place) is None for place in range(2)].count(True) == 1


def test_several_steps_of_no_request() -> None:
    cache = cache_of()
    inputs = cache.get_runtime_inputs([], 3)
    assert cache.device == inputs.max_lengths.device == CPU()
    assert inputs.max_lengths.to_numpy().tolist() == [[0, 0], [1, 0], [1, 1]]


def test_slots_for_drafts_and_what_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A draft's saved states take slots from the memory of pages; the sizes are computed by hand."""
    state = RecurrentState("ssm", 3, (4, 5))
    params = KVCacheParams(DType.float32, 1, 4, page_size=5, states=(state,))
    slot, page = 3 * 4 * 5 * 4, 2 * 2 * 5 * 4 * 4
    cases = ((False, None, 0), (True, None, 2), (True, 4 * slot + 2 * page, 1))
    for drafts, memory_bytes, spares in cases:
        caplog.clear()
        with caplog.at_level(logging.INFO, "max.pipelines"):
            cache = load_kv_manager(
                params, 2, 10, 2, [CPU()], None, memory_bytes, drafts=drafts  # pyright: ignore[reportArgumentType]
            )  # fmt: skip
        assert cache.states[0].shape == (2 + spares, 3, 4, 5)
        slots, pages = 2 + spares, cache.total_num_pages
        assert f"recurrent states: {slots} slots, {byte_size(slots * slot)}\n" in caplog.text
        assert f"KV cache: {pages} pages of 5 tokens, {byte_size(pages * page)}\n" in caplog.text
        assert pages == (4 if memory_bytes is None else 2)
        assert "swapped to the host" not in caplog.text
    assert spare_slots(PARAMS, 2, None) == 0, "there are no states"
    assert fitting_length(params, 1, 10, 0) == 0, "not even the states fit"
    for count in (1, 2, 3):  # at most a fourth of the memory
        assert spare_slots(params, 9, 4 * count * slot) == count
        assert spare_slots(params, 9, 4 * count * slot - 1) == count - 1
    without = load_kv_manager(params, 2, 10, 2, [CPU()], None)  # pyright: ignore[reportArgumentType]
    assert without.states[0].shape == (2, 3, 4, 5)
    caplog.clear()
    with caplog.at_level(logging.INFO, "max.pipelines"):
        cache_of()
    assert "recurrent states" not in caplog.text


def test_trees_of_some_requests_of_a_batch() -> None:
    """Rows of a request without a tree see all before them; an advance without trees forgets those before."""
    params = KVCacheParams(DType.float32, 1, 4, page_size=16, verifies_trees=True)
    cache = PagedKVCacheManager(
        params, num_layers=1, num_pages=9, max_batch_size=2, max_seq_len=30, devices=[CPU()]
    )
    one, other = (TextContext(tokens=np.arange(n), max_length=30) for n in (3, 2))
    for each in (one, other):
        cache.claim(each.request_id)
        cache.alloc(each)
    inputs = cache.get_runtime_inputs([one, other])
    assert inputs.ancestors is not None and not inputs.ancestors.num_elements
    for each in (one, other):
        each.update(1)
    assert cache.advance(inputs, [one, other]) is inputs
    one.set_draft([5, 6, 7], [-1, -1, 0])
    cache.alloc(one)
    inputs = cache.advance(inputs, [one, other])
    assert inputs.ancestors is not None
    # 4 rows of the one request and 1 of the other, after 3 and 2 tokens
    assert inputs.max_lengths.to_numpy().tolist() == [[4, 3]]
    # bit i: the row sees row i of the step: the certain one, the drafts on its path, and itself
    assert inputs.ancestors.to_numpy().tolist() == [0b1, 0b11, 0b101, 0b1011, 0]
    one.set_draft([], [])
    inputs = cache.advance(inputs, [one, other])
    assert inputs.ancestors is not None and not inputs.ancestors.num_elements


def test_inputs_on_another_device() -> None:
    """They are copies there, so that each step gets new ones."""
    params = KVCacheParams(DType.float32, 1, 4, page_size=4)
    cache = PagedKVCacheManager(
        params, num_layers=1, num_pages=9, max_batch_size=2, max_seq_len=30, devices=[CPU(1)]
    )
    one = TextContext(tokens=np.arange(3), max_length=30)
    cache.claim(one.request_id)
    cache.alloc(one)
    inputs = cache.get_runtime_inputs([one])
    assert all(value.device == CPU(1) for value in inputs)
    one.update(5)
    cache.alloc(one)
    later = cache.advance(inputs, [one])
    lengths = [each.cache_lengths.to(CPU()).to_numpy().tolist() for each in (inputs, later)]
    assert lengths == [[0], [3]]


@pytest.mark.parametrize("seed", range(8))
def test_pools_of_groups_are_as_large_as_memory_allows(seed: int) -> None:
    """Against a search through all sizes: equal pools, unless a full batch needs fewer pages of a group."""
    rng = np.random.default_rng(seed)
    window, batch, length, step = rng.integers((1, 1, 8, 1), (20, 7, 60, 9)).tolist()
    params = KVCacheParams(
        DType.float32, 1, 4, page_size=5, groups=(CacheGroup(int(rng.integers(1, 4)), 1, 8, window),)
    )  # fmt: skip

    layers = 1 + seed % 2

    def pages(count: int, room: int | None) -> tuple[int, ...]:
        return pages_for_memory(
            params, layers, max_batch_size=count, max_seq_len=length, available_bytes=room, step_tokens=step
        )  # fmt: skip

    sizes = np.array([page_bytes(*group) for group in group_shapes(params, layers)])
    one = np.array(pages(1, None))
    least, most = int(one @ sizes), int(batch * one @ sizes)
    assert pages(batch, None) == tuple(batch * one)
    rooms = [least, least + int(sizes.min()), most - 1, most, *rng.integers(least, most + 99, 30)]
    for room in map(int, rooms):
        expected = None
        for full in range(batch, 0, -1):
            pools = [np.minimum(n, full * one) for n in range(int(full * one.max()) + 1)]
            fitting = [pool for pool in pools if pool @ sizes <= room][-1]
            if (fitting >= one).all():
                expected = tuple(fitting)
                break
        if room >= least:
            assert pages(batch, room) == expected


def test_pages_are_copied_to_the_host_and_back() -> None:
    """Of all devices and groups; a slot keeps its copy whatever becomes of the page."""
    arrays, used = list[np.ndarray[Any, Any]](), list[Tensor]()
    rng = np.random.default_rng(3)
    for shape in ((4, 2, 2, 3, 2, 4), (4, 2, 1, 3, 6, 5)):
        arrays.append(rng.standard_normal(shape).astype(np.float32))
        used.append(Tensor.from_numpy(arrays[-1]))
    host = manager._HostPages(used)
    before = [array.copy() for array in arrays]
    host.save(1, 5)
    host.save(2, 0)
    for array in arrays:
        array[:] = 0
    host.restore(5, 3)
    host.restore(0, 0)
    # the slot is used again
    for array in arrays:
        array[1] = 7
    host.save(1, 5)
    host.restore(5, 2)
    for array, own in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(array[3], own[1])
        np.testing.assert_array_equal(array[0], own[2])
        assert (array[1:3] == 7).all()


def test_the_right_branch_of_a_tree_moves_to_its_begin() -> None:
    """Keys and values of all layers, groups and devices; other tokens stay."""
    cache = cache_of()
    arrays = filled(cache)
    request = RequestID("a")
    cache.pages.claim(request)
    cache.pages.reserve(request, 12)
    tables = [list(table) for table in cache.pages.tables(request)]

    def texts() -> list[list[np.ndarray[Any, Any]]]:
        """The tokens of the sequence, first axis, in each group and device."""
        return [
            [np.concatenate([array[page] for page in table], axis=2).transpose(2, 0, 1, 3, 4) for array in devices]
            for table, devices in zip(tables, arrays, strict=True)
        ]  # fmt: skip

    for begin, tokens in ((4, [0, 1, 2]), (4, []), (4, [0, 2, 5]), (1, [3]), (5, [1, 2, 6])):
        before = texts()
        cache.keep_branch(request, begin, tokens)
        for group, old_group in zip(texts(), before, strict=True):
            for now, old in zip(group, old_group, strict=True):
                wanted = old.copy()
                for place, index in enumerate(tokens):
                    wanted[begin + place] = old[begin + index]
                np.testing.assert_array_equal(now, wanted)


def test_a_model_without_trees_verifies_none() -> None:
    cache = cache_of()
    context = TextContext(tokens=np.arange(4), max_length=30)
    cache.reserve([context], 4)
    cache.get_runtime_inputs([context])
    context.set_draft([5, 6], [-1, -1])
    with pytest.raises(ValueError, match="verifies no trees"):
        cache.get_runtime_inputs([context])


@pytest.mark.parametrize(
    ("swaps", "room", "warns"), [(True, 0, True), (True, 9000, False), (False, 0, False)]
)
def test_a_swap_area_without_memory_is_told(
    swaps: bool, room: int, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    params = KVCacheParams(
        DType.float32, 2, 4, page_size=3, enable_prefix_caching=True, enable_kvcache_swapping_to_host=swaps,
        host_kvcache_swap_space_gb=1.0,
    )  # fmt: skip
    cache = load_kv_manager(
        params, max_batch_size=1, max_seq_len=6, num_layers=2, devices=[CPU()], page_size=3,
        host_memory=2 * 2 * 2 * 3 * 2 * 4 * 4 + room, session=None,  # pyright: ignore[reportArgumentType]
    )  # fmt: skip
    told = [record for record in caplog.records if "no memory is left for pages" in record.message]
    assert bool(told) is warns
    assert (cache.pages.pools[0].swap is not None) is (swaps and not warns)
