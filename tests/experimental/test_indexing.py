"""Masks and arrays as indices of tensors, beside NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from max import driver
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.experimental import Tensor
from max.experimental import functional as F
from max.experimental.programs.programs import compiled_programs
from max.graph import DeviceRef, Graph, TensorType

Array = np.ndarray[Any, Any]
REFUSED = (IndexError, ValueError, TypeError)


def drawn_index(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """An index of NumPy: masks and arrays that broadcast among integers, slices, None and dots."""
    index: list[Any] = []
    left = list(shape)
    lead = tuple(rng.integers(0, 4, rng.integers(0, 3)))
    masks = 0
    while left and rng.integers(6):
        size, kind = left[0], rng.integers(9)
        if kind == 0:
            index.append(None)
        elif kind == 1 and Ellipsis not in [
            type(i) if isinstance(i, np.ndarray) else i for i in index
        ]:
            index.append(Ellipsis)
            left = left[rng.integers(0, len(left) + 1) :]
        elif kind in (2, 3):
            start, stop = (
                int(rng.integers(-size, size)) if size and rng.integers(2) else None for _ in "ab"
            )
            index.append(slice(start, stop, (None, 1, 2, -1)[rng.integers(4)]))
            left.pop(0)
        elif kind == 4:
            value = int(rng.integers(-size, size)) if size else 0
            index.append(value if rng.integers(2) else np.asarray(value, np.int64))
            left.pop(0)
        elif kind == 5 and (not masks or rng.integers(4) == 0):
            rank = min(int(rng.integers(0, 3)), len(left))
            index.append(np.asarray(rng.random(left[:rank]) < 0.5))
            left, masks = left[rank:], masks + 1
        elif size:
            sizes = tuple(1 if rng.integers(3) == 0 else d for d in lead)[
                rng.integers(0, len(lead) + 1) :
            ]
            dtype = (np.int64, np.int32, np.uint8, np.int8)[rng.integers(4)]
            low = 0 if dtype == np.uint8 else -size
            index.append(rng.integers(low, size, sizes or (1,)).astype(dtype))
            left.pop(0)
    return tuple(index)


def at(array: Any, index: Any) -> Any:
    """The elements at an index, or the class of its error."""
    try:
        return np.asarray(array[index])
    except REFUSED:
        return IndexError


@pytest.mark.parametrize(
    ("first", "count"),
    [(0, 40), *[pytest.param(n, 400, marks=pytest.mark.long) for n in range(1, 6)]],
)
def test_random_indices(first: int, count: int) -> None:
    rng, selected = np.random.default_rng(first), 0
    for _ in range(count):
        shape = tuple(
            int(s) for s in rng.choice(6, rng.integers(0, 5), p=[0.05, 0.15, 0.2, 0.2, 0.2, 0.2])
        )
        dtype = rng.choice(["float32", "int64", "bool", "int8", "float64"])
        array = np.asarray(rng.integers(0, 100, shape)).astype(dtype)
        index = drawn_index(rng, shape)
        given: Any = tuple(
            Tensor.constant(i)
            if isinstance(i, np.ndarray) and (not i.ndim or rng.integers(3))
            else i
            for i in index
        )
        if len(index) == 1 and rng.integers(2):
            index, given = index[0], given[0]
        x = Tensor.constant(array.copy())
        want, got = at(array, index), at(x, given)
        np.testing.assert_array_equal(got, want, str((shape, index)))
        if want is IndexError:
            continue
        assert got.shape == want.shape and got.dtype == want.dtype, (shape, index)
        selected += 1
        counts = np.zeros(shape, int)
        np.add.at(counts, index, 1)
        if counts.max(initial=0) > 1:  # NumPy does not say which of two values stays
            continue
        sizes = ((), want.shape, want.shape[1:])[rng.integers(3)]
        new = np.asarray(rng.integers(0, 50, sizes)).astype(dtype)
        array[index] = new
        x[given] = Tensor.constant(new) if rng.integers(2) else new
        np.testing.assert_array_equal(x.to_numpy(), array, str((shape, index)))
    assert selected > 0.8 * count


def test_bounds_of_slices() -> None:
    """In the range of the reference they select what they do in NumPy; out of range they are errors."""
    rng = np.random.default_rng(5)
    refused = 0
    for _ in range(120):
        size = int(rng.integers(0, 6))
        array = np.arange(size * 2, dtype=np.int32).reshape(size, 2)
        start, stop = (None if rng.integers(4) == 0 else int(rng.integers(-8, 8)) for _ in "ab")
        index = slice(start, stop, (None, 1, 2, -1, -2)[rng.integers(5)])
        beyond = int((index.step or 1) < 0)
        given = [bound for bound in (start, stop) if bound is not None]
        x = Tensor.constant(array)
        if all(-size - beyond <= bound <= size - beyond for bound in given):
            np.testing.assert_array_equal(x[index].to_numpy(), array[index], str((size, index)))
            continue
        refused += 1
        with pytest.raises(IndexError, match=f"out of range for axis 0 of size {size}; expected"):
            _ = x[index]
        with pytest.raises(IndexError, match="out of range"):
            x[index] = 1
    assert refused > 20


def test_where_the_axes_of_arrays_are() -> None:
    array = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)
    x, rows, mask = Tensor.constant(array), np.array([1, 0, 1]), array[0, 0] > 7
    for index in (
        np.s_[:, rows, :, rows],  # apart: first
        np.s_[:, 0, :, rows],
        np.s_[0, :, rows],
        np.s_[:, 0, rows],  # side by side: in their place
        np.s_[:, :, rows, 1],
        np.s_[:, 1, ..., rows, 0],  # dots for no axis keep them apart
        np.s_[:, 0, None, rows],
        np.s_[:, 1, mask],
        np.s_[rows, ..., mask],
        np.s_[None, :, rows, None],
    ):
        given = tuple(Tensor.constant(i) if isinstance(i, np.ndarray) else i for i in index)
        np.testing.assert_array_equal(at(x, given), at(array, index), str(index))


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        (lambda x: x > 0, None, ""),
        (lambda x: [0, 1], IndexError, "numpy.array"),
        (lambda x: ([0, 1], 0), TypeError, "numpy.array"),
        (lambda x: list(range(50)), TypeError, "a list of 50 "),
        (lambda x: np.array([0.0, 1.0]), TypeError, "float64, expected integers or bools"),
        (lambda x: np.array([True, False, True]), IndexError, "size 3 at axis 0, expected 2"),
        (
            lambda x: (slice(None), np.ones((2, 3), bool)),
            IndexError,
            "3 indices for a tensor of rank 2",
        ),
        (lambda x: (0, 0, np.array([0])), ValueError, "3 indices"),
        (lambda x: (np.array([0, 1]), np.array([0, 1, 2])), ValueError, "broadcast"),
        (lambda x: (..., np.array([0]), ...), IndexError, "more than one"),
        (lambda x: np.array([0, 2]), IndexError, "2"),
        (lambda x: (np.array([0, 1]), np.array([0, -4])), IndexError, "-4"),
    ],
)
def test_indices_that_do_not_fit(index: Any, error: Any, message: str) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    x = Tensor.constant(array)
    if error is None:
        np.testing.assert_array_equal(x[index(x)].to_numpy(), array[array > 0])
        return
    with pytest.raises(error, match=message):
        _ = x[index(array)].to_numpy()
    with pytest.raises(error):
        x[index(array)] = 5.0
    np.testing.assert_array_equal(x.to_numpy(), array)


def test_values_that_do_not_fit_are_not_written() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    x = Tensor.constant(array.copy())
    mask = x > 1
    value: Any
    for value, error in (
        (Tensor.ones([3]), ValueError),
        (np.ones(2, np.float64), TypeError),
        (Tensor.constant([1, 2, 3, 4], dtype=DType.int32), TypeError),
        ("a", TypeError),
    ):
        with pytest.raises(error):
            x[mask] = value
    np.testing.assert_array_equal(x.to_numpy(), array)


def test_other_arrays_as_indices_and_later_writes_to_them() -> None:
    array = np.arange(12, dtype=np.int32).reshape(4, 3)
    x = Tensor.constant(array)
    rows = np.array([2, 0])
    for index in (
        rows,
        torch.from_numpy(rows),
        driver.Tensor.from_numpy(rows),
        Tensor.from_dlpack(rows.copy()),
    ):
        np.testing.assert_array_equal(x[index, 1].to_numpy(), array[[2, 0], 1])
    later = x[rows] * 2
    rows[:] = 3
    np.testing.assert_array_equal(later.to_numpy(), array[[2, 0]] * 2)
    mask = torch.tensor([True, False, False, True])
    np.testing.assert_array_equal(x[mask].to_numpy(), array[[0, 3]])


def test_masks_that_select_other_numbers_compile_nothing_new() -> None:
    rng = np.random.default_rng(0)
    array = rng.standard_normal((64, 5)).astype(np.float32)
    x = Tensor.constant(array)
    for turn in range(12):
        low = rng.standard_normal()
        mask = x[:, 2] > float(low)
        np.testing.assert_array_equal(
            (x[mask] * 2).to_numpy(), array[array[:, 2] > np.float32(low)] * 2
        )
        rows = rng.integers(-64, 64, turn + 3)
        np.testing.assert_array_equal((x[rows, 1:] + 1).to_numpy(), array[rows, 1:] + 1)
        if turn == 6:
            programs = compiled_programs()
    assert compiled_programs() == programs  # pyright: ignore[reportPossiblyUnboundVariable]


def test_what_was_recorded_before_a_write_has_the_elements_before() -> None:
    x = Tensor.constant(np.arange(4, dtype=np.float32))
    y, z = x * 2, x[x > 1]
    x[x > 1] = z * 10
    np.testing.assert_array_equal(y.to_numpy(), [0, 2, 4, 6])
    np.testing.assert_array_equal(x.to_numpy(), [0, 1, 20, 30])


def test_in_a_graph() -> None:
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    rows = np.array([1, 0, 1])
    with Graph(
        "rows", input_types=[TensorType(DType.float32, ["n", 3, 4], DeviceRef.CPU())]
    ) as graph:
        x = Tensor.from_graph_value(graph.inputs[0])
        with pytest.raises(TypeError, match=r"F\.nonzero"):
            _ = x[x > 0]
        with pytest.raises(TypeError, match=r"F\.where"):
            x[rows] = 0.0
        index = F.constant(rows, dtype=DType.int64, device=CPU())
        graph.output(
            *[t.__tensorvalue__() for t in (x[rows], x[:, index, index], x[rows, :, rows])]
        )
    got = InferenceSession(devices=[CPU()]).load(graph).execute(array)
    for tensor, want in zip(
        got, (array[rows], array[:, rows, rows], array[rows, :, rows]), strict=True
    ):
        np.testing.assert_array_equal(tensor.to_numpy(), want)
