"""Products of 8-bit integers with packed weights against NumPy: exact for all values, sizes, targets and workers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from max import kernel as k
from max._backends.cpu.kernels.products.dense.panels import panel_elements
from max._backends.cpu.kernels.products.int8.packed_matmul import lower_matmul
from max._backends.cpu.kernels.tiles.strips import COLUMNS
from max._backends.kernel_call import Operand
from max.dtype import DType
from tests.cpu_kernels.harness import Runner, interpreted, run
from tests.cpu_kernels.test_guarded import run_guarded


def packed(w: np.ndarray, by_rows: bool, **options: object) -> np.ndarray:
    """The panels of a weight `[K, N]`."""
    inner, columns = w.shape
    shape = (-(-columns // COLUMNS), panel_elements(inner))
    given = np.ascontiguousarray(w.T if by_rows else w)
    encoding = "int8 rows" if by_rows else "int8 columns"
    (panels,) = run("mok.pack", [given], [(np.uint8, shape)], {"encoding": encoding}, **options)
    return panels


def multiplied(x: np.ndarray, panels: np.ndarray, columns: int, **options: object) -> np.ndarray:
    """The product with packed panels."""
    attributes = {"encoding": "int8 rows", "columns": columns, "streamed": False}
    result = [(np.int32, (len(x), columns))]
    return run("mok.packed_matmul", [x, panels], result, attributes, **options)[0]


def integers(rng: np.random.Generator, *shape: int, low: int = -128) -> np.ndarray:
    """Random bytes from `low` up; the extremes are more frequent."""
    some = rng.integers(low, 128, shape)
    extreme = rng.choice([low, 127], shape)
    return np.where(rng.random(shape) < 0.2, extreme, some).astype(np.int8)


def check(m: int, n: int, size: int, by_rows: bool, low: int = -128, **options: object) -> None:
    rng = np.random.default_rng(m + n + size)
    x, w = integers(rng, m, size, low=low), integers(rng, size, n)
    got = multiplied(x, packed(w, by_rows), n, **options)
    np.testing.assert_array_equal(got, x.astype(np.int64) @ w.astype(np.int64))


@pytest.mark.parametrize(
    ("by_rows", "machine"),
    [(True, "host"), (False, "host"), (True, "avx2"), (False, "avx2"), (False, "generic")],
)
def test_targets(by_rows: bool, machine: str) -> None:
    shapes = ((1, 70, 129), (2, 33, 64), (5, 33, 8), (8, 64, 130), (9, 40, 36), (61, 75, 2100))
    for m, n, size in shapes:
        # without and with -128, which has no magnitude of 7 bits
        for low in (-127, -128):
            check(m, n, size, by_rows, low, machine=machine)


SIZES = given(
    m=st.sampled_from([0, 1, 2, 3, 4, 7, 8, 9, 12, 13, 16, 17, 23, 24, 25, 100, 253, 530]),
    n=st.integers(0, 140) | st.integers(500, 600),
    size=st.integers(0, 70) | st.sampled_from([255, 256, 1023, 1024, 1025, 2052, 3000, 4096]),
    by_rows=st.booleans(),
    workers=st.sampled_from([1, 2, 3]),
    machine=st.sampled_from(["host", "avx2"]),
)


@SIZES
@settings(max_examples=10, deadline=None)
def test_sizes(m: int, n: int, size: int, by_rows: bool, workers: int, machine: str) -> None:
    check(m, n, size, by_rows, workers=workers, machine=machine)


@pytest.mark.long
@SIZES
@settings(max_examples=300, deadline=None)
def test_sizes_long(**drawn: Any) -> None:
    test_sizes.hypothesis.inner_test(**drawn)


@pytest.mark.parametrize("machine", ["host", "avx2"])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("size", [1025, 2049])
def test_sums_of_several_tiles_wait_between_k_blocks(size: int, workers: int, machine: str) -> None:
    """Two and three K blocks of tasks of many tiles and panels; the last task has fewer panels."""
    check(260, 33 * 32, size, True, workers=workers, machine=machine)


@pytest.mark.parametrize("machine", ["host", "avx2", "tiles host"])
@pytest.mark.parametrize("size", [4096, 8192])
def test_rows_that_share_the_sets_of_the_l1_cache(size: int, machine: str) -> None:
    """Register tiles of many rows read a copy of each K block, tasks of more rows than one included."""
    for rows in (1, 9, 13, 270):
        check(rows, 35, size, False, workers=2, machine=machine)
    x, out = Operand(DType.int8, ("m", size)), Operand(DType.int32, ("m", 35))
    panels = Operand(DType.uint8, (2, panel_elements(size)))
    assert lower_matmul([x, panels], [out]).params["shares_sets"]
    other = Operand(DType.int8, ("m", size + 64))
    assert not lower_matmul([other, panels], [out]).params["shares_sets"]


@pytest.mark.parametrize("machine", ["host", "avx2"])
def test_the_largest_sums(machine: str) -> None:
    """Neither partial sums nor sums saturate."""
    for left, right in ((-128, -128), (-128, 127), (127, -128), (127, 127)):
        x, w = np.full((3, 132), left, np.int8), np.full((132, 33), right, np.int8)
        got = multiplied(x, packed(w, True), 33, machine=machine)
        np.testing.assert_array_equal(got, np.full((3, 33), 132 * left * right))


def test_rows_at_any_address() -> None:
    rng = np.random.default_rng(0)
    w, memory = integers(rng, 64, 40), integers(rng, 3 + 13 * 64)
    panels = packed(w, False)
    for start in range(4):
        for rows in (3, 13 - (start > 0)):
            x = memory[start : start + rows * 64].reshape(rows, 64)
            want = x.astype(np.int32) @ w.astype(np.int32)
            np.testing.assert_array_equal(multiplied(x, panels, 40), want)


@pytest.mark.parametrize("machine", ["host", "avx2", "tiles host"])
@pytest.mark.parametrize("m", [1, 3, 5, 9, 13, 26])
def test_no_read_behind_the_last_row(m: int, machine: str) -> None:
    """Passes and register tiles reach past the last row, which lies before a guard page.

    Rows are long, so that a read past the last row hits that page.
    """
    rng = np.random.default_rng(m)
    x, w = integers(rng, m, 1100), integers(rng, 1100, 40)
    attributes = {"encoding": "int8 rows", "columns": 40, "streamed": False}
    operands, result = [x, packed(w, True, machine=machine)], [(np.int32, (m, 40))]
    run_guarded(Runner("mok.packed_matmul", operands, result, attributes, machine=machine))


@k.inline
def scaled(v, row, col, mask, extra):
    x_scale = k.splat(extra[0][row], v.width)
    return k.cast(v, k.f32) * x_scale * extra[1].load(col, width=v.width, mask=mask)


@pytest.mark.parametrize("m", [1, 45])
def test_epilogue(m: int) -> None:
    rng = np.random.default_rng(1)
    x, w = integers(rng, m, 100), integers(rng, 100, 83)
    a, b = rng.standard_normal(m).astype(np.float32), rng.standard_normal(83).astype(np.float32)
    attributes = {"encoding": "int8 rows", "columns": 83, "streamed": False}
    (got,) = run(
        "mok.packed_matmul",
        [x, packed(w, True)],
        [(np.float32, (m, 83))],
        attributes,
        params={"epilogue": scaled},
        extra=[a, b],
    )
    want = (x.astype(np.float64) @ w.astype(np.float64)) * a[:, None] * b
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("machine", ["host", "avx2"])
def test_every_index(machine: str) -> None:
    """In the interpreter, which checks indices."""
    rng = np.random.default_rng(2)
    for m, n, size in ((3, 35, 12), (10, 33, 13)):
        x, w = integers(rng, m, size), integers(rng, n, size)
        shape = (-(-n // COLUMNS), panel_elements(size))
        (panels,) = interpreted(
            "mok.pack", [w], [(np.uint8, shape)], {"encoding": "int8 rows"}, machine=machine
        )
        attributes = {"encoding": "int8 rows", "columns": n, "streamed": False}
        (got,) = interpreted(
            "mok.packed_matmul", [x, panels], [(np.int32, (m, n))], attributes, machine=machine
        )
        np.testing.assert_array_equal(got, x.astype(np.int32) @ w.T.astype(np.int32))
