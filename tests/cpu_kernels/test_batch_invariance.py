"""Batch-invariant kernels: the result of a row is the same to the last bit, whatever other rows the batch has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cpu_kernels.harness import interpreted, run
from tests.cpu_kernels.test_attention import Cache, check, make_cache

BF16 = np.dtype(ml_dtypes.bfloat16)
F16, F32 = np.dtype(np.float16), np.dtype(np.float32)


def attended(
    cache: Cache, spans: list[tuple[int, int]], mask: str, window: int, workers: int, machine: str
) -> list[np.ndarray]:
    """The results of the tokens ``begin … end`` of each sequence of a cache that holds all of them, in one batch."""
    starts = cache.offsets.astype(np.int64)
    rows = [np.arange(starts[b] + i, starts[b] + j) for b, (i, j) in enumerate(spans)]
    counts = [len(r) for r in rows]
    given_ = replace(
        cache,
        q=cache.q[np.concatenate(rows)],
        offsets=np.cumsum([0, *counts]).astype(np.uint32),
        cache_lengths=np.array([i for i, _ in spans], np.uint32),
    )
    (out,) = (interpreted if machine == "pairs" else run)(
        "mo.attention.ragged.paged",
        given_.operands(0.25),
        [(cache.q.dtype, given_.q.shape)],
        {"mask": mask, "local_window_size": window},
        workers=workers,
        machine=f"invariant {machine}",
    )
    return np.split(out, np.cumsum(counts)[:-1])


def cut(rng: np.random.Generator, length: int) -> list[tuple[int, int]]:
    """The lengths of chunks of a sequence, of one or many tokens."""
    spans: list[tuple[int, int]] = []
    at = 0
    while at < length:
        step = int(rng.choice([1, 1, 2, 3, 7, 30, 150]))
        spans.append((at, min(at + step, length)))
        at = spans[-1][1]
    return spans


CASES = given(
    lengths=st.lists(st.integers(1, 170), min_size=1, max_size=3),
    heads=st.sampled_from([(1, 1), (4, 2), (9, 3), (8, 1), (3, 3)]),
    head_dim=st.sampled_from([16, 33, 64]),
    dtype=st.sampled_from([F32, BF16, F16]),
    page_size=st.sampled_from([7, 16, 128, 160]),
    mask=st.sampled_from(["causal", "sliding_window", "chunked_causal"]),
    window=st.sampled_from([5, 33, 140]),
    machine=st.sampled_from(["host", "avx2"]),
    seed=st.integers(0, 1000),
)


@CASES
@settings(max_examples=3)
def test_attention(
    lengths: list[int],
    heads: tuple[int, int],
    head_dim: int,
    dtype: np.dtype,
    page_size: int,
    mask: str,
    window: int,
    machine: str,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    cache = make_cache([(0, n) for n in lengths], *heads, head_dim, page_size, dtype, seed=seed)
    whole = attended(cache, [(0, n) for n in lengths], mask, window, 2, machine)
    chunks = [cut(rng, n) for n in lengths]
    for _ in range(4):
        spans = [chunk[rng.integers(len(chunk))] for chunk in chunks]
        workers = int(rng.choice([1, 2, 3]))
        parts = attended(cache, spans, mask, window, workers, machine)
        for (begin, end), part, full in zip(spans, parts, whole, strict=True):
            same = part.view(np.uint8) == full[begin:end].view(np.uint8)
            assert same.all(), f"tokens {begin} to {end}"


@pytest.mark.long
@CASES
@settings(max_examples=150)
def test_attention_long(**drawn: Any) -> None:
    test_attention.hypothesis.inner_test(**drawn)


@pytest.mark.parametrize("workers", [1, 3])
def test_attention_with_pairs_of_bfloat16(workers: int) -> None:
    """In the interpreter, as few machines multiply pairs; with pairs weights are rounded."""
    cache = make_cache([(0, 13), (0, 5)], 4, 2, 16, 8, BF16)
    whole = attended(cache, [(0, 13), (0, 5)], "causal", -1, 1, "pairs")
    for spans in ([(12, 13), (4, 5)], [(2, 9), (0, 1)]):
        parts = attended(cache, spans, "causal", -1, workers, "pairs")
        for (begin, end), part, full in zip(spans, parts, whole, strict=True):
            assert np.array_equal(part.view(np.uint8), full[begin:end].view(np.uint8))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_attention_is_right(dtype: np.dtype) -> None:
    cache = make_cache([(0, 19), (70, 1), (3, 50), (300, 2)], 6, 2, 64, 32, dtype)
    check(cache, machine="invariant host")
    check(cache, "sliding_window", 21, machine="invariant host")


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_products(dtype: np.dtype, transposed: bool, rng: np.random.Generator) -> None:
    rows, inner, columns = 70, 600, 50
    a = rng.standard_normal((rows, inner)).astype(dtype)
    b = rng.standard_normal((columns, inner) if transposed else (inner, columns)).astype(dtype)

    def product(part: np.ndarray) -> np.ndarray:
        return run(
            "mo.matmul",
            [part, b],
            [(dtype, (len(part), columns))],
            {"transpose_b": transposed},
            machine="invariant host",
        )[0]

    whole = product(a)
    for begin, end in ((0, 1), (3, 4), (5, 9), (11, 28), (0, 69)):
        assert np.array_equal(product(a[begin:end]).view(np.uint8), whole[begin:end].view(np.uint8))
