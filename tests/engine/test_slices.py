"""All forms of NumPy's basic indexing, with sizes and bounds that are known at run time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from max import _interpreter
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import BufferType, DeviceRef, Graph, TensorType, ops

DEVICE = DeviceRef.CPU()
SESSION = InferenceSession(devices=[CPU()])
INDEX = TensorType(DType.int64, (), DEVICE)
SHAPES = {"symbolic": ("a", 4, "c"), "static": (5, 4, 3)}

# index of the graph (i, j: scalar tensors, d: the first dimension), index of NumPy
READS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "int": (lambda i, j, d: 1, lambda i, j: 1),
    "last": (lambda i, j, d: (..., -2), lambda i, j: (..., -2)),
    "new axes": (lambda i, j, d: (None, slice(None), None, 1), lambda i, j: np.s_[None, :, None, 1]),
    "backwards": (lambda i, j, d: np.s_[::-1, ::-2], lambda i, j: np.s_[::-1, ::-2]),
    "backwards between": (lambda i, j, d: np.s_[3:0:-1], lambda i, j: np.s_[3:0:-1]),
    "steps": (lambda i, j, d: np.s_[1::2, :, ::2], lambda i, j: np.s_[1::2, :, ::2]),
    "from the end": (lambda i, j, d: np.s_[-3:-1], lambda i, j: np.s_[-3:-1]),
    "empty": (lambda i, j, d: np.s_[3:1], lambda i, j: np.s_[3:1]),
    "all": (lambda i, j, d: ..., lambda i, j: ...),
    "tensor": (lambda i, j, d: i, lambda i, j: i),
    "tensors": (lambda i, j, d: (i, j), lambda i, j: (i, j)),
    "negative tensor": (lambda i, j, d: (slice(None), -i), lambda i, j: np.s_[:, -i]),
    "int and tensor": (lambda i, j, d: (2, i, ...), lambda i, j: (2, i)),
    "named size": (lambda i, j, d: (slice(i, j), "k"), lambda i, j: np.s_[i:j]),
    "sized": (lambda i, j, d: ((slice(i, j), 2), slice(None)), lambda i, j: np.s_[i:j]),
    "open": (lambda i, j, d: ((slice(i, None), "k"), slice(None), 0), lambda i, j: np.s_[i:, :, 0]),
    "step of a tensor": (lambda i, j, d: ((slice(0, j, i + 1), "k"), 1), lambda i, j: np.s_[0:j : i + 1, 1]),
    "sized and tensor": (lambda i, j, d: ((slice(i, j), "k"), i), lambda i, j: np.s_[i:j, i]),
    "dims": (lambda i, j, d: (slice(1, d - 1),), lambda i, j: np.s_[1:-1]),
    "dim": (lambda i, j, d: d - 1, lambda i, j: -1),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", READS)
def test_reads(name: str, shape: tuple[Any, ...], rng: np.random.Generator) -> None:
    index, wanted = READS[name]
    with Graph(
        "read", input_types=[TensorType(DType.float32, shape, DEVICE), INDEX, INDEX]
    ) as graph:
        x, i, j = [v.tensor for v in graph.inputs]
        graph.output(x[index(i, j, x.shape[0])])
    values = rng.standard_normal((5, 4, 3)).astype(np.float32)
    model = SESSION.load(graph)
    for first, last in ((1, 3), (0, 2)):
        want = values[wanted(first, last)]
        inputs = [values, np.int64(first), np.int64(last)]
        np.testing.assert_array_equal(_interpreter.run(graph, inputs)[0], want)
        got = model.execute(*inputs)[0].to_numpy()
        assert got.shape == want.shape
        np.testing.assert_array_equal(got, want)


WRITES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "tensor": (lambda i, j: i, lambda i, j: i),
    "between tensors": (lambda i, j: ((slice(i, j), 2), 1), lambda i, j: np.s_[i:j, 1]),
    "tensor and steps": (lambda i, j: (slice(None), i, slice(None, None, 2)), lambda i, j: np.s_[:, i, ::2]),
    "backwards": (lambda i, j: (slice(None, None, -1), j), lambda i, j: np.s_[::-1, j]),
    "static": (lambda i, j: (slice(1, 3), 0), lambda i, j: np.s_[1:3, 0]),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITES)
def test_writes(name: str, rng: np.random.Generator) -> None:
    """Stores into a buffer that the same program reads again."""
    index, wanted = WRITES[name]
    whole = rng.standard_normal((5, 4, 3)).astype(np.float32)
    part = rng.standard_normal(whole[wanted(1, 3)].shape).astype(np.float32)
    shape = ["a", 4, 3]
    types = [BufferType(DType.float32, shape, DEVICE), INDEX, INDEX]
    types.append(TensorType(DType.float32, ["a" if s == 5 else s for s in part.shape], DEVICE))
    with Graph("write", input_types=types) as graph:
        buffer, (i, j, source) = graph.inputs[0].buffer, [v.tensor for v in graph.inputs[1:]]
        before = buffer[...]
        buffer[index(i, j)] = source
        graph.output(before, buffer[...] * 2)
    want = whole.copy()
    want[wanted(1, 3)] = part
    for run in (
        lambda *x: _interpreter.run(graph, x),
        lambda *x: [y.to_numpy() for y in SESSION.load(graph).execute(*x)],
    ):
        held = whole.copy()
        before, twice = run(held, np.int64(1), np.int64(3), part)
        np.testing.assert_array_equal(before, whole)
        np.testing.assert_array_equal(held, want)
        np.testing.assert_array_equal(twice, want * 2)


def test_a_part_of_another_size() -> None:
    with Graph("write", input_types=[BufferType(DType.float32, [5, 2], DEVICE), INDEX]) as graph:
        graph.inputs[0].buffer[((slice(graph.inputs[1].tensor, None), 3), ...)] = 1.0
        graph.output()
    model = SESSION.load(graph)
    held = np.zeros((5, 2), np.float32)
    model.execute(held, np.int64(2))
    assert held[:, 0].tolist() == [0, 0, 1, 1, 1]
    with pytest.raises(
        ValueError, match="axis 0 has 4 elements from 1 to 5 by 1; the result has 3"
    ):
        model.execute(held, np.int64(1))


def test_many_indices_are_gathered() -> None:
    with Graph("read", input_types=[TensorType(DType.float32, [5], DEVICE)]) as graph:
        x = graph.inputs[0].tensor
        with pytest.raises(TypeError, match=r"for many indices use ops\.gather"):
            x[ops.constant([1, 2], DType.int64, device=DEVICE)]
        graph.output(x)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("t", [2**63, 2**63 + 1, 2**64 - 1, 2**64 - 3, 2**63 - 1, 5])
def test_unsigned_indices_that_int64_does_not_hold(shape: tuple[Any, ...], t: int) -> None:
    types = [TensorType(DType.float32, shape, DEVICE), TensorType(DType.uint64, (), DEVICE)]
    with Graph("unsigned", input_types=types) as graph:
        x, i = (v.tensor for v in graph.inputs)
        graph.output(x[i])
    model, x = SESSION.load(graph), np.arange(60, dtype=np.float32).reshape(5, 4, 3)
    for index in (0, 4):
        np.testing.assert_array_equal(
            model.execute(x, np.array(index, np.uint64))[0].to_numpy(), x[index]
        )
    with pytest.raises(IndexError, match="out of range for axis 0"):
        model.execute(x, np.array(t, np.uint64))
    with pytest.raises((IndexError, _interpreter.InterpreterError)):
        _interpreter.run(graph, [x, np.array(t, np.uint64)])


def within(index: slice, size: int) -> bool:
    """Whether the bounds of a slice are in the range that the reference gives."""
    beyond = int((index.step or 1) < 0)
    bounds = (b for b in (index.start, index.stop) if b is not None)
    return all(-size - beyond <= b <= size - beyond for b in bounds)


def sliced(index: slice, size: Any) -> Graph:
    """A graph of a slice of a vector."""
    return Graph("slice", lambda x: x[index], [TensorType(DType.int32, [size], DEVICE)])


@pytest.mark.parametrize("step", [None, 2, -1, -3])
def test_bounds_of_slices_beside_numpy(step: int | None, rng: np.random.Generator) -> None:
    """In range they select what they do in NumPy; out of range, where NumPy clamps them, they are errors.

    Sizes that the graph knows, and sizes that only a run knows. Of the latter a slice whose stop comes before its start
    may be an error, as its size in the graph is negative; one that selects nothing of any size may have any stop.
    """
    for _ in range(8):
        start, stop = (None if rng.integers(5) == 0 else int(rng.integers(-8, 8)) for _ in "ab")
        index = slice(start, stop, step)
        symbolic = sliced(index, "n")
        model = SESSION.load(symbolic)
        for size in (0, 1, 4, 6):
            x = np.arange(size, dtype=np.int32)
            fits, want = within(index, size), x[index]
            for compiled in (False, True):
                try:
                    got = (
                        model.execute(x)[0].to_numpy()
                        if compiled
                        else _interpreter.run(symbolic, [x])[0]
                    )
                except (IndexError, ValueError, _interpreter.InterpreterError):
                    assert not fits or not want.size, (index, size)
                else:
                    assert fits or not want.size, (index, size)
                    np.testing.assert_array_equal(got, want, str((index, size)))
            if not fits:
                with pytest.raises(IndexError, match=f"out of range for axis 0 of size {size}"):
                    sliced(index, size)
                continue
            graph = sliced(index, size)
            np.testing.assert_array_equal(_interpreter.run(graph, [x])[0], want)
            if size == 6:
                np.testing.assert_array_equal(SESSION.load(graph).execute(x)[0].to_numpy(), want)


@pytest.mark.parametrize(
    ("index", "least"),
    [(slice(5, 5), 5), (slice(5, 2), 5), (slice(-4, -4, -1), 3), (slice(2, 2, -1), 3)],
)
def test_an_empty_slice_begins_within_its_axis(index: slice, least: int) -> None:
    """As where the graph knows the size."""
    graph = sliced(index, "n")
    model = SESSION.load(graph)
    for size in (least, least + 1):
        assert model.execute(np.zeros(size, np.int32))[0].shape == (0,)
    x = np.zeros(least - 1, np.int32)
    with pytest.raises(ValueError, match="out of range for axis 0 of size n"):
        model.execute(x)
    with pytest.raises((ValueError, _interpreter.InterpreterError)):
        _interpreter.run(graph, [x])
