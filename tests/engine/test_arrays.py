"""Executions of NumPy arrays without tensors around them: the same results, checks and errors as `Model.execute`."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from max.dtype import DType
from max.engine import InferenceSession, Model
from max.engine._array_runs import execute_arrays
from max.graph import BufferType, Graph, TensorType, ops
from tests.engine.conftest import DEVICE

pytestmark = pytest.mark.timeout(60, method="thread")
RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def model() -> Model:
    """`(x + y, x > 0, the sum of x in bfloat16)` of a symbolic number of rows of three."""
    types = [TensorType(DType.float32, [rows, 3], DEVICE) for rows in ("n", "n")]
    with Graph("arrays", input_types=types) as graph:
        x, y = (value.tensor for value in graph.inputs)
        total = ops.cast(ops.sum(x, axis=1), DType.bfloat16)
        graph.output(x + y, x > 0.0, total)
    return InferenceSession(devices=[]).load(graph)


def draw(rows: int) -> np.ndarray:
    return RNG.standard_normal((rows, 3), np.float32)


def check(model: Model, x: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
    added, positive, total = results = execute_arrays(model, [x, y])
    np.testing.assert_array_equal(added, x + y)
    np.testing.assert_array_equal(positive, x > 0)
    assert positive.dtype == np.bool_ and total.dtype == ml_dtypes.bfloat16
    np.testing.assert_allclose(total.astype(np.float32), x.sum(1, keepdims=True), 1e-2, 1e-2)
    return results


@pytest.mark.parametrize("rows", [0, 1, 5, 7000])
def test_arrays(model: Model, rows: int) -> None:
    check(model, draw(rows), draw(rows))


@pytest.mark.parametrize(
    "form", ["read-only", "strided", "reversed", "unaligned", "columns", "subclass"]
)
def test_forms(model: Model, form: str) -> None:
    """Arrays of all forms are read as what they are."""
    x = draw(6)
    match form:
        case "read-only":
            x.flags.writeable = False
        case "strided":
            x = np.repeat(x, 2, 1)[:, ::2]
        case "reversed":
            x = x[::-1]
        case "unaligned":
            memory = np.zeros(x.nbytes + 2, np.uint8)
            x = np.ndarray(x.shape, np.float32, memory, 2)
            x[...] = draw(6)
        case "columns":
            x = np.asfortranarray(x)
        case _:
            x = x.view(np.recarray)
    check(model, x, draw(6))


def test_results_are_new(model: Model) -> None:
    """Results stay what they are in later executions, are writable and start at a cache line."""
    x, y = draw(4), draw(4)
    first = check(model, x, y)
    kept = [result.copy() for result in first]
    check(model, draw(4), draw(4))
    for result, copy in zip(first, kept, strict=True):
        np.testing.assert_array_equal(result, copy)
        assert result.flags.writeable and not result.ctypes.data % 64
    large = check(model, x := draw(9000), y := draw(9000))
    check(model, draw(9000), draw(9000))
    np.testing.assert_array_equal(large[0], x + y)


@pytest.mark.parametrize(
    "args",
    [
        [draw(2)],
        [draw(2), draw(3)],
        [draw(2), draw(2)[0]],
        [draw(2), draw(2)[:, :2]],
        [draw(2), draw(2).astype(np.float64)],
        [draw(2), draw(2).astype(">f4")],
        [draw(2), draw(2).tolist()],
    ],
    ids=["count", "symbol", "rank", "size", "dtype", "order", "list"],
)
def test_errors(model: Model, args: list[Any]) -> None:
    """What does not fit raises the errors of `execute`."""
    with pytest.raises((TypeError, ValueError)) as expected:
        model.execute(*args)
    with pytest.raises(type(expected.value)) as found:
        execute_arrays(model, args)
    assert str(found.value) == str(expected.value)


def test_buffers() -> None:
    """A model that writes to an input writes to the array."""
    with Graph("adds", input_types=[BufferType(DType.float32, [4], DEVICE)]) as graph:
        buffer = graph.inputs[0].buffer
        ops.buffer_store(buffer, ops.buffer_load(buffer) + 1.0)
        graph.output(ops.buffer_load(buffer) * 2.0)
    array = np.arange(4, dtype=np.float32)
    (result,) = execute_arrays(InferenceSession(devices=[]).load(graph), [array])
    np.testing.assert_array_equal(array, np.arange(1, 5))
    np.testing.assert_array_equal(result, np.arange(1, 5) * 2)


def test_computed_sizes() -> None:
    """A model of several parts, whose sizes are computed."""
    with Graph("parts", input_types=[TensorType(DType.float32, ["n"], DEVICE)]) as graph:
        graph.output(ops.nonzero(graph.inputs[0].tensor, "found"))
    model = InferenceSession(devices=[]).load(graph)
    x = np.array([0, 2, 0, 3], np.float32)
    (result,) = execute_arrays(model, [x])
    np.testing.assert_array_equal(result, [[1], [3]])
