"""Selection of cached tokens by index keys, and attention over the selected ones, against NumPy in float64."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from max._backends.program import KernelRunError
from tests.cpu_kernels.harness import run
from tests.cpu_kernels.test_attention import Cache, make_cache
from tests.tolerance import assert_close

BF16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
Array = np.ndarray[Any, Any]


def latents(lengths: list[tuple[int, int]], heads: int, size: int, page: int, dtype: Any) -> Cache:
    cache = make_cache(lengths, heads, 1, size, page, dtype)
    cache.blocks = np.ascontiguousarray(cache.blocks[:, :1])
    return cache


def visible(cache: Cache) -> list[Array]:
    """For each row the cached rows that it sees, float64."""
    rows: list[Array] = []
    page_size = cache.blocks.shape[3]
    for b, cached in enumerate(cache.cache_lengths.astype(int)):
        for i in range(int(cache.offsets[b + 1]) - int(cache.offsets[b])):
            tokens = np.arange(cached + i + 1)
            pages = cache.lookup_table[b][tokens // page_size]
            rows.append(cache.blocks[pages, 0, cache.layer, tokens % page_size, 0].astype(float))
    return rows


def best(scores: Array, count: int) -> Array:
    """The tokens of the greatest scores, of equal ones the earlier, in rising order, then -1."""
    chosen = np.sort(np.argsort(-scores, kind="stable")[:count])
    return np.pad(chosen, (0, count - len(chosen)), constant_values=-1)


def select(cache: Cache, weights: Array, count: int, **options: Any) -> Array:
    _, offsets, blocks, lengths, table, _, layer, _ = cache.operands(1.0)
    operands = [cache.q, weights, offsets, blocks, lengths, table, layer]
    shape = (len(cache.q), count)
    attrs = {"count": count}
    (out,) = run("mo.tokens.select.ragged.paged", operands, [(np.int32, shape)], attrs, **options)
    return out


def attend(cache: Cache, chosen: Array, scale: float, value_size: int, **options: Any) -> Array:
    _, offsets, blocks, lengths, table, _, layer, factor = cache.operands(scale)
    operands = [cache.q, chosen, offsets, blocks, lengths, table, layer, factor]
    shape = (*cache.q.shape[:2], value_size)
    attrs = {"value_size": value_size}
    (out,) = run(
        "mo.attention.selected.paged", operands, [(cache.q.dtype, shape)], attrs, **options
    )
    return out


LENGTHS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), min_size=1, max_size=3)


SCORES = given(
    lengths=LENGTHS,
    heads=st.sampled_from([1, 3, 12]),
    size=st.sampled_from([5, 16]),
    count=st.sampled_from([1, 4, 7, 30]),
    page=st.sampled_from([3, 16]),
    machine=st.sampled_from(["host", "avx2", "generic", "invariant host"]),
)


@SCORES
@settings(max_examples=12, deadline=None)
def test_exact_scores(
    lengths: list[tuple[int, int]], heads: int, size: int, count: int, page: int, machine: str
) -> None:
    """Of small integers, whose scores are exact and often equal: the earlier tokens are taken."""
    cache = latents(lengths, heads, size, page, F32)
    rng = np.random.default_rng(sum(map(sum, lengths)))
    cache.blocks = rng.integers(-1, 2, cache.blocks.shape).astype(np.float32)
    cache.q = rng.integers(-1, 2, cache.q.shape).astype(np.float32)
    weights = rng.integers(-1, 3, cache.q.shape[:2]).astype(np.float32)
    chosen = select(cache, weights, count, machine=machine)
    rows = visible(cache)
    assert len(chosen) == len(rows)
    for got, q, w, keys in zip(chosen, cache.q, weights, rows, strict=True):
        scores = w.astype(float) @ np.maximum(q.astype(float) @ keys.T, 0)
        assert got.tolist() == best(scores, count).tolist()


@pytest.mark.long
@SCORES
@settings(max_examples=300, deadline=None)
def test_exact_scores_long(**drawn: Any) -> None:
    test_exact_scores.hypothesis.inner_test(**drawn)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_long_contexts(dtype: Any) -> None:
    """Candidates are dropped several times."""
    cache = latents([(1500, 2), (0, 3), (700, 1)], 8, 32, 32, dtype)
    weights = np.random.default_rng(1).standard_normal((6, 8), np.float32)
    chosen = select(cache, weights, 150)
    for got, q, w, keys in zip(chosen, cache.q, weights, visible(cache), strict=True):
        scores = w.astype(float) @ np.maximum(q.astype(float) @ keys.T, 0)
        taken = got[got >= 0]
        assert len(taken) == min(150, len(keys)) and (np.diff(taken) > 0).all()
        left = np.delete(scores, taken)
        # rounding may swap scores that are nearly equal
        assert not len(left) or left.max() <= scores[taken].min() + 1e-3


@pytest.mark.parametrize("workers", [1, 3])
def test_rows_split_over_tokens(workers: int) -> None:
    """Few rows of long contexts: exact scores, many of them equal, in parts that share a worker or do not."""
    cache = latents([(401, 1), (0, 2), (97, 1), (5, 1)], 6, 8, 16, F32)
    rng = np.random.default_rng(workers)
    cache.blocks = rng.integers(-1, 2, cache.blocks.shape).astype(np.float32)
    cache.q = rng.integers(-1, 2, cache.q.shape).astype(np.float32)
    weights = rng.integers(-1, 3, cache.q.shape[:2]).astype(np.float32)
    for count in (3, 9, 60):
        chosen = select(cache, weights, count, workers=workers)
        for got, q, w, keys in zip(chosen, cache.q, weights, visible(cache), strict=True):
            scores = w.astype(float) @ np.maximum(q.astype(float) @ keys.T, 0)
            assert got.tolist() == best(scores, count).tolist()


def test_scores_without_order() -> None:
    """Zeros of both signs are equal; NaN is taken last."""
    cache = latents([(9, 1)], 2, 4, 4, F32)
    cache.blocks[:] = 1.0
    weights = np.array([[-1.0, 0.0]], np.float32)
    cache.q[:] = -1.0
    assert select(cache, weights, 3).tolist() == [[0, 1, 2]]
    cache.q[:] = 1.0
    place = cache.lookup_table[0, 0], 0, cache.layer, 1, 0
    cache.blocks[place] = np.inf
    weights[:] = [[1.0, -1.0]]
    assert select(cache, weights, 3).tolist() == [[0, 2, 3]]
    assert select(cache, weights, 10).tolist() == [list(range(10))]


SELECTIONS = given(
    lengths=LENGTHS,
    heads=st.sampled_from([2, 16, 20]),
    sizes=st.sampled_from([(6, 4), (32, 24)]),
    count=st.sampled_from([3, 20, 300]),
    machine=st.sampled_from(["host", "avx2", "invariant host"]),
    scale=st.sampled_from([0.3, -0.2]),
)


@SELECTIONS
@settings(max_examples=12, deadline=None)
def test_attention_of_selected_tokens(
    lengths: list[tuple[int, int]], heads: int, sizes: tuple[int, int], count: int, machine: str, scale: float
) -> None:  # fmt: skip
    cache = latents(lengths, heads, sizes[0], 16, F32)
    rng = np.random.default_rng(count)
    rows = visible(cache)
    chosen = np.full((len(rows), count), -1, np.int32)
    for line, keys in zip(chosen, rows, strict=True):
        taken = np.sort(rng.permutation(len(keys))[:count])
        line[: len(taken)] = taken
    out = attend(cache, chosen, scale, sizes[1], machine=machine)
    for got, line, q, keys in zip(out, chosen, cache.q, rows, strict=True):
        own = keys[line[line >= 0]]
        scores = q.astype(float) @ own.T * scale
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        assert_close(got, weights @ own[:, : sizes[1]], scale=8.0)


@pytest.mark.long
@SELECTIONS
@settings(max_examples=300, deadline=None)
def test_attention_of_selected_tokens_long(**drawn: Any) -> None:
    test_attention_of_selected_tokens.hypothesis.inner_test(**drawn)


def test_split_over_selected_tokens() -> None:
    """One token with many selected ones is split over workers; bf16 rounds weights."""
    for dtype, machine in ((F32, "host"), (BF16, "host")):
        cache = latents([(900, 1)], 24, 40, 64, dtype)
        (keys,) = visible(cache)
        chosen = np.sort(np.random.default_rng(2).permutation(901)[:640])[None].astype(np.int32)
        out = attend(cache, chosen, 0.2, 32, machine=machine, workers=3)
        own = keys[chosen[0]]
        scores = cache.q[0].astype(float) @ own.T * 0.2
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        want = weights @ own[:, :32]
        np.testing.assert_allclose(out[0].astype(float), want, atol=2e-5 if dtype == F32 else 2e-2)


@pytest.mark.parametrize(
    ("new", "cached", "count", "expected"),
    [
        ([64], [0], 0, [1, 0]),
        ([63], [0], 0, [0, 0]),
        ([40, 30], [10, 0], 0, [1, 0]),
        ([70], [4], 0, [1, 0]),
        ([1] * 64, [3] * 64, 0, [0, 0]),
        ([1] * 64, [1] * 64, 0, [0, 0]),
        # four times as many cached tokens as new ones
        ([64], [256], 0, [0, 0]),
        ([64], [192], 0, [1, 0]),
        ([64, 5], [0, 6], 64, [1, 0]),
        ([64, 5], [0, 6], 63, [1, 1]),
        ([], [], 1, [0, 0]),
    ],
)
def test_plan(new: list[int], cached: list[int], count: int, expected: list[int]) -> None:
    offsets = np.cumsum([0, *new]).astype(np.uint32)
    operands = [offsets, np.array(cached, np.uint32)]
    options = {"least_rows": 64, "most_cached": 3, "saved": 9, "spent": 110, "count": count}
    plan = "mo.latents.plan.ragged"
    assert run(plan, operands, [(np.int32, (2,))], options)[0].tolist() == expected
    (own,) = run(plan, operands, [(np.int32, (2,))], options, machine="invariant host")
    assert own.tolist() == [0, int(count > 0)]


def test_tokens_that_a_row_does_not_see() -> None:
    cache = latents([(3, 1)], 2, 6, 4, F32)
    with pytest.raises(KernelRunError, match="row 0: selected token 4; it sees the tokens up to 3"):
        attend(cache, np.array([[0, 4]], np.int32), 1.0, 4)
    with pytest.raises(NotImplementedError, match="count is 0, expected 1 or more"):
        select(cache, np.ones((1, 2), np.float32), 0)
    with pytest.raises(NotImplementedError, match=r"weights is .*, expected \[total_seq_len, 2\]"):
        select(cache, np.ones((1, 3), np.float32), 2)
