"""Matmul against NumPy in float64: dtypes, layouts, odd sizes, epilogues, targets, workers."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from max import kernel as k
from max._backends.cpu.kernels.products.dense.matmul import slices_of
from max._config import flags
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType
from tests.cpu_kernels.harness import Runner, run
from tests.tolerance import assert_close

BF16 = np.dtype(ml_dtypes.bfloat16)
F16, F32, F64 = np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64)


def operands(
    m: int,
    n: int,
    size: int,
    a_dtype: np.dtype,
    b_dtype: np.dtype,
    transpose_b: bool,
    batch: tuple[int, ...] = (),
    seed: int = 0,
):
    rng = np.random.default_rng(seed)

    def make(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        if dtype.kind in "iu":
            return rng.integers(-9 if dtype.kind == "i" else 0, 9, shape).astype(dtype)
        return rng.standard_normal(shape).astype(np.float32).astype(dtype)

    b_shape = (n, size) if transpose_b else (size, n)
    return make((*batch, m, size), a_dtype), make((*batch, *b_shape), b_dtype)


def expected(a: np.ndarray, b: np.ndarray, transpose_b: bool) -> np.ndarray:
    kind = np.int64 if a.dtype.kind in "iu" else np.float64
    y = b.astype(kind)
    return a.astype(kind) @ (np.swapaxes(y, -1, -2) if transpose_b else y)


def check(
    a: np.ndarray, b: np.ndarray, out_dtype: np.dtype, transpose_b: bool, **options: object
) -> None:
    want = expected(a, b, transpose_b)
    (got,) = run(
        "mo.matmul", [a, b], [(out_dtype, want.shape)], {"transpose_b": transpose_b}, **options
    )
    assert_close(got, want.astype(out_dtype), dtype=out_dtype)


@pytest.mark.parametrize("machine", ["host", "avx2", "generic"])
@pytest.mark.parametrize("transpose_b", [True, False])
@pytest.mark.parametrize(
    "dtypes",
    [
        (F32, F32),
        (BF16, BF16),
        (F16, F16),
        (F32, BF16),
        (F64, F64),
        (np.dtype(np.int32), np.dtype(np.int32)),
    ],
    ids=str,
)
def test_dtypes_and_targets(
    dtypes: tuple[np.dtype, np.dtype], transpose_b: bool, machine: str
) -> None:
    out = F32 if dtypes == (F32, BF16) else dtypes[0]
    for m, n, size in ((1, 70, 129), (6, 33, 64), (37, 75, 531)):
        a, b = operands(m, n, size, *dtypes, transpose_b)
        check(a, b, out, transpose_b, machine=machine)


SIZES = given(
    m=st.sampled_from([0, 1, 2, 3, 4, 5, 8, 15, 16, 17, 23, 24, 25, 100, 511, 600]),
    n=st.integers(0, 140),
    size=st.one_of(st.integers(0, 70), st.sampled_from([255, 256, 257, 511, 513, 700, 1025])),
    dtype=st.sampled_from([F32, BF16]),
    transpose_b=st.booleans(),
    workers=st.sampled_from([1, 2, 3]),
)


@SIZES
@settings(max_examples=15, deadline=None)
def test_sizes(m: int, n: int, size: int, dtype: np.dtype, transpose_b: bool, workers: int) -> None:
    a, b = operands(m, n, size, dtype, dtype, transpose_b, seed=m + n + size)
    check(a, b, dtype, transpose_b, workers=workers)


@pytest.mark.long
@SIZES
@settings(max_examples=500, deadline=None)
def test_sizes_long(**drawn: Any) -> None:
    test_sizes.hypothesis.inner_test(**drawn)


@pytest.mark.parametrize("dtype", [F32, BF16, F64], ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 4099, 193), (2, 9001, 101), (3, 700, 400), (8, 350, 1003)], ids=str
)
def test_slices_along_k(shape: tuple[int, int, int], dtype: np.dtype) -> None:
    m, n, size = shape
    a, b = operands(m, n, size, dtype, dtype, False, seed=n)
    assert slices_of(size, n, dtype.itemsize) > 1
    bias = np.random.default_rng(3).standard_normal(n).astype(dtype)
    residual = np.random.default_rng(4).standard_normal((m, n)).astype(dtype)
    want = np.maximum(expected(a, b, False) + bias + residual, 0)
    results = [
        run(
            "mo.matmul", [a, b], [(dtype, want.shape)], {"transpose_b": False}, workers=workers,
            params={"epilogue": add_bias_and_relu}, extra=[bias, residual],
        )[0]
        for workers in (1, 3)
    ]  # fmt: skip
    assert_close(results[0], want.astype(dtype), dtype=dtype)
    # slices, and so sums, do not depend on the number of workers
    assert results[0].tobytes() == results[1].tobytes()


@pytest.mark.parametrize("m", [3, 40])
@pytest.mark.parametrize("transpose_b", [True, False])
def test_batched(m: int, transpose_b: bool) -> None:
    a, b = operands(m, 35, 50, F32, F32, transpose_b, batch=(2, 3))
    check(a, b, F32, transpose_b)


def test_leading_dims_with_one_weight() -> None:
    a, _ = operands(7, 1, 40, F32, F32, True, batch=(2, 3))
    b = np.random.default_rng(1).standard_normal((50, 40)).astype(F32)
    check(a, b, F32, True)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("m", [2, 50])
def test_weights_need_only_the_alignment_of_their_dtype(dtype: np.dtype, m: int) -> None:
    a, b = operands(m, 45, 67, dtype, dtype, True)
    memory = np.zeros(b.nbytes + 64, np.uint8)
    start = (-memory.ctypes.data) % 64 + dtype.itemsize
    odd = memory[start : start + b.nbytes].view(dtype).reshape(b.shape)
    odd[...] = b
    check(a, odd, dtype, True)


@k.inline
def add_bias_and_relu(v, row, col, mask, extra):
    shifted = (
        v
        + extra[0].load(col, width=v.width, mask=mask)
        + extra[1].load(row, col, width=v.width, mask=mask)
    )
    return k.max(shifted, 0)


@pytest.mark.parametrize("m", [1, 3, 45])
def test_epilogue(m: int) -> None:
    a, b = operands(m, 83, 100, F32, F32, True)
    rng = np.random.default_rng(2)
    bias, residual = rng.standard_normal(83).astype(F32), rng.standard_normal((m, 83)).astype(F32)
    want = np.maximum(expected(a, b, True) + bias + residual, 0)
    (got,) = run(
        "mo.matmul",
        [a, b],
        [(F32, want.shape)],
        {"transpose_b": True},
        params={"epilogue": add_bias_and_relu},
        extra=[bias, residual],
    )
    assert_close(got, want.astype(F32))


def test_one_kernel_for_all_sizes() -> None:
    keys = set()
    for m, n, size in ((1, 64, 64), (50, 70, 33)):
        a, b = operands(m, n, size, F32, F32, True)
        keys.add(Runner("mo.matmul", [a, b], [(F32, (m, n))], {"transpose_b": True}).ir.key)
    assert len(keys) == 1


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.int64])
def test_integers_wrap(dtype: type) -> None:
    a, b = operands(20, 18, 30, np.dtype(dtype), np.dtype(dtype), True)
    check(a, b, np.dtype(dtype), True)


@pytest.mark.parametrize("batch", [1, "batch"])
def test_few_rows_by_the_only_matrix_of_a_batch(batch: int | str) -> None:
    """Slices along k have memory for their sums where B has an axis of one matrix."""
    rng = np.random.default_rng(0)
    types = [
        TensorType(DType.float32, [batch, n, m], DeviceRef.CPU())
        for n, m in ((16, 512), (512, 512))
    ]
    with Graph("batch_of_one", input_types=types) as graph:
        x, y = (value.tensor for value in graph.inputs)
        graph.output(x @ y)
    a, b = (rng.standard_normal((1, n, 512)).astype(np.float32) for n in (16, 512))
    with flags.override(MAX_KERNEL_CHECK=1):
        (result,) = InferenceSession(devices=[CPU()]).load(graph).execute(a, b)
    np.testing.assert_allclose(result.to_numpy(), a @ b, rtol=0, atol=1e-3)
