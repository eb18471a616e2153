"""Indexing against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from max import _interpreter, mlir
from max.dtype import DType
from max.graph import DeviceRef, Dim, Graph, TensorType, TensorValue, ops

CPU = DeviceRef.CPU()


@st.composite
def indexings(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    """Draws a shape, and indices that both NumPy and the reference allow."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    items: list[Any] = []
    for size in shape[: draw(st.integers(0, len(shape)))]:
        kind = draw(st.sampled_from(["int", "slice", "slice", "back"]))
        if kind == "int":
            items.append(draw(st.integers(-size, size - 1)))
            continue
        beyond = int(kind == "back")
        bound = st.one_of(st.none(), st.integers(-size - beyond, size - beyond))
        step = draw(st.integers(1, 3)) * (1 if kind == "slice" else -1)
        items.append(slice(draw(bound), draw(bound), draw(st.sampled_from([step, step, None]))))
        if kind == "back" and items[-1].step is None:
            items[-1] = slice(items[-1].start, items[-1].stop, step)
    if draw(st.booleans()) and len(items) == len(shape):
        items.insert(draw(st.integers(0, len(items))), Ellipsis)
    for _ in range(draw(st.integers(0, 2))):
        items.insert(draw(st.integers(0, len(items))), None)
    return shape, tuple(items)


def run(x: np.ndarray, index: Any, symbolic: bool) -> np.ndarray:
    dims = [f"d{i}" if symbolic else n for i, n in enumerate(x.shape)]
    graph = Graph("g", lambda v: v[index], [TensorType(DType.int64, dims, CPU)])
    mlir.verify_module(graph.to_mlir())
    (out,) = _interpreter.run(graph, [x])
    return out


@given(indexings())
def test_static_sizes(case: tuple[tuple[int, ...], tuple[Any, ...]]) -> None:
    shape, index = case
    x = np.arange(np.prod(shape)).reshape(shape)
    np.testing.assert_array_equal(run(x, index, symbolic=False), x[index])


@pytest.mark.parametrize(
    "index",
    [
        np.s_[:],
        np.s_[...],
        np.s_[1:],
        np.s_[:-1],
        np.s_[-2:],
        np.s_[2:5],
        np.s_[::2],
        np.s_[1::3, ::-1],
        np.s_[::-2, -1],
        np.s_[-1, None, 0],
        np.s_[..., 1:-1],
        np.s_[3, ..., None],
        np.s_[4:1:-1],
        np.s_[-2:0:-2],
    ],
    ids=str,
)
def test_symbolic_sizes(index: Any) -> None:
    x = np.arange(35).reshape(7, 5)
    np.testing.assert_array_equal(run(x, index, symbolic=True), x[index])


def test_dimensions_as_bounds() -> None:
    def forward(x: TensorValue) -> tuple[TensorValue, ...]:
        n = x.shape[0]
        return x[: n // 2], x[n // 2 :], x[n - 1], x[(slice(0, n // 2), n // 2),]

    graph = Graph("g", forward, [TensorType(DType.int64, ("n",), CPU)])
    x = np.arange(7)
    outputs = _interpreter.run(graph, [x])
    for out, expected in zip(outputs, [x[:3], x[3:], x[6], x[:3]], strict=True):
        np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("i", [0, 3, -1, -7])
def test_tensor_as_index(i: int) -> None:
    scalar = TensorType(DType.int32, (), CPU)
    graph = Graph("g", lambda x, i: x[1:, i], [TensorType(DType.int64, (3, 7), CPU), scalar])
    x = np.arange(21).reshape(3, 7)
    (out,) = _interpreter.run(graph, [x, np.array(i, np.int32)])
    np.testing.assert_array_equal(out, x[1:, i])


@pytest.mark.parametrize(("start", "stop", "step"), [(1, 6, 2), (-3, 7, 1), (6, 0, -2), (2, 2, 1)])
def test_tensors_as_bounds(start: int, stop: int, step: int) -> None:
    scalar = TensorType(DType.int64, (), CPU)

    def forward(x: TensorValue, *bounds: TensorValue) -> TensorValue:
        return x[(slice(*bounds), "m"), None, ::-1]

    graph = Graph("g", forward, [TensorType(DType.int64, ("n", 2), CPU), *[scalar] * 3])
    mlir.verify_module(graph.to_mlir())
    x = np.arange(14).reshape(7, 2)
    (out,) = _interpreter.run(graph, [x, *map(np.array, (start, stop, step))])
    np.testing.assert_array_equal(out, x[start:stop:step, None, ::-1])
    assert graph.output_types == [TensorType(DType.int64, ("m", 1, 2), CPU)]


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        (5, ValueError, "slice: index 5 is out of range for axis 0 of size 5; expected -5 to 4"),
        (-6, ValueError, "slice: index -6 is out of range for axis 0 of size 5"),
        (
            np.s_[:6],
            ValueError,
            "slice: index 6 is out of range for axis 0 of size 5; expected -5 to 5",
        ),
        (
            np.s_[5::-1],
            ValueError,
            "slice: index 5 is out of range for axis 0 of size 5; expected -6 to 4",
        ),
        (np.s_[:-7:-1], ValueError, "slice: index -7 is out of range for axis 0"),
        (np.s_[::0], ValueError, "slice: the step of axis 0 is 0, expected an int, not 0"),
        (np.s_[0, 0, 0], ValueError, "slice: 3 indices for a tensor of rank 2"),
        (np.s_[..., ...], ValueError, r"more than one '\.\.\.'"),
        (1.5, TypeError, "index 1.5 of axis 0 is a float; expected an int, a Dim, a slice"),
        (np.array([1, 2]), TypeError, "for many indices use ops.gather"),
        (np.s_[:, : Dim("n") + 1], ValueError, r"0:n \+ 1:1 is out of range for axis 1 of size n"),
        (((1, 2),), TypeError, r"index \(1, 2\) of axis 0; expected \(slice, out_dim\)"),
    ],
)
def test_errors(index: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Graph("g", lambda x: x[index], [TensorType(DType.int64, (5, "n"), CPU)])


def test_errors_of_tensor_indices() -> None:
    with Graph("g", input_types=[TensorType(DType.int64, (5,), CPU)]) as graph:
        (x,) = graph.inputs
        i = ops.constant(1)
        with pytest.raises(ValueError, match=r"has a tensor as bound; say the size"):
            x.tensor[i:]
        with pytest.raises(TypeError, match="expected a scalar of integers"):
            x.tensor[x.tensor]
        with pytest.raises(TypeError, match="expected a scalar of integers"):
            x.tensor[ops.constant(1.0)]
        with pytest.raises(ValueError, match="the step of axis 0 is a tensor; say start and stop"):
            x.tensor[(slice(None, 3, i), 3),]


def test_out_of_range_of_a_symbolic_axis_is_found_when_it_runs() -> None:
    graph = Graph("g", lambda x: x[:5], [TensorType(DType.int64, ("n",), CPU)])
    with pytest.raises(
        _interpreter.InterpreterError, match="0:5:1 is out of range for axis 0 of size n: n is 3"
    ):
        _interpreter.run(graph, [np.arange(3)])
