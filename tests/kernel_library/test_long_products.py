"""Products with a large K against float64, packed and not: their error does not grow with K."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from max._kernel_library.products.dense.panels import panel_elements
from tests.kernel_library.harness import Runner, run
from tests.kernel_library.test_guarded import run_guarded

BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("size", [4097, 100_001, 10**6])
@pytest.mark.parametrize("equal", [True, False])
def test_the_error_does_not_grow_with_k(size: int, equal: bool, rng: np.random.Generator) -> None:
    """On all paths, packed and not: a few rows, more rows than the GEMV path takes, and a wide B of slices."""
    shapes = [(1, 1), (3, 5), (20, 33), (5, 300)] if size < 10**5 else [(1, 1), (3, 2)]
    if size == 100_001:
        shapes.append((18, 33))
    for m, n in shapes:
        a, b = (
            np.full(s, rng.uniform(0.05, 0.2), np.float32) if equal else rng.random(s, np.float32)
            for s in ((m, size), (n, size))
        )
        want = a.astype(np.float64) @ b.astype(np.float64).T
        result = [(np.float32, (m, n))]
        (weight,) = run(
            "mok.pack",
            [b],
            [(np.float32, (-(-n // 32), panel_elements(size)))],
            {"encoding": "rows"},
        )
        packed = {"encoding": "rows", "columns": n, "streamed": False}
        for got in (
            *run("mo.matmul", [a, b], result, {"transpose_b": True}),
            *run("mo.matmul", [a, b.T.copy()], result),
            *run("mok.packed_matmul", [a, weight], result, packed),
        ):
            # 4096 additions in one accumulator, or a few hundred for each piece and one for each piece
            np.testing.assert_allclose(got, want, rtol=8e-5)


@pytest.mark.parametrize("dtype", [np.float32, BF16, np.float16])
@pytest.mark.parametrize("size", [9001, 12_032])
def test_packed_paths_have_equal_sums_of_many(
    dtype: np.dtype, size: int, rng: np.random.Generator
) -> None:
    """The K blocks of the GEMV path are those of the GEMM path, also with an odd last element."""
    x, b = (rng.standard_normal((n, size)).astype(dtype) for n in (40, 37))
    (weight,) = run("mok.pack", [b], [(dtype, (2, panel_elements(size)))], {"encoding": "rows"})
    packed = {"encoding": "rows", "columns": 37, "streamed": False}
    for machine in ("host", "avx2"):

        def product(rows: np.ndarray, machine: str = machine) -> np.ndarray:
            shape = (len(rows), 37)
            return run(
                "mok.packed_matmul", [rows, weight], [(np.float32, shape)], packed, machine=machine
            )[0]

        whole = product(x)
        want = x.astype(np.float64) @ b.astype(np.float64).T
        np.testing.assert_allclose(whole, want, rtol=1e-4, atol=2e-3)
        for count in (1, 3, 8):
            np.testing.assert_array_equal(product(x[:count]), whole[:count])


@pytest.mark.parametrize("machine", ["host", "avx2"])
@pytest.mark.parametrize(
    ("m", "size", "n", "transposed"),
    [(16, 70_001, 5, False), (7, 9000, 300, False), (15, 16_390, 35, True), (18, 4100, 33, True)],
)
def test_pieces_access_no_other_memory(
    m: int, size: int, n: int, transposed: bool, machine: str, rng: np.random.Generator
) -> None:
    a, b = rng.random((m, size), np.float32), rng.random((n, size), np.float32)
    operands = [a, b if transposed else b.T.copy()]
    result = [(np.float32, (m, n))]
    runner = Runner("mo.matmul", operands, result, {"transpose_b": transposed}, machine=machine)
    run_guarded(runner)
    want = a.astype(np.float64) @ b.astype(np.float64).T
    np.testing.assert_allclose(runner()[0], want, rtol=8e-5)
