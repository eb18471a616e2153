"""Gather, scatter, sums, selection and the kernels that move elements, against NumPy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from max._backends.program import KernelRunError
from tests.cpu_kernels.harness import run
from tests.tolerance import assert_close

BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [
    np.dtype(t)
    for t in (
        np.float32,
        np.float64,
        np.float16,
        BF16,
        np.int8,
        np.uint8,
        np.int16,
        np.int32,
        np.uint32,
        np.int64,
        np.bool_,
    )
]


def values(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    if dtype.kind in "iu":
        return rng.integers(0, 100, shape).astype(dtype)
    if dtype.kind == "b":
        return rng.random(shape) < 0.5
    return rng.standard_normal(shape).astype(np.float32).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_gather(dtype: np.dtype, axis: int, rng: np.random.Generator) -> None:
    x = values(rng, (5, 7, 33), dtype)
    indices = rng.integers(-x.shape[axis], x.shape[axis], (3, 4)).astype(np.int32)
    want = np.take(x, indices, axis)
    (got,) = run("mo.gather", [x, indices], [(dtype, want.shape)], {"axis": axis})
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("bad", [5, -6, 2**31 - 1])
def test_gather_out_of_range(bad: int) -> None:
    x = np.zeros((5, 8), np.float32)
    with pytest.raises(KernelRunError, match=f"index {bad} is out of range for axis 0 of size 5"):
        run("mo.gather", [x, np.array([0, bad], np.int64)], [(np.float32, (2, 8))], {"axis": 0})


def test_gather_of_no_indices() -> None:
    (got,) = run(
        "mo.gather",
        [np.zeros((5, 8), np.float32), np.zeros(0, np.int64)],
        [(np.float32, (0, 8))],
        {"axis": 0},
    )
    assert got.shape == (0, 8)


@pytest.mark.parametrize("batch_dims", [0, 1, 2])
@pytest.mark.parametrize("depth", [1, 2])
def test_gather_nd(batch_dims: int, depth: int, rng: np.random.Generator) -> None:
    x = values(rng, (2, 3, 4, 5, 6), np.dtype(np.float32))
    lead = x.shape[:batch_dims]
    limits = x.shape[batch_dims : batch_dims + depth]
    indices = np.stack([rng.integers(-n, n, (*lead, 7)) for n in limits], -1).astype(np.int64)
    want = np.empty((*lead, 7, *x.shape[batch_dims + depth :]), np.float32)
    for at in np.ndindex(*lead, 7):
        want[at] = x[(*at[:batch_dims], *indices[at])]
    (got,) = run(
        "mo.gather_nd", [x, indices], [(np.float32, want.shape)], {"batch_dims": batch_dims}
    )
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_scatter(dtype: np.dtype, axis: int, rng: np.random.Generator) -> None:
    x = values(rng, (4, 5, 6), dtype)
    shape = list(x.shape)
    shape[axis] = 3
    indices = rng.integers(-x.shape[axis], x.shape[axis], shape).astype(np.int64)
    updates = values(rng, tuple(shape), dtype)
    want = x.copy()
    for at in np.ndindex(*shape):  # in order: the last of equal indices wins
        to = list(at)
        to[axis] = indices[at]
        want[tuple(to)] = updates[at]
    (got,) = run("mo.scatter", [x, updates, indices], [(dtype, x.shape)], {"axis": axis})
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("workers", [1, 2])
def test_scatter_nd(depth: int, workers: int, rng: np.random.Generator) -> None:
    x = values(rng, (4, 5, 37), np.dtype(np.float32))
    indices = np.stack([rng.integers(-n, n, 30) for n in x.shape[:depth]], -1).astype(np.int32)
    updates = values(rng, (30, *x.shape[depth:]), np.dtype(np.float32))
    want = x.copy()
    for i in range(30):
        want[tuple(indices[i])] = updates[i]
    (got,) = run("mo.scatter_nd", [x, updates, indices], [(np.float32, x.shape)], workers=workers)
    np.testing.assert_array_equal(got, want)


COMBINE = {"add": np.add, "max": np.maximum, "min": np.minimum, "mul": np.multiply}


@pytest.mark.parametrize("dtype", DTYPES[:-1], ids=str)
@pytest.mark.parametrize("reduction", COMBINE)
@pytest.mark.parametrize("workers", [1, 3])
def test_scatter_reductions_of_equal_indices(
    dtype: np.dtype, reduction: str, workers: int, rng: np.random.Generator
) -> None:
    """Each update is applied in order and rounded, whatever the number of workers."""
    x, updates = values(rng, (3, 37), dtype), values(rng, (20, 37), dtype)
    indices = rng.integers(-3, 3, (20, 37)).astype(np.int32)
    want = x.copy()
    for at in np.ndindex(*updates.shape):
        to = (indices[at], at[1])
        want[to] = COMBINE[reduction](want[to], updates[at])
    attributes = {"axis": 0, "reduction": reduction}
    operands = [x, updates, indices]
    (got,) = run("mo.scatter_reduce", operands, [(dtype, x.shape)], attributes, workers=workers)
    np.testing.assert_array_equal(got, want)
    vectors = indices[:, :1].astype(np.int64)
    want = x.copy()
    for i in range(20):
        want[vectors[i, 0]] = COMBINE[reduction](want[vectors[i, 0]], updates[i])
    (got,) = run(
        "mo.scatter_nd_reduce",
        [x, updates, vectors],
        [(dtype, x.shape)],
        {"reduction": reduction},
        workers=workers,
    )
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("reduction", COMBINE)
def test_scatter_reductions_keep_nan(reduction: str) -> None:
    x = np.array([1.0, np.nan, 3.0], np.float32)
    updates = np.array([np.nan, 2.0, 5.0, np.nan], np.float32)
    indices = np.array([0, 1, 2, 2])
    attributes = {"axis": 0, "reduction": reduction}
    (got,) = run("mo.scatter_reduce", [x, updates, indices], [(np.float32, (3,))], attributes)
    assert np.isnan(got).all()


@pytest.mark.parametrize("size", [16383, 16384, 16385, 40000])
def test_scatter_copies_in_several_tasks(size: int, rng: np.random.Generator) -> None:
    x, updates = (values(rng, (n,), np.dtype(np.float32)) for n in (size, 3))
    indices = np.array([0, size - 1, 7])
    want = x.copy()
    want[indices] = updates
    (got,) = run("mo.scatter", [x, updates, indices], [(np.float32, x.shape)], {"axis": 0})
    np.testing.assert_array_equal(got, want)


def test_scatter_out_of_range() -> None:
    x = np.zeros((3, 4), np.float32)
    with pytest.raises(KernelRunError, match="index 3 is out of range for axis 0 of size 3"):
        run(
            "mo.scatter_nd",
            [x, np.zeros((1, 4), np.float32), np.array([[3]])],
            [(np.float32, x.shape)],
        )


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.kind != "b"], ids=str)
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize(
    ("exclusive", "reverse"), [(False, False), (True, False), (False, True), (True, True)]
)
def test_cumsum(
    dtype: np.dtype, axis: int, exclusive: bool, reverse: bool, rng: np.random.Generator
) -> None:
    x = values(rng, (3, 9, 35), dtype)
    wide = x.astype(np.float64) if dtype.kind == "f" or dtype == BF16 else x.astype(np.int64)
    flipped = np.flip(wide, axis) if reverse else wide
    want = np.cumsum(flipped, axis)
    want = want - flipped if exclusive else want
    want = np.flip(want, axis) if reverse else want
    (got,) = run(
        "mo.cumsum",
        [x],
        [(dtype, x.shape)],
        {"axis": axis, "exclusive": exclusive, "reverse": reverse},
    )
    assert_close(got, want.astype(dtype), dtype=dtype)


@settings(max_examples=25)
@given(
    n=st.integers(1, 70),
    count=st.integers(1, 70),
    axis=st.sampled_from([0, 1]),
    distinct=st.integers(1, 40),
    seed=st.integers(0, 99),
)
def test_top_k(n: int, count: int, axis: int, distinct: int, seed: int) -> None:
    count = min(count, n)
    rng = np.random.default_rng(seed)
    x = rng.integers(0, distinct, (n, 3) if axis == 0 else (3, n)).astype(np.float32)
    order = np.argsort(-x, axis, kind="stable")
    places = np.take(order, np.arange(count), axis)
    want = np.take_along_axis(x, places, axis)
    shape = want.shape
    got, indices = run(
        "mo.top_k", [x], [(np.float32, shape), (np.int64, shape)], {"k": count, "axis": axis}
    )
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(indices, places)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, BF16, np.int32], ids=str)
@pytest.mark.parametrize(("n", "count"), [(63, 5), (1000, 50), (5003, 64)])
@pytest.mark.parametrize("name", ["mo.top_k", "mo.bottom_k"])
def test_top_k_of_long_rows(
    name: str, dtype: np.dtype, n: int, count: int, rng: np.random.Generator
) -> None:
    x = (rng.standard_normal((3, n)) * 1000).astype(dtype)
    if np.dtype(dtype).kind != "i":
        x[1, [7, n - 2]] = np.nan
        x[2, 5:20] = np.inf
    x[2, 30:40] = x[2, 29]
    wide = np.where(np.isnan(x.astype(np.float64)), np.inf, x.astype(np.float64))
    nans = np.isnan(x.astype(np.float64)).astype(np.float64)
    sign = -1 if name == "mo.top_k" else 1  # NaN is the greatest: the first, or the last
    places = np.stack(
        [np.lexsort((sign * row, sign * nan)) for row, nan in zip(wide, nans, strict=True)]
    )
    places = places[:, :count]
    shape = (3, count)
    got, indices = run(name, [x], [(dtype, shape), (np.int64, shape)], {"k": count, "axis": 1})
    np.testing.assert_array_equal(indices, places)
    np.testing.assert_array_equal(
        got.astype(np.float64), np.take_along_axis(x, places, 1).astype(np.float64)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["argmax", "argmin"])
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("n", [1, 7, 50])
def test_arg(dtype: np.dtype, name: str, axis: int, n: int, rng: np.random.Generator) -> None:
    shape = [3, 4, 5]
    shape[axis] = n
    x = values(rng, tuple(shape), dtype)
    want = np.expand_dims(getattr(np, name)(x.astype(np.float64), axis), axis)
    (got,) = run(f"mo.{name}", [x], [(np.int64, want.shape)], {"axis": axis})
    np.testing.assert_array_equal(got, want)


def test_argmax_takes_the_first_nan_and_the_first_of_equals() -> None:
    x = np.array([[1, 5, 5, 2] * 10, [1, np.nan, 9, np.nan] * 10], np.float32)
    (got,) = run("mo.argmax", [x], [(np.int64, (2, 1))], {"axis": 1})
    np.testing.assert_array_equal(got, [[1], [1]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pad(dtype: np.dtype, rng: np.random.Generator) -> None:
    x = values(rng, (2, 3, 19), dtype)
    low, high = (1, 0, 5), (2, 1, 3)
    want = np.pad(x, list(zip(low, high, strict=True)), constant_values=1)
    (got,) = run(
        "mo.pad",
        [x],
        [(dtype, want.shape)],
        {"low": low, "high": high, "mode": "constant", "value": 1},
    )
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_concat(dtype: np.dtype, axis: int, rng: np.random.Generator) -> None:
    parts = []
    for n in (3, 0, 1, 20):
        shape = [2, 3, 5]
        shape[axis] = n
        parts.append(values(rng, tuple(shape), dtype))
    want = np.concatenate(parts, axis)
    (got,) = run("mo.concat", parts, [(dtype, want.shape)], {"axis": axis})
    np.testing.assert_array_equal(got, want)


def test_concat_of_rows_of_several_tasks(rng: np.random.Generator) -> None:
    parts = [values(rng, (2, n), np.dtype(np.float32)) for n in (4095, 4096, 4097, 9000)]
    want = np.concatenate(parts, 1)
    (got,) = run("mo.concat", parts, [(np.float32, want.shape)], {"axis": 1})
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("shape", [(1,), (4096,), (3, 1365), (17, 241), (5, 7, 300)])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_nonzero(shape: tuple[int, ...], share: float, rng: np.random.Generator) -> None:
    mask = rng.random(shape) < share
    want = np.argwhere(mask)
    (got,) = run("mo.nonzero", [mask, np.array(len(want))], [(np.int64, want.shape)])
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("ascending", [True, False])
@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 33, 64, 65, 1024, 1025, 2049, 5003, 17000])
@pytest.mark.parametrize("distinct", [4, 100000])
def test_argsort(n: int, ascending: bool, distinct: int, rng: np.random.Generator) -> None:
    """Rows sorted by one insertion, by several merges and by several workers; the order of equal elements is kept."""
    x = rng.integers(0, distinct, (2, n)).astype(np.float32)
    want = np.argsort(x if ascending else -x, 1, kind="stable")
    options = {"axis": 1, "ascending": ascending}
    (got,) = run("mo.argsort", [x], [(np.int64, x.shape)], options)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8, np.float32, np.float64])
@pytest.mark.parametrize(("start", "stop", "step"), [(0, 10, 1), (3, 11, 3), (5, 5, 2), (7, 2, 3)])
def test_range(dtype: type, start: int, stop: int, step: int) -> None:
    want = np.arange(start, stop, step).astype(dtype)
    (got,) = run(
        "mo.range", [np.array(v, dtype) for v in (start, stop, step)], [(dtype, want.shape)]
    )
    np.testing.assert_array_equal(got, want)


def test_range_downwards_and_fractions() -> None:
    for bounds in ((10, 1, -4), (0.5, 3.1, 0.25)):
        want = np.arange(*bounds).astype(np.float32)
        (got,) = run(
            "mo.range", [np.array(v, np.float32) for v in bounds], [(np.float32, want.shape)]
        )
        assert_close(got, want)


@pytest.mark.parametrize(
    ("bounds", "length", "message"),
    [((0, 10, 3), 5, "4 elements, but the result has 5"), ((0, 10, 0), 5, "step is 0")],
)
def test_range_errors(bounds: tuple[int, int, int], length: int, message: str) -> None:
    with pytest.raises(KernelRunError, match=message):
        run("mo.range", [np.array(v, np.int64) for v in bounds], [(np.int64, (length,))])


bound = st.integers(-9, 9)


@settings(max_examples=30)
@given(
    slices=st.lists(
        st.tuples(bound, bound, st.sampled_from([-3, -1, 1, 2])), min_size=1, max_size=3
    )
)
def test_slice_dynamic(slices: list[tuple[int, int, int]]) -> None:
    shape = (5, 6, 7)[: len(slices)]
    x = np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape)
    want = x[tuple(slice(*s) for s in slices)]
    vectors = [np.array(column, np.int64) for column in zip(*slices, strict=True)]
    (got,) = run("mo.slice_dynamic", [x, *vectors], [(np.float32, want.shape)])
    np.testing.assert_array_equal(got, want)


def test_slice_dynamic_of_another_size_raises() -> None:
    x = np.zeros(10, np.float32)
    with pytest.raises(
        KernelRunError, match="axis 0 has 3 elements from 2 to 5 by 1; the result has 4"
    ):
        run("mo.slice_dynamic", [x, *(np.array([v]) for v in (2, 5, 1))], [(np.float32, (4,))])
