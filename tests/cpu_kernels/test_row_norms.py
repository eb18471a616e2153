"""RMS norms in the launch of a product, exactly: the product with the identity is the normalized rows."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from max import kernel as k
from max._backends.cpu.kernels.products import row_norms
from max._backends.cpu.kernels.products.dense.panels import panel_elements
from max._backends.kernel_call import Operand
from max.dtype import DType
from tests.cpu_kernels.harness import interpreted, run
from tests.tolerance import assert_close

BF16, F16, F32 = ml_dtypes.bfloat16, np.float16, np.float32
SIZE = 64


def exact_rows(rows: int, dtype: Any) -> tuple[np.ndarray, float]:
    """Rows of small integers with equal mean squares, and the epsilon that makes their scale f32(1 / 3): sums are exact
    in any order.
    """
    rng = np.random.default_rng(rows)
    row = rng.integers(-3, 4, SIZE)
    x = np.stack([rng.permutation(row) * rng.choice([-1, 1], SIZE) for _ in range(rows)])
    return x.astype(dtype), 9.0 - float(np.mean(row**2))


def expected(x: np.ndarray, gamma: np.ndarray, offset: float, multiply_first: bool) -> np.ndarray:
    v = x.astype(F32) * F32(1 / np.sqrt(F32(9)))
    if not multiply_first:
        v = v.astype(x.dtype).astype(F32)
    return (v * (gamma.astype(F32) + F32(offset))).astype(x.dtype)


@pytest.mark.parametrize("way", [run, interpreted])
@pytest.mark.parametrize("multiply_first", [False, True])
# small inputs: each worker computes all rows; larger ones: workers share the rows
@pytest.mark.parametrize("rows", [3, 70])
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_rounding_before_or_after_gamma(
    dtype: Any, rows: int, multiply_first: bool, way: Any
) -> None:
    x, epsilon = exact_rows(rows, dtype)
    gamma = np.random.default_rng(1).uniform(0.5, 2, SIZE).astype(dtype)
    panels = (dtype, (2, panel_elements(SIZE)))
    (weight,) = run("mok.pack", [np.eye(SIZE, dtype=dtype)], [panels], {"encoding": "rows"})
    norm = (epsilon, 0.25, multiply_first)
    attributes = {"encoding": "rows", "columns": SIZE, "streamed": False, "norm": norm}
    (got,) = way("mok.packed_matmul", [x, weight, gamma], [(dtype, (rows, SIZE))], attributes)
    want = expected(x, gamma, 0.25, multiply_first)
    np.testing.assert_array_equal(got, want)
    if dtype != F32:
        assert (want != expected(x, gamma, 0.25, not multiply_first)).any()


@k.kernel
def rows_of_each_worker(
    out: k.Output, x: k.Input, gamma: k.Input, memory: k.InOut, ctx: k.Context, *, norm: row_norms.Norm
) -> None:  # fmt: skip
    rows = row_norms.normalize(x, row_norms.NormOperands(gamma, memory), norm, ctx)
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            out[ctx.worker, i, j] = rows[i, j]


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("shape", [(2, 3), (1, 7), (7, 1), (5, 4)])
def test_each_worker_has_all_rows(
    workers: int, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for the copies of two workers, of up to 6 elements each."""
    monkeypatch.setattr(row_norms, "SMALL_ELEMENTS", 6)
    monkeypatch.setattr(row_norms, "SMALL_WORKERS", 2)
    rng = np.random.default_rng(2)
    x, gamma = rng.standard_normal(shape).astype(F32), rng.standard_normal(shape[1]).astype(F32)
    operands = [Operand(DType.float32, size) for size in (shape, (1,), gamma.shape)]
    norm = (0.1, 0.5, True)
    _, _, (space,) = row_norms.norm_arguments(operands, {"norm": norm}, 0)
    out = np.zeros((workers, *shape), F32)
    memory = np.full(space.shape, np.nan, F32)
    k.interpret(rows_of_each_worker, [out, x, gamma, memory], {"norm": norm}, workers)
    want = x / np.sqrt(np.mean(x**2, 1, keepdims=True) + 0.1) * (gamma + 0.5)
    for rows in out:
        assert_close(rows, want)
    copies = workers if x.size <= 6 and workers <= 2 else 1
    for copy in range(copies):
        assert_close(memory[6 * copy :][: x.size], want.reshape(-1))
    assert np.count_nonzero(~np.isnan(memory)) == copies * x.size
