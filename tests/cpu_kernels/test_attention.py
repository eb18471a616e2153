"""Ragged paged attention against NumPy in float64."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from max._backends.program import KernelRunError
from tests.cpu_kernels.harness import interpreted, run
from tests.tolerance import assert_close

BF16 = np.dtype(ml_dtypes.bfloat16)
F16, F32 = np.dtype(np.float16), np.dtype(np.float32)


@dataclass
class Cache:
    """A filled paged cache and a ragged batch of queries over it."""

    q: np.ndarray
    offsets: np.ndarray
    blocks: np.ndarray
    cache_lengths: np.ndarray
    lookup_table: np.ndarray
    layer: int

    def operands(self, scale: float) -> list[np.ndarray]:
        new = np.diff(self.offsets.astype(np.int64))
        longest = [[max(new, default=0), max(self.cache_lengths + new, default=0)]]
        return [
            self.q,
            self.offsets,
            self.blocks,
            self.cache_lengths,
            self.lookup_table,
            np.array(longest, np.uint32),
            np.array(self.layer, np.uint32),
            np.array(scale, np.float32),
        ]


def make_cache(
    lengths: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: np.dtype,
    seed: int = 0,
) -> Cache:
    """A cache for sequences of ``lengths``: (cached tokens, new tokens)."""
    rng = np.random.default_rng(seed)
    needed = [-(-(cached + new) // page_size) for cached, new in lengths]
    pages, layers, layer = sum(needed) + 3, 2, 1
    order = rng.permutation(pages)
    lookup = np.zeros((len(lengths), max([*needed, 1])), np.uint32)
    at = 0
    for row, count in enumerate(needed):
        lookup[row, :count] = order[at : at + count]
        at += count
    total = sum(new for _, new in lengths)
    blocks = rng.standard_normal(
        (pages, 2, layers, page_size, kv_heads, head_dim), np.float32
    ).astype(dtype)
    q = rng.standard_normal((total, heads, head_dim), np.float32).astype(dtype)
    offsets = np.cumsum([0, *(new for _, new in lengths)]).astype(np.uint32)
    return Cache(
        q, offsets, blocks, np.array([cached for cached, _ in lengths], np.uint32), lookup, layer
    )


def reference(
    cache: Cache,
    scale: float,
    mask: str,
    window: int,
    softcap: float = 0.0,
    sinks: np.ndarray | None = None,
    slopes: np.ndarray | None = None,
) -> np.ndarray:
    heads, kv_heads = cache.q.shape[1], cache.blocks.shape[4]
    page_size = cache.blocks.shape[3]
    out = np.zeros(cache.q.shape)
    for b, cached in enumerate(cache.cache_lengths.astype(int)):
        begin, end = int(cache.offsets[b]), int(cache.offsets[b + 1])
        total = cached + end - begin
        tokens = np.arange(total)
        rows = cache.blocks[
            cache.lookup_table[b][tokens // page_size], :, cache.layer, tokens % page_size
        ].astype(np.float64)
        for i in range(begin, end):
            position = cached + i - begin
            if mask == "null":
                seen = np.ones(total, bool)
            else:
                seen = tokens <= position
            if mask == "sliding_window":
                seen &= tokens > position - window
            if mask == "chunked_causal":
                seen &= tokens // window == position // window
            for h in range(heads):
                keys, values = (
                    rows[seen, 0, h * kv_heads // heads],
                    rows[seen, 1, h * kv_heads // heads],
                )
                scores = keys @ cache.q[i, h].astype(np.float64) * scale
                if softcap:
                    scores = np.tanh(scores / softcap) * softcap
                if slopes is not None:
                    scores += slopes[h] * (tokens[seen] - position)
                top = scores.max() if sinks is None else max(scores.max(), sinks[h])
                weights = np.exp(scores - top)
                share = weights.sum() + (0 if sinks is None else np.exp(sinks[h] - top))
                out[i, h] = weights @ values / share
    return out


def check(
    cache: Cache,
    mask: str = "causal",
    window: int = -1,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: np.ndarray | None = None,
    slopes: np.ndarray | None = None,
    **options: object,
) -> None:
    scale = cache.q.shape[2] ** -0.5 if scale is None else scale
    got = launch(cache, mask, window, scale, softcap, sinks, slopes, **options)
    want = reference(cache, scale, mask, window, softcap, sinks, slopes)
    assert_close(got, want.astype(cache.q.dtype), dtype=cache.q.dtype)


def launch(
    cache: Cache,
    mask: str,
    window: int = -1,
    scale: float = 1.0,
    softcap: float = 0.0,
    sinks: np.ndarray | None = None,
    slopes: np.ndarray | None = None,
    **options: object,
) -> np.ndarray:
    attributes = {
        "mask": mask,
        "local_window_size": window,
        "softcap": softcap,
        "sinks": sinks is not None,
    }
    (got,) = run(
        "mo.attention.ragged.paged",
        [*cache.operands(scale), *(x for x in (sinks, slopes) if x is not None)],
        [(cache.q.dtype, cache.q.shape)],
        attributes,
        **options,
    )
    return got


@pytest.mark.parametrize("machine", ["host", "avx2", "generic"])
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_prefill_and_decode_together(dtype: np.dtype, machine: str) -> None:
    check(make_cache([(0, 19), (70, 1), (3, 50), (200, 2)], 6, 2, 64, 32, dtype), machine=machine)


LENGTHS = st.lists(st.tuples(st.integers(0, 150), st.integers(1, 60)), min_size=1, max_size=4)
# lengths are numbers at run time: two batches run the same kernel
BATCHES = st.lists(LENGTHS, min_size=2, max_size=2)
SHAPES = given(
    batches=BATCHES,
    heads=st.sampled_from([(1, 1), (4, 4), (9, 3), (8, 1)]),
    head_dim=st.sampled_from([16, 24, 33, 64, 80]),
    dtype=st.sampled_from([F32, BF16]),
    page_size=st.sampled_from([1, 7, 16, 128]),
    mask=st.sampled_from(["causal", "null", "sliding_window", "chunked_causal"]),
    window=st.sampled_from([1, 5, 33]),
    workers=st.sampled_from([1, 2]),
)


@SHAPES
@settings(max_examples=5)
def test_shapes_and_masks(
    batches: list[list[tuple[int, int]]],
    heads: tuple[int, int],
    head_dim: int,
    dtype: np.dtype,
    page_size: int,
    mask: str,
    window: int,
    workers: int,
) -> None:
    for lengths in batches:
        seed = sum(map(sum, lengths))
        cache = make_cache(lengths, *heads, head_dim, page_size, dtype, seed=seed)
        check(cache, mask, window, workers=workers)


@pytest.mark.long
@SHAPES
@settings(max_examples=300)
def test_shapes_and_masks_long(**drawn: object) -> None:
    test_shapes_and_masks.hypothesis.inner_test(**drawn)  # type: ignore[attr-defined]


@pytest.mark.parametrize("length", [255, 256, 1000, 5000])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_a_long_context_is_split(length: int, workers: int) -> None:
    check(make_cache([(length, 1)], 9, 3, 64, 128, F32), workers=workers)


@pytest.mark.parametrize("lengths", [[(700, 2)], [(700, 2), (2500, 1)]], ids=["one", "two"])
def test_a_task_has_at_most_16_parts(lengths: list[tuple[int, int]]) -> None:
    """One KV head and 4 workers allow 32 parts of 2 rows; scratch memory holds 16 a row."""
    lengths = [(cached * 4, new) for cached, new in lengths]
    check(make_cache(lengths, 4, 1, 16, 128, F32), workers=4)


@pytest.mark.parametrize("machine", ["host", "avx2", "invariant host"])
@pytest.mark.parametrize("page_size", [129, 300])
@pytest.mark.parametrize("mask", ["causal", "sliding_window"])
def test_pages_longer_than_a_block_of_keys(machine: str, page_size: int, mask: str) -> None:
    """Few rows, which read the cache in place, and many rows, which pack it."""
    cache = make_cache([(500, 1), (131, 30), (0, 290)], 2, 1, 16, page_size, F32)
    check(cache, mask, 270, machine=machine)


@pytest.mark.parametrize("machine", ["host", "avx2"])
@pytest.mark.parametrize("mask", ["causal", "sliding_window"])
@pytest.mark.parametrize("workers", [1, 2])
def test_pages_of_the_next_sequence_are_not_checked(machine: str, mask: str, workers: int) -> None:
    """Its keys are prefetched: a sequence without tokens may have any pages. Three query heads of a KV head are a pass
    of their own.
    """
    lengths = [(1, 1), (29, 1), (0, 0), (128, 1), (0, 0), (256, 1), (63, 2), (130, 1), (0, 0)]
    cache = make_cache(lengths, 9, 3, 72, 130, F16)
    for sequence, (_, new) in enumerate(lengths):
        if not new:
            cache.lookup_table[sequence] = 2**32 - 1
    check(cache, mask, 100 if mask == "sliding_window" else -1, machine=machine, workers=workers)


def test_prefetches_of_the_interpreter() -> None:
    """The interpreter checks every index, also those of views that are only prefetched."""
    cache = make_cache([(3, 1), (0, 0), (9, 1), (0, 0)], 3, 1, 12, 4, F32)
    cache.lookup_table[[1, 3]] = 2**32 - 1
    attributes = {"mask": "causal", "local_window_size": -1}
    results = [(F32, cache.q.shape)]
    (got,) = interpreted(
        "mo.attention.ragged.paged", cache.operands(0.3), results, attributes, machine="avx2"
    )
    assert_close(got, reference(cache, 0.3, "causal", -1).astype(F32), dtype=F32)


@pytest.mark.parametrize("machine", ["host", "avx2"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_long_prompts(dtype: np.dtype, machine: str) -> None:
    """Prompts whose tasks have many rows."""
    cache = make_cache([(5, 300), (130, 77), (0, 129)], 6, 2, 48, 32, dtype)
    check(cache, machine=machine, workers=1)
    check(cache, "sliding_window", 60, machine=machine, workers=1)


def test_queries_of_another_type_than_the_cache() -> None:
    cache = make_cache([(40, 70), (3, 1)], 4, 2, 64, 32, BF16)
    cache.q = np.random.default_rng(1).standard_normal(cache.q.shape).astype(F32)
    want = reference(cache, 0.125, "causal", -1)
    attributes = {"mask": "causal", "local_window_size": -1}
    (got,) = run(
        "mo.attention.ragged.paged",
        cache.operands(0.125),
        [(F32, cache.q.shape)],
        attributes,
        workers=2,
    )
    assert_close(got, want.astype(F32))


@pytest.mark.parametrize("scale", [0.0, -0.3])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_scales_that_reverse_the_order_of_scores(dtype: np.dtype, scale: float) -> None:
    check(make_cache([(70, 1), (3, 50)], 4, 2, 64, 32, dtype), scale=scale)


def numbers_by_head(heads: int, low: float, high: float) -> np.ndarray:
    return np.random.default_rng(heads).uniform(low, high, heads).astype(F32)


MACHINES = ("host", "avx2", "generic", "invariant host")
OPTIONS = list(
    itertools.product(
        ("causal_alibi", "sliding_window"), (None, (-30.0, 4.0)), (0.0, 1.5), (F32, BF16)
    )
)
"""Masks, sinks, soft caps and dtypes."""


# each machine covers half of the cases of each option
@pytest.mark.parametrize(
    ("mask", "sinks", "softcap", "dtype", "machine"),
    [(*options, MACHINES[(i ^ i >> 2) % 4]) for i, options in enumerate(OPTIONS)],
    ids=str,
)
def test_caps_sinks_and_biases(
    mask: str, sinks: tuple[float, float] | None, softcap: float, dtype: np.dtype, machine: str
) -> None:
    """Few and many rows, prompts and decoding."""
    cache = make_cache([(0, 19), (70, 1), (3, 50), (200, 2)], 6, 2, 48, 32, dtype)
    check(
        cache,
        mask,
        23,
        0.7,
        softcap,
        None if sinks is None else numbers_by_head(6, *sinks),
        numbers_by_head(6, 0.01, 0.5) if mask == "causal_alibi" else None,
        machine=machine,
    )


@pytest.mark.parametrize("scale", [0.4, -0.3])
def test_sinks_of_a_split_context(scale: float) -> None:
    """Only the first part adds the sink, also a sink above all scores."""
    cache = make_cache([(3000, 1)], 4, 2, 32, 128, F32)
    for sinks in ((3.0, 9.0), (40.0, 60.0), (-np.inf, -np.inf)):
        values = np.full(4, -np.inf, F32) if sinks[0] == -np.inf else numbers_by_head(4, *sinks)
        check(cache, scale=scale, sinks=values, workers=4)
        check(cache, "sliding_window", 1700, scale, 2.0, values, workers=4)


def test_a_split_context_with_biases() -> None:
    cache = make_cache([(3000, 1)], 6, 2, 32, 128, F32)
    check(cache, "causal_alibi", slopes=numbers_by_head(6, 0.0, 0.01), workers=4)


@pytest.mark.parametrize("name", ["sinks", "slopes"])
def test_numbers_of_other_heads_raise(name: str) -> None:
    cache = make_cache([(20, 2)], 4, 2, 16, 8, F32)
    mask = "causal" if name == "sinks" else "causal_alibi"
    with pytest.raises(NotImplementedError, match=r"is f32\[3\], expected \[4\]"):
        launch(cache, mask, **{name: numbers_by_head(3, 0.0, 1.0)})


def test_split_with_a_window() -> None:
    check(make_cache([(3000, 2)], 4, 2, 32, 128, F32), "sliding_window", 1500, workers=4)


def test_many_query_heads_of_one_key_head() -> None:
    check(make_cache([(5, 9), (100, 1)], 71, 1, 64, 16, F32))


def test_large_scores_do_not_overflow() -> None:
    check(make_cache([(100, 3)], 2, 2, 64, 16, F32), scale=30.0)


def test_an_empty_batch() -> None:
    check(make_cache([(5, 0), (3, 0)], 2, 2, 16, 16, F32))


@pytest.mark.parametrize("bad", ["page", "length", "layer"])
def test_positions_outside_the_cache_raise(bad: str) -> None:
    cache = make_cache([(20, 2)], 2, 2, 16, 8, F32)
    if bad == "page":
        cache.lookup_table[0, 1] = 1000
    if bad == "length":
        cache.cache_lengths[0] = 500
    if bad == "layer":
        cache.layer = 7
    with pytest.raises(KernelRunError, match="page|layer"):
        run(
            "mo.attention.ragged.paged",
            cache.operands(1.0),
            [(F32, cache.q.shape)],
            {"mask": "causal"},
        )
