"""RMS norms in the launch of a product, exactly: the product with the identity is the normalised rows."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from max._kernel_library.products.dense.panels import panel_elements
from tests.kernel_library.harness import interpreted, run

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
