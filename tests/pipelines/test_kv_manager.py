"""The KV cache's tensors against page tables and lengths computed by hand; its memory; images and prefixes."""

from __future__ import annotations

import numpy as np
import pytest

from max.driver import CPU
from max.dtype import DType
from max.interfaces import ImageMetadata, RequestID
from max.nn.kv_cache.cache_params import CacheGroup, KVCacheParams, KVCacheStrategy
from max.pipelines.core import TextAndVisionContext, TextContext
from max.pipelines.kv_cache import estimate_kv_cache_size
from max.pipelines.kv_cache.manager import PagedKVCacheManager, load_kv_manager
from max.pipelines.kv_cache.memory import (
    cache_bytes,
    fitting_length,
    page_bytes,
    pages_for_memory,
    sequence_bytes,
)
from max.pipelines.kv_cache.page_manager import PageManager
from max.pipelines.kv_cache.page_pool import pages_of
from max.pipelines.kv_cache.page_tables import OutOfPagesError
from max.pipelines.kv_cache.request_pages import RequestPages
from max.pipelines.kv_cache.state_slots import StateSlots

# 2 layers, 3 heads of 4: a page of 5 tokens in float32 takes 2 * 2 * 5 * 3 * 4 * 4 bytes
PARAMS = KVCacheParams(DType.float32, 3, 4, page_size=5, enable_prefix_caching=True)
PAGE_BYTES = 960


def manager(pages: int = 8) -> PagedKVCacheManager:
    return PagedKVCacheManager(
        PARAMS, num_layers=2, num_pages=pages, max_batch_size=4, max_seq_len=40, devices=[CPU()]
    )


def context(length: int, new: int = 20, first: int = 0) -> TextContext:
    return TextContext(tokens=np.arange(first, first + length), max_length=length + new)


def arrays(inputs) -> tuple[list, list, list]:
    """Lengths, page tables and maxima."""
    parts = inputs.cache_lengths, inputs.lookup_table, inputs.max_lengths
    assert all(part.dtype == DType.uint32 for part in parts)
    return tuple(part.to_numpy().tolist() for part in parts)


def reserved(cache: RequestPages, *contexts: TextContext, steps: int = 1) -> None:
    for one in contexts:
        if not cache.contains(one.request_id):
            cache.claim(one.request_id)
        cache.alloc(one, steps)


def test_the_blocks():
    cache = manager()
    assert cache.blocks.shape == (8, 2, 2, 5, 3, 4) and cache.blocks.dtype == DType.float32
    assert not cache.blocks.to_numpy().any()
    params = KVCacheParams(DType.bfloat16, 4, 8, page_size=2, n_devices=2)
    half = PagedKVCacheManager(
        params, num_layers=1, num_pages=3, max_batch_size=1, max_seq_len=6, devices=[CPU(), CPU(1)]
    )
    assert half.blocks.shape == (3, 2, 1, 2, 2, 8), "the heads of one device"
    ((other,),) = half.other_blocks
    assert other.shape == half.blocks.shape and (half.blocks.device, other.device) == (
        CPU(),
        CPU(1),
    )
    assert page_bytes(params, 1) == 2 * (2 * 1 * 2 * 2 * 8 * 2), "on both devices"
    unpaged = KVCacheParams(DType.float32, 3, 4, cache_strategy=KVCacheStrategy.MODEL_DEFAULT)
    with pytest.raises(ValueError, match="page_size is not set"):
        PagedKVCacheManager(
            unpaged, num_layers=2, num_pages=8, max_batch_size=4, max_seq_len=40, devices=[CPU()]
        )
    with pytest.raises(ValueError, match="2 devices; the cache's shape is for 1"):
        PagedKVCacheManager(
            PARAMS, num_layers=2, num_pages=8, max_batch_size=4, max_seq_len=40, devices=[CPU(), CPU()]
        )  # fmt: skip


@pytest.mark.parametrize("dtype", [DType.float32, DType.bfloat16, DType.int8])
def test_the_start_of_a_page_is_copied(dtype: DType) -> None:
    params = KVCacheParams(dtype, 6, 5, page_size=7, n_devices=2, enable_prefix_caching=True)
    cache = PagedKVCacheManager(
        params,
        num_layers=3,
        num_pages=4,
        max_batch_size=1,
        max_seq_len=20,
        devices=[CPU(), CPU(1)],
    )
    ((other,),) = cache.other_blocks
    (pool,) = cache.pages.pools
    arrays = [block.view(DType.uint8).to_numpy() for block in (cache.blocks, other)]
    rng = np.random.default_rng(3)
    for length in (1, 4, 7):
        for array in arrays:
            array[:] = rng.integers(0, 256, array.shape)
        before = [array.copy() for array in arrays]
        assert pool.copy is not None
        pool.copy(2, 1, length)
        for array, old in zip(arrays, before, strict=True):
            old[1, :, :, :length] = old[2, :, :, :length]
            np.testing.assert_array_equal(array, old)


def test_the_inputs_of_a_step():
    cache, a, b = manager(), context(11), context(3)
    reserved(cache, a, b)
    lengths, tables, most = arrays(cache.get_runtime_inputs([a, b]))
    assert (lengths, tables, most) == ([0, 0], [[0, 1, 2], [3, 0, 0]], [[11, 0]])
    a.update(7)
    reserved(cache, a)
    lengths, tables, most = arrays(cache.get_runtime_inputs([b, a]))
    assert (lengths, tables, most) == ([0, 11], [[3, 0, 0], [0, 1, 2]], [[3, 11]])
    empty = cache.get_runtime_inputs([])
    assert arrays(empty) == ([], [], [[0, 0]]) and empty.lookup_table.shape == (0, 1)
    other = manager()
    reserved(other, a)
    assert arrays(other.advance(empty, [a]))[:2] == ([11], [[0, 1, 2]]), "nothing to update"


def test_the_inputs_of_several_steps():
    cache, a, b = manager(), context(4), context(9)
    reserved(cache, a, b)
    b.update(1)
    reserved(cache, a, b, steps=3)
    inputs = cache.get_runtime_inputs([a, b], 3)
    lengths, tables, most = arrays(inputs)
    assert (lengths, tables) == ([0, 9], [[0, 3, 0], [1, 2, 4]])
    # new and cached tokens: the first step; then 4 and 10 cached; then 5 and 11
    assert most == [[4, 9], [1, 10], [1, 11]]
    inputs = cache.next_step(inputs, [a, b], 1)
    assert arrays(inputs)[::2] == ([4, 10], [[1, 10], [1, 11]])
    inputs = cache.next_step(inputs, [a, b], 2)
    assert arrays(inputs)[::2] == ([5, 11], [[1, 11]])
    assert inputs.blocks is cache.blocks


def test_the_same_batch_advances_in_place():
    cache, a, b = manager(), context(5), context(9)
    reserved(cache, a, b)
    inputs = cache.get_runtime_inputs([a, b])
    for token, table in ((1, [[0, 3], [1, 2]]), (2, [[0, 3], [1, 2]])):
        for one in (a, b):
            one.update(token)
        if token == 1:
            reserved(cache, a, b)
            assert cache.advance(inputs, [a, b]) is inputs
            assert arrays(inputs) == ([5, 9], table, [[1, 9]])
    # b's eleventh token needs a third page: the table is reallocated
    reserved(cache, a, b)
    grown = cache.advance(inputs, [a, b])
    assert grown is not inputs
    assert arrays(grown) == ([6, 10], [[0, 3, 0], [1, 2, 4]], [[1, 10]])
    assert cache.advance(grown, [a, b]) is grown
    # inputs that are not those of the last step, or of another batch
    assert cache.advance(inputs, [a, b]) is not inputs
    last = cache.get_runtime_inputs([a, b])
    fresh = cache.advance(last, [b])
    assert fresh is not last and arrays(fresh)[0] == [10]
    several = cache.get_runtime_inputs([a, b], 2)
    assert cache.advance(several, [a, b]) is not several


def test_a_page_table_of_full_width_is_updated_in_place():
    cache, a, b = manager(), context(5), context(12)
    reserved(cache, a, b)
    inputs = cache.get_runtime_inputs([a, b])
    a.update(0)
    b.update(0)
    reserved(cache, a, b, steps=6)
    assert arrays(inputs)[1] == [[0, 0, 0], [1, 2, 3]]
    grown = cache.advance(inputs, [a, b])
    assert arrays(grown)[1] == [[0, 4, 5, 0], [1, 2, 3, 6]]
    cache.release(a.request_id)
    cache.claim(a.request_id)
    a.reset()
    reserved(cache, a)
    a.set_token_indices(start_idx=5)
    assert cache.advance(grown, [a, b]) is grown
    assert arrays(grown)[1][0][:2] == cache.pages.pages(a.request_id)


@pytest.mark.parametrize(("length", "pages"), [(0, 0), (1, 1), (5, 1), (6, 2), (10, 2), (11, 3)])
def test_pages_of(length, pages):
    assert pages_of(length, 5) == pages


def test_the_memory_of_a_cache():
    assert page_bytes(PARAMS, 2) == PAGE_BYTES
    assert cache_bytes(PARAMS, 2, max_batch_size=3, max_seq_len=11) == 9 * PAGE_BYTES
    latents = KVCacheParams(DType.bfloat16, 1, 40, page_size=5, is_mla=True)
    assert page_bytes(latents, 3) == 3 * 5 * 40 * 2
    of_latents = PagedKVCacheManager(
        latents, num_layers=3, num_pages=7, max_batch_size=2, max_seq_len=11, devices=[CPU()]
    )
    assert tuple(of_latents.blocks.shape) == (7, 1, 3, 5, 1, 40)
    size = dict(max_batch_size=3, max_seq_len=11)
    assert pages_for_memory(PARAMS, 2, **size, available_bytes=None) == (9,)
    assert pages_for_memory(PARAMS, 2, **size, available_bytes=PAGE_BYTES * 9) == (9,)
    assert pages_for_memory(PARAMS, 2, **size, available_bytes=PAGE_BYTES * 9 - 1) == (8,)
    assert pages_for_memory(PARAMS, 2, **size, available_bytes=PAGE_BYTES * 99) == (9,)
    assert pages_for_memory(PARAMS, 2, **size, available_bytes=PAGE_BYTES * 3) == (3,)
    big = KVCacheParams(DType.float32, 64, 128, page_size=64)
    with pytest.raises(ValueError, match=r"max_length 130 needs 24 MiB, and 20 MiB are available"):
        pages_for_memory(big, 2, max_batch_size=1, max_seq_len=130, available_bytes=20 * 2**20)
    for available, expected in ((10**9, 9 * PAGE_BYTES), (1000, 1000)):
        assert estimate_kv_cache_size(PARAMS, 3, 11, 2, available, [CPU()]) == expected
    assert estimate_kv_cache_size(PARAMS, None, 11, 2, 10**9, [CPU()]) == 3 * PAGE_BYTES


def test_the_memory_of_groups():
    """A group without a window, and one with a window of 6 whose layers have other heads."""
    window = CacheGroup(layers=3, n_kv_heads=1, head_dim=8, window=6)
    params = KVCacheParams(DType.float32, 3, 4, page_size=5, groups=(window,))
    full, small = 960, 2 * 3 * 5 * 8 * 4
    # chunks of 4 tokens: the window holds at most 14 tokens at a time
    size = dict(max_seq_len=31, step_tokens=4)
    assert sequence_bytes(params, 2, **size) == 7 * full + 3 * small
    assert sequence_bytes(params, 2, 31) == 7 * (full + small)
    assert cache_bytes(params, 2, max_batch_size=2, **size) == 2 * (7 * full + 3 * small)

    def pages(available: int | None, batch: int = 3) -> tuple[int, ...]:
        return pages_for_memory(params, 2, max_batch_size=batch, available_bytes=available, **size)

    assert pages(None) == pages(21 * full + 9 * small) == (21, 9)
    # with less memory the pool without a window shrinks first, then that of the window
    assert pages(15 * full + 9 * small) == (15, 9)
    assert pages(8 * (full + small)) == (8, 8)
    assert pages(7 * full + 4 * small) == (7, 3)
    assert pages(7 * full + 3 * small) == (7, 3)
    with pytest.raises(ValueError, match="give a smaller max_length"):
        pages(7 * full + 3 * small - 1)
    for available, length in (
        (7 * full + 3 * small, 31),
        (7 * full + 3 * small - 1, 30),
        (2 * (full + small), 10),
        (full, 0),
    ):
        assert fitting_length(params, 2, 31, available, 4) == length
    cache = load_kv_manager(params, 3, 31, 2, [CPU()], None, step_tokens=4)
    assert [tuple(b.shape) for b in (cache.blocks, *cache.group_blocks)] == [
        (21, 2, 2, 5, 3, 4), (9, 2, 3, 5, 1, 8),
    ]  # fmt: skip
    assert (cache.total_num_pages, cache.free_pages, cache.used_pages) == (30, 9, 0)


def test_the_inputs_of_groups():
    groups = (CacheGroup(1, 1, 8, window=4),)
    params = KVCacheParams(DType.float32, 3, 4, page_size=5, groups=groups)
    cache = PagedKVCacheManager(
        params, num_layers=2, num_pages=(8, 4), max_batch_size=4, max_seq_len=40, devices=[CPU()]
    )
    a, b = context(11), context(3)
    reserved(cache, a, b)
    inputs = cache.get_runtime_inputs([a, b])
    tensors = list(inputs)
    assert len(tensors) == 6 and tensors[4] is cache.group_blocks[0]
    assert tensors[5].to_numpy().tolist() == [[0, 1, 2], [3, 0, 0]] == arrays(inputs)[1]
    for one in (a, b):
        one.update(7)
    cache.step([a, b])
    reserved(cache, a, b)
    # token 11 of a attends to tokens 8 to 11
    assert cache.advance(inputs, [a, b]) is inputs
    assert arrays(inputs)[1] == [[0, 1, 2], [3, 0, 0]]
    assert inputs.group_tables[0].to_numpy().tolist() == [[4, 1, 2], [3, 0, 0]]
    assert cache.used_pages == 7 and cache.free_pages == 1


def test_load_kv_manager():
    for batch, page_size, pages in ((2, None, 6), (None, 5, 3)):
        cache = load_kv_manager(PARAMS, batch, 11, 2, [CPU()], None, page_size=page_size)
        assert cache.total_num_pages == cache.free_pages == pages
        assert (cache.page_size, cache.max_batch_size, cache.max_seq_len) == (5, batch or 1, 11)
    cache = load_kv_manager(PARAMS, 2, 11, 2, [CPU()], None, PAGE_BYTES * 4)
    assert cache.total_num_pages == 4
    with pytest.raises(ValueError, match="page_size is 7, and the cache's shape has 5"):
        load_kv_manager(PARAMS, 2, 11, 2, [CPU()], None, page_size=7)


def test_pages_of_contexts():
    cache, a = RequestPages(PageManager(4, 5, True)), context(12)
    cache.claim(a.request_id)
    assert cache.missing_pages(a, 1) == 3 and cache.missing_pages(a, 4) == 3
    assert cache.missing_pages(a, 5) == 4
    with pytest.raises(OutOfPagesError):
        cache.alloc(a, 10)
    cache.alloc(a)
    a.update(0)
    cache.step([a])
    b = context(15)
    cache.claim(b.request_id)
    assert cache.reuse_prefix(b) == 10 == b.start_idx
    c = context(15)
    c.set_token_indices(start_idx=1)
    cache.claim(c.request_id)
    assert cache.reuse_prefix(c) == 0 and c.start_idx == 1, "it has tokens in the cache already"
    with pytest.raises(KeyError, match="has no page table"):
        cache.missing_pages(context(1), 1)


@pytest.mark.parametrize(("length", "pages"), [(14, 3), (15, 3), (16, 4)])
def test_a_step_needs_the_pages_of_its_tokens(length, pages):
    cache, one = RequestPages(PageManager(4, 5)), context(length)
    cache.claim(one.request_id)
    cache.alloc(one)
    assert len(cache.pages.pages(one.request_id)) == pages


@pytest.mark.parametrize(("length", "shared"), [(9, 5), (10, 10), (11, 10)])
def test_a_page_is_shared_from_the_step_that_fills_it(length, shared):
    cache, one, other = RequestPages(PageManager(9, 5, True)), context(length), context(20)
    reserved(cache, one)
    one.update(0)
    cache.step([one])
    cache.claim(other.request_id)
    assert cache.reuse_prefix(other) == shared


def with_images(*hashes: int) -> TextAndVisionContext:
    images = [
        ImageMetadata(start_idx=i, end_idx=i + 1, pixel_values=np.zeros(1), image_hash=value)
        for i, value in enumerate(hashes)
    ]
    return TextAndVisionContext(
        request_id=RequestID(), tokens=np.full(20, 7), max_length=30, vision_token_ids=[7], images=images
    )  # fmt: skip


def shared_tokens(cache: RequestPages, first: TextContext, second: TextContext) -> int:
    """Runs two requests, and returns the tokens of the second that the first had brought."""
    for one in (first, second):
        cache.claim(one.request_id)
        reused = cache.reuse_prefix(one)
        assert one.start_idx == reused
        cache.alloc(one)
        one.update(0)
        cache.step([one])
        cache.release(one.request_id)
    cache.pages.check()
    return reused


@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [
        ((), (), 15),
        ((5,), (5,), 15),
        ((5,), (6,), 0),
        ((5,), (), 0),
        ((5, 6), (6, 5), 0),
        (tuple(range(10)), tuple(range(10)), 15),
        (tuple(range(10)), (*range(9), 99), 5),  # the last of many images, in the second page
        (tuple(range(6)), (*range(5), 99), 5),  # the first token of the second page
        ((-1,), (-1,), 0),  # images without a hash never match
        ((5, -1), (5, -1), 0),
        ((*range(6), -1), (*range(6), -1), 5),  # but the pages before them do
        ((*range(5), -1), (*range(5), -1), 5),
        ((*range(5), -1, *range(5), -1), (*range(5), -1, *range(5), -1), 5),  # two without
        ((2**63 - 1, -(2**63)), (2**63 - 1, -(2**63)), 15),
    ],
    ids=str,
)
def test_requests_share_pages_where_their_images_are_the_same(first, second, shared):
    cache = RequestPages(PageManager(9, 5, True))
    assert shared_tokens(cache, with_images(*first), with_images(*second)) == shared


def test_pages_with_an_image_without_a_hash_are_not_those_of_the_same_tokens():
    cache = RequestPages(PageManager(9, 5, True))
    image = ImageMetadata(start_idx=4, end_idx=5, pixel_values=np.zeros(1))
    tokens = np.full(20, 7)
    seen = TextAndVisionContext(tokens=tokens, max_length=30, vision_token_ids=[7], images=[image])
    assert shared_tokens(cache, TextContext(tokens=tokens, max_length=30), seen) == 0


def test_requests_that_are_claimed_by_their_contexts():
    """The first allocation adds the cached prefix; later ones do not, and a claim without one leaves nothing."""
    cache, first = RequestPages(PageManager(20, 5, True)), context(12)
    cache.claim(first)
    cache.alloc(first)
    cache.alloc(first, 5)
    assert len(cache.pages.pages(first.request_id)) == 4
    first.update(0)
    cache.step(first)
    second, third = context(12), context(12)
    cache.claim(second)
    assert second.start_idx == 0
    cache.alloc(second)
    assert second.start_idx == 10 and len(cache.pages.pages(second.request_id)) == 3
    second.update(0)
    cache.alloc(second)
    cache.claim(third.request_id)
    cache.alloc(third)
    assert third.start_idx == 0, "its tokens are read by the caller"
    cache.release(third)
    cache.claim(third)
    cache.release(third)
    cache.claim(third.request_id)
    cache.alloc(third)
    assert third.start_idx == 0
    with pytest.raises(ValueError, match="the replica is 1; there is one, 0"):
        cache.claim(context(3), 1)
    cache.forget_prefixes()
    fourth = context(12)
    cache.claim(fourth)
    cache.alloc(fourth)
    assert fourth.start_idx == 0


def test_an_image_is_not_kept_in_part():
    """A prefix that ends within an image is cut to the page before it."""

    def asked(value: int, tail: int) -> TextAndVisionContext:
        image = ImageMetadata(start_idx=7, end_idx=13, pixel_values=np.zeros(1), image_hash=value)
        tokens = np.array([*range(20, 27), *[7] * 6, *[tail] * 7])
        return TextAndVisionContext(
            tokens=tokens, max_length=30, vision_token_ids=[7], images=[image]
        )

    cache = RequestPages(PageManager(19, 5, True))
    # the pages of tokens 5 to 9 and 10 to 14 hold the image
    assert shared_tokens(cache, asked(1, 3), asked(1, 3)) == 15
    assert shared_tokens(cache, asked(1, 3), asked(1, 4)) == 5
    assert shared_tokens(cache, asked(1, 3), asked(2, 3)) == 5
    with pytest.raises(ValueError, match="within the image"):
        asked(1, 3).set_token_indices(start_idx=10)


@pytest.mark.parametrize("salts", [("", ""), ("key", "key"), ("key", "")], ids=str)
@pytest.mark.parametrize("adapters", [("", ""), ("a", "a"), ("a", "b"), ("", "b")], ids=str)
def test_requests_share_pages_where_their_adapters_are_the_same(adapters, salts):
    cache = RequestPages(PageManager(9, 5, True))
    first, second = (
        TextContext(tokens=np.arange(20), max_length=30, adapter=adapter, cache_salt=salt)
        for adapter, salt in zip(adapters, salts, strict=True)
    )
    equal = adapters[0] == adapters[1] and salts[0] == salts[1]
    assert shared_tokens(cache, first, second) == (15 if equal else 0)


def test_adapters_and_salts_are_told_apart():
    cache, other = (RequestPages(PageManager(9, 5, True)) for _ in range(2))
    named = [("", ""), ("ab", ""), ("", "ab"), ("a", "b"), ("b", "a"), ("\ud800", "")]
    salts = [
        cache._salt(TextContext(tokens=np.arange(2), max_length=9, adapter=a, cache_salt=s))
        for a, s in named
    ]
    assert len(set(salts)) == len(named) and salts[0] == b""
    # pages on disk serve the same adapter in another engine; those with a salt need the key of the folder
    one = TextContext(tokens=np.arange(2), max_length=9, adapter="ab")
    assert other._salt(one) == cache._salt(one)


@pytest.mark.parametrize("states", [False, True])
def test_a_request_goes_back(states: bool):
    """Tokens are removed from a context and from its pages; what is read again depends on the cache."""
    cache = RequestPages(PageManager(9, 5, not states), StateSlots(1) if states else None)
    one = context(12)
    reserved(cache, one)
    for token in (3, 4, 5):
        one.update(token)
        cache.step([one])
        cache.alloc(one)
    assert (one.start_idx, one.end_idx, one.generated_tokens.tolist()) == (14, 15, [3, 4, 5])
    cache.truncate(one, 15)
    assert one.start_idx == 14
    cache.truncate(one, 14)
    assert one.start_idx == (0 if states else 13) and one.next_tokens[-1] == 4
    assert len(cache.pages.pages(one.request_id)) == (0 if states else 3)
    cache.alloc(one)
    for token in (6, 7):
        one.update(token)
        cache.step([one])
        cache.alloc(one)
    assert one.generated_tokens.tolist() == [3, 4, 6, 7] and one.start_idx == 15
    cache.truncate(one, 14)
    assert one.start_idx == (0 if states else 10), "the third page is full"
    one.to_generation_output()
    with pytest.raises(
        ValueError, match="13 of 14 tokens are to be kept; the prompt and the tokens"
    ):
        cache.truncate(one, 13)
    assert one.end_idx == 14
    cache.release(one)
    cache.truncate(one, 20)
    cache.pages.check()


def test_pages_for_drafts_are_reserved_and_given_back():
    cache, one = RequestPages(PageManager(9, 5, True)), context(14)
    reserved(cache, one)
    one.update(0)
    cache.step([one])
    one.set_draft([1, 2, 3, 4, 5, 6])
    assert cache.missing_pages(one, 1) == 2
    cache.alloc(one)
    assert len(cache.pages.pages(one.request_id)) == 5
    for token in (1, 2, 9):  # two are accepted
        one.update(token)
    assert one.draft_length == 0 and one.start_idx == 17
    cache.step([one])
    assert len(cache.pages.pages(one.request_id)) == 4
    cache.pages.check()
