"""Attention of a ragged batch without a cache against NumPy in float64."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from max._backends.program import KernelRunError
from tests.cpu_kernels.harness import run
from tests.tolerance import assert_close

BF16 = np.dtype(ml_dtypes.bfloat16)
F16, F32 = np.dtype(np.float16), np.dtype(np.float32)
MASKS = ("null", "causal", "sliding_window", "chunked_causal", "symmetric_window")


def operands(
    lengths: list[int], heads: tuple[int, int], head_dim: int, dtype: np.dtype, bias: int = 0
) -> list[np.ndarray]:
    """Queries, keys, values, offsets, and a bias for texts of up to ``bias`` rows."""
    rng = np.random.default_rng(sum(lengths))
    total = sum(lengths)
    q, k, v = (
        rng.standard_normal((total, n, head_dim), np.float32).astype(dtype)
        for n in (heads[0], heads[1], heads[1])
    )
    biases = [rng.standard_normal((heads[0], 2 * bias - 1), np.float32)] if bias else []
    return [q, k, v, np.cumsum([0, *lengths]).astype(np.uint32), *biases]


def reference(values: list[np.ndarray], mask: str, window: int, scale: float) -> np.ndarray:
    q, k, v, offsets, *biases = values
    out = np.zeros(q.shape)
    for begin, end in zip(offsets[:-1].astype(int), offsets[1:].astype(int), strict=True):
        n = end - begin
        distance = np.arange(n)[None] - np.arange(n)[:, None]
        seen = {
            "null": np.ones((n, n), bool),
            "causal": distance <= 0,
            "sliding_window": (distance <= 0) & (distance > -window),
            "chunked_causal": (distance <= 0)
            & (np.arange(n)[None] // window == np.arange(n)[:, None] // window),
            "symmetric_window": abs(distance) < window,
        }[mask]
        for h in range(q.shape[1]):
            kv = h * k.shape[1] // q.shape[1]
            scores = q[begin:end, h].astype(float) @ k[begin:end, kv].astype(float).T * scale
            for bias in biases:
                scores = scores + bias[h][distance + bias.shape[1] // 2]
            scores = np.where(seen, scores, -np.inf)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True, initial=-1e30))
            out[begin:end, h] = weights / weights.sum(axis=1, keepdims=True) @ v[begin:end, kv]
    return out


def check(
    values: list[np.ndarray], mask: str = "null", window: int = -1, scale: float = 0.2, **options: object
) -> None:  # fmt: skip
    q = values[0]
    want = reference(values, mask, window, scale)
    attributes = {"mask": mask, "local_window_size": window}
    values = [*values[:4], np.array(scale, np.float32), *values[4:]]
    (got,) = run("mo.attention.ragged", values, [(q.dtype, q.shape)], attributes, **options)
    assert_close(got, want.astype(q.dtype), dtype=q.dtype)


@pytest.mark.parametrize("machine", ["host", "avx2", "generic", "invariant host"])
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_texts_of_all_lengths(dtype: np.dtype, machine: str) -> None:
    check(operands([1, 300, 0, 17, 129, 5], (6, 2), 32, dtype), machine=machine)


# sizes of a batch are numbers at run time: two batches run the same kernel
BATCHES = st.lists(
    st.tuples(
        st.lists(st.integers(0, 200), min_size=1, max_size=4),
        st.sampled_from([1, 5, 33, 140]),
        st.sampled_from([0.125, 1.0, -0.3]),
        st.sampled_from([1, 2]),
    ),
    min_size=2,
    max_size=2,
)


SHAPES = given(
    batches=BATCHES,
    heads=st.sampled_from([(1, 1), (3, 3), (9, 3), (8, 1)]),
    head_dim=st.sampled_from([8, 24, 33, 64]),
    dtype=st.sampled_from([F32, BF16]),
    mask=st.sampled_from(MASKS),
    biased=st.booleans(),
)


@SHAPES
@settings(max_examples=7)
def test_shapes_masks_and_biases(
    batches: list[tuple[list[int], int, float, int]],
    heads: tuple[int, int],
    head_dim: int,
    dtype: np.dtype,
    mask: str,
    biased: bool,
) -> None:
    for lengths, window, scale, workers in batches:
        values = operands(lengths, heads, head_dim, dtype, max(lengths) + 3 if biased else 0)
        check(values, mask, window, scale, workers=workers)


@pytest.mark.long
@SHAPES
@settings(max_examples=200)
def test_shapes_masks_and_biases_long(**drawn: Any) -> None:
    test_shapes_masks_and_biases.hypothesis.inner_test(**drawn)


@pytest.mark.parametrize("bias", [0, 300])
def test_many_texts_make_long_tasks(bias: int) -> None:
    check(operands([200, 250, 300, 7] * 3, (4, 4), 32, F32, bias), workers=1)


def test_offsets_and_sizes_that_do_not_fit() -> None:
    q, k, v, _ = operands([3, 4], (2, 2), 8, F32)

    def refused(values: list[np.ndarray], offsets: list[int], message: str) -> None:
        places = [np.array(offsets, np.uint32), np.array(1, np.float32)]
        values = [*values[:3], *places, *values[3:]]
        with pytest.raises(KernelRunError, match=message):
            run("mo.attention.ragged", values, [(F32, q.shape)])

    refused([q, k, v], [0, 9, 7], "is 7, expected 9 or more")
    refused([q, k, v], [1, 3, 7], r"\[0\] is 1, expected 0")
    refused([q, k, v], [0, 3, 8], "is 8, expected 7")
    refused([q, k[:6], v], [0, 3, 7], "keys has size 6, expected 7")
    refused([q, k, v[:6]], [0, 3, 7], "values has size 6, expected 7")
    refused([q, k, v, np.zeros((2, 5), np.float32)], [0, 3, 7], "4 rows; the bias is for up to 3")
