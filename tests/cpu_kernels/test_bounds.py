"""Loops over chunks, runs and groups at their bounds: kernels in the interpreter, which refuses each access outside of
a tensor or a workspace, with constants so small that few elements make many chunks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from max import kernel as k
from max._backends.cpu.kernels.indexing import movement, nonzero, scatter, sorting
from tests.cpu_kernels.harness import interpreted, lowered, run, target

F32, I64, U32, I32 = np.float32, np.int64, np.uint32, np.int32
SIZES = (0, 1, 3, 4, 5, 8, 9, 12)
"""Sizes around multiples of the number of elements of a chunk, 4."""
Way = Callable[..., list[np.ndarray[Any, Any]]]


@pytest.mark.parametrize("way", [run, interpreted])
def test_indices_of_an_empty_result_are_checked(way: Way) -> None:
    """No row is copied, and an index out of range is an error all the same."""
    x = np.zeros((0, 5, 3), F32)
    for fits in ([], [4, -5], [0]):
        indices = np.array(fits, I64)
        (got,) = way("mo.gather", [x, indices], [(F32, (0, len(fits), 3))], {"axis": 1})
        assert got.shape == (0, len(fits), 3)
    for beyond in (5, -6):
        with pytest.raises(IndexError, match=f"index {beyond} is out of range for axis 1 of size 5"):  # fmt: skip
            way("mo.gather", [x, np.array([0, beyond])], [(F32, (0, 2, 3))], {"axis": 1})


@pytest.mark.parametrize("way", [run, interpreted])
def test_unsigned_indices(way: Way) -> None:
    x = np.arange(15, dtype=F32).reshape(5, 3)
    for dtype, far in ((np.uint8, (6, 255)), (np.uint64, (6, 2**63, 2**64 - 1))):
        indices = np.array([4, 0, 1], dtype)
        (got,) = way("mo.gather", [x, indices], [(F32, (3, 3))], {"axis": 0})
        np.testing.assert_array_equal(got, x[[4, 0, 1]])
        for beyond in (5, *far):
            wrong = np.array([0, beyond, 1], dtype)
            message = f"index {beyond} is out of range for axis 0 of size 5"
            with pytest.raises(IndexError, match=message):
                way("mo.gather", [x, wrong], [(F32, (3, 3))], {"axis": 0})


def test_index_vectors_of_single_elements() -> None:
    x, indices = np.arange(6.0).reshape(2, 3), np.array([[[2]], [[-3]]])
    (got,) = interpreted("mo.gather_nd", [x, indices], [(x.dtype, (2, 1))], {"batch_dims": 1})
    np.testing.assert_array_equal(got, [[2], [3]])


@pytest.mark.parametrize("way", [run, interpreted])
def test_the_axis_of_an_index_vector_is_named(way: Way) -> None:
    x, indices = np.zeros((2, 3, 4, 5), F32), np.zeros((2, 1, 2), I64)
    for d, (axis, size) in enumerate(((1, 3), (2, 4))):
        wrong = indices.copy()
        wrong[1, 0, d] = size
        message = f"index {size} is out of range for axis {axis} of size {size}"
        with pytest.raises(IndexError, match=message):
            way("mo.gather_nd", [x, wrong], [(F32, (2, 1, 5))], {"batch_dims": 1})


def test_copies_of_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scatter, "COPY", 4)
    for size in SIZES[1:]:
        x = np.arange(size, dtype=F32)
        operands = [x, np.array([-1.0], F32), np.array([size - 1])]
        for workers in (1, 2):
            (got,) = interpreted("mo.scatter", operands, [(F32, (size,))], {"axis": 0}, workers)
            np.testing.assert_array_equal(got, [*x[:-1], -1])


def test_concatenated_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(movement, "CHUNK", 4)
    for sizes in (SIZES, SIZES[::-1], (4, 8)):
        parts = [np.random.default_rng(n).normal(size=(2, n)).astype(F32) for n in sizes]
        want = np.concatenate(parts, 1)
        (got,) = interpreted("mo.concat", parts, [(F32, want.shape)], {"axis": 1})
        np.testing.assert_array_equal(got, want)


def test_elements_of_chunks_that_are_not_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nonzero, "CHUNK", 4)
    for size in SIZES:
        for mask in (
            np.zeros(size, bool),
            np.ones((1, size), bool),
            np.arange(2 * size).reshape(2, size) % 3 == 1,
        ):
            want = np.argwhere(mask)
            operands = [mask, np.array(len(want))]
            (got,) = interpreted("mo.nonzero", operands, [(I64, want.shape)], workers=2)
            np.testing.assert_array_equal(got, want)
            (counts,) = lowered("mo.nonzero", operands, [want]).workspaces
            assert counts.shape == (math.ceil(mask.size / 4),)
            for rows in {max(len(want) - 1, 0), len(want) + 1} - {len(want)}:
                message = f"{len(want)} elements are not 0, but the result has {rows} rows"
                with pytest.raises(ValueError, match=message):
                    interpreted("mo.nonzero", operands, [(I64, (rows, mask.ndim))])


@pytest.mark.parametrize("ascending", [True, False])
@pytest.mark.parametrize(("run_size", "piece"), [(4, 3), (21, 2)])
def test_sorted_runs(
    ascending: bool, run_size: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many runs of few pieces, and few runs of many pieces, which are merged in several rounds."""
    monkeypatch.setattr(sorting, "MIN_RUN", run_size)
    monkeypatch.setattr(sorting, "INSERTION_RUN", piece)
    rng = np.random.default_rng(6)
    for size in (0, 1, 4, 5, 8, 17, 21, 22, 63, 64, 65, 71):
        x = rng.integers(0, 9, (1, size)).astype(F32)
        want = np.argsort(x if ascending else -x, 1, kind="stable")
        options = {"axis": 1, "ascending": ascending}
        (got,) = interpreted("mo.argsort", [x], [(I64, x.shape)], options)
        np.testing.assert_array_equal(got, want)
    x = rng.integers(0, 9, (2, 30, 3)).astype(F32)
    want = np.argsort(x if ascending else -x, 1, kind="stable")
    (got,) = interpreted("mo.argsort", [x], [(I64, x.shape)], {"axis": 1, "ascending": ascending})
    np.testing.assert_array_equal(got, want)


def order_of(ids: np.ndarray[Any, Any], count: int) -> list[np.ndarray[Any, Any]]:
    """The results of `mo.moe.indices`."""
    n = len(ids)
    order = np.argsort(ids, kind="stable")
    used, first, sizes = np.unique(ids[order], return_index=True, return_counts=True)
    starts, experts, restored = np.full(count + 1, n), np.full(count, -1), np.empty(n, I64)
    starts[: len(used)], experts[: len(used)] = first, used
    restored[order] = np.arange(n)
    return [order, starts, restored, experts, np.array([max(sizes, default=0), len(used)])]


def experts_of(way: Way, ids: list[int], count: int, dtype: Any = I32) -> list[Any]:
    n = len(ids)
    results = [(U32, (n,)), (U32, (count + 1,)), (U32, (n,)), (I32, (count,)), (U32, (2,))]
    return way("mo.moe.indices", [np.array(ids, dtype)], results, {"experts": count})


@pytest.mark.parametrize("way", [run, interpreted])
def test_the_order_of_experts(way: Way) -> None:
    for ids in ([], [4], [0], [3, 0, 3, 4, 0], [1, 1, 1], [4, 3, 2, 1, 0, 4], [2, 3, 2, 2, 3]):
        for count in (5, 6):
            got = experts_of(way, ids, count)
            for ours, theirs in zip(got, order_of(np.array(ids, I64), count), strict=True):
                np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("way", [run, interpreted])
def test_an_expert_beyond_the_last(way: Way) -> None:
    for beyond, dtype in ((-1, I32), (5, I32), (2**31 - 1, I32), (-(2**31), I32), (2**64 - 1, np.uint64)):  # fmt: skip
        with pytest.raises(IndexError, match=rf"topk_ids\[1\] is {beyond}; there are 5 experts"):
            experts_of(way, [4, beyond, 0], 5, dtype)


def range_of(way: Way, bounds: tuple[Any, ...], dtype: Any, length: int) -> np.ndarray[Any, Any]:
    operands = [np.array(n, dtype) for n in bounds]
    return way("mo.range", operands, [(dtype, (length,))])[0]


@pytest.mark.parametrize("dtype", [np.int8, I64, np.uint64, F32])
def test_ranges(dtype: Any) -> None:
    signed = np.dtype(dtype).kind != "u"
    for start in (0, 1, 5):
        for stop in (-4, -3, 0, 1, 2, 4, 5, 6, 9) if signed else (0, 1, 2, 4, 5, 6, 9):
            for step in (-3, -2, -1, 1, 2, 3, 4) if signed else (1, 2, 3, 4):
                want = range(start, stop, step)
                got = range_of(interpreted, (start, stop, step), dtype, len(want))
                np.testing.assert_array_equal(got, np.array(want, dtype))
                for length in {max(len(want) - 1, 0), len(want) + 1} - {len(want)}:
                    message = f"{len(want)} elements, but the result has {length}"
                    with pytest.raises(ValueError, match=message):
                        range_of(interpreted, (start, stop, step), dtype, length)


def test_ranges_of_fractions() -> None:
    for dtype, bounds, length in ((F32, (0.1, 0.95, 0.3), 3), (np.float64, (0.1, -1.9, -0.7), 3)):
        start, _, step = (dtype(n) for n in bounds)
        for way in (run, interpreted):
            got = range_of(way, bounds, dtype, length)
            np.testing.assert_allclose(
                got, start + np.arange(3) * step, rtol=2 * np.finfo(dtype).eps
            )


@pytest.mark.parametrize("way", [run, interpreted])
def test_ranges_of_too_many_elements(way: Way) -> None:
    low, high = -(2**63), 2**63 - 1
    for start, stop, step in (
        (low, high, 1), (high, low, -1), (high, low, low), (low, high, high), (0, 1, high), (0, -1, low),
    ):  # fmt: skip
        message = f"{-((start - stop) // step)} elements, but the result has 5"
        with pytest.raises(ValueError, match=rf"^(mo\.range: )?{message}"):
            range_of(way, (start, stop, step), I64, 5)
    with pytest.raises(ValueError, match="the step is 0"):
        range_of(way, (0, 0, 0), I64, 0)
    for sign in (1.0, -1.0):
        with pytest.raises(ValueError, match=f"{2**62} elements, but the result has 5"):
            range_of(way, (0.0, sign * 2.0**62, sign), np.float64, 5)
        with pytest.raises(ValueError, match="is not a range"):
            range_of(way, (0.0, sign * (2.0**62 + 1024), sign), np.float64, 5)


FAR = (-(2**63), -4, -3, -1, 0, 2, 3, 4, 2**63 - 1)
STEPS = (-(2**63), -2, -1, 1, 2, 2**63 - 1)


def slices(name: str, x: Any, part: Any, bounds: list[tuple[int, int, int]]) -> Any:
    """Takes or stores a slice in the interpreter; returns the part, or the tensor after the store."""
    columns = [np.array(column, I64) for column in zip(*bounds, strict=True)]
    if name == "mo.slice_dynamic":
        return interpreted(name, [x, *columns], [(x.dtype, part.shape)])[0]
    whole = x.copy()
    interpreted(name, [part, whole, *columns], [])
    return whole


@pytest.mark.parametrize("name", ["mo.slice_dynamic", "mo.buffer_store_slice_dynamic"])
@pytest.mark.parametrize("size", [0, 3])
def test_slices(name: str, size: int) -> None:
    x = np.arange(size, dtype=I64)
    for start in FAR:
        for stop in FAR:
            for step in STEPS:
                at = slice(start, stop, step)
                part = -1 - np.arange(len(x[at]))
                want = x[at]
                if name != "mo.slice_dynamic":
                    want = x.copy()
                    want[at] = part
                got = slices(name, x, part, [(start, stop, step)])
                np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", ["mo.slice_dynamic", "mo.buffer_store_slice_dynamic"])
def test_slices_of_several_axes(name: str) -> None:
    x = np.arange(105).reshape(3, 5, 7)
    several = ((0, 5, 2), (-1, -6, -1), (2**63 - 1, 0, -2), (-4, 2**63 - 1, 1), (1, 2, 2**63 - 1))
    for bounds in itertools.permutations(several, 3):
        at = tuple(slice(*b) for b in bounds)
        part = -1 - np.arange(x[at].size).reshape(x[at].shape)
        want = x[at]
        if name != "mo.slice_dynamic":
            want = x.copy()
            want[at] = part
        assert part.size
        np.testing.assert_array_equal(slices(name, x, part, list(bounds)), want)


@pytest.mark.parametrize("name", ["mo.slice_dynamic", "mo.buffer_store_slice_dynamic"])
def test_slices_of_another_size(name: str) -> None:
    x, part = np.zeros((2, 3), I64), np.zeros((2, 1), I64)
    for start, stop, step, message in (
        (0, 3, 2, "axis 1 has 2 elements from 0 to 3 by 2; the result has 1"),
        (2, 2, 1, "axis 1 has 0 elements from 2 to 2 by 1; the result has 1"),
        (3, 5, 1, "axis 1 has 0 elements from 3 to 5 by 1; the result has 1"),
        (2, 0, -1, "axis 1 has 2 elements from 2 to 0 by -1; the result has 1"),
        (-1, 0, -1, "axis 1 has 2 elements from -1 to 0 by -1; the result has 1"),
        (0, 1, 0, "the step along axis 1 is 0"),
    ):
        with pytest.raises(ValueError, match=message):
            slices(name, x, part, [(0, 2, 1), (start, stop, step)])
    for at in (3, -4):
        with pytest.raises(IndexError, match=f"index {at} is out of range for axis 1 of size 3"):
            slices(name, x, part, [(0, 2, 1), (at, at + 1, 1)])
    with pytest.raises(ValueError, match="axis 1 has 0 elements from 3 to 4 by 1; the result has 2"):  # fmt: skip
        slices(name, x, np.zeros((2, 2), I64), [(0, 2, 1), (3, 4, 1)])


@pytest.mark.parametrize("name", ["mo.top_k", "mo.bottom_k"])
def test_the_best_elements(name: str) -> None:
    """Of rows shorter and longer than the vectors that are compared with the worst kept one; equal ones in order."""
    rng = np.random.default_rng(8)
    for size in (1, 2, 3, 6, 15, 16, 17, 40):
        for count in {1, 2, 5, size} & set(range(1, size + 1)):
            axis = count % 2
            x = rng.integers(0, 3 if count == 5 else 99, (size, 2)[:: 1 - 2 * axis]).astype(F32)
            order = np.argsort(-x if name == "mo.top_k" else x, axis, kind="stable")
            want = np.take(order, range(count), axis)
            results = [(F32, want.shape), (I64, want.shape)]
            attributes = {"k": count, "axis": axis}
            got, places = interpreted(name, [x], results, attributes, machine="generic")
            np.testing.assert_array_equal(places, want)
            np.testing.assert_array_equal(got, np.take_along_axis(x, want, axis))


@pytest.mark.parametrize("name", ["argmax", "argmin"])
@pytest.mark.parametrize("dtype", [F32, np.bool_, np.int8])
def test_the_first_best_element(name: str, dtype: Any) -> None:
    """Of rows of a vector's lanes, of one more and of one less."""
    lanes = target("host").width(k.i64)
    rng = np.random.default_rng(9)
    for size in (
        1,
        2,
        3,
        7,
        lanes - 1 or 1,
        lanes,
        lanes + 1,
        2 * lanes - 1,
        2 * lanes,
        3 * lanes + 1,
    ):
        for axis in (0, 1):
            x = rng.integers(0, 4, (size, 2) if axis == 0 else (2, size)).astype(dtype)
            want = np.expand_dims(getattr(np, name)(x, axis), axis)
            (got,) = interpreted(f"mo.{name}", [x], [(I64, want.shape)], {"axis": axis})
            np.testing.assert_array_equal(got, want)
