"""Sizes that violate the conditions of ops: engine and interpreter agree, or both raise. See `tests.ops.violating`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from max import _interpreter, nn
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import BufferType, DeviceRef, Graph, TensorType, ops
from tests.guarded import Margins

SESSION = InferenceSession(devices=[CPU()])
DEVICE = DeviceRef.CPU()


def run_seeds(first: int, count: int) -> None:
    """Runs random graphs in another process with guard pages around tensors: an access outside of a tensor ends it."""
    command = [
        sys.executable,
        "-m",
        "tests.ops.violating",
        "--first",
        str(first),
        "--count",
        str(count),
    ]
    made = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONFAULTHANDLER": "1", "MAX_GUARD": "1"}
    )  # fmt: skip
    assert made.returncode == 0, f"{made.stdout[-6000:]}\n{made.stderr[-300:]}"


@pytest.mark.parametrize("first", [0, 50])
def test_random_graphs(first: int) -> None:
    run_seeds(first, 50)


@pytest.mark.long
@pytest.mark.parametrize("part", range(100))
def test_random_graphs_long(part: int) -> None:
    run_seeds(10_000 + part * 1000, 1000)


def tensor(*shape: Any) -> TensorType:
    return TensorType(DType.float32, shape, DEVICE)


X = np.arange(12, dtype=np.float32).reshape(3, 4)
"""The input of the graphs, with an axis ``n`` of size 3."""

REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "x[:100_000]": (lambda x: x[:100_000], "n is 3, expected at least 100000"),
    "x[5]": (lambda x: x[5], "n is 3, expected at least 6"),
    "x[10**12]": (lambda x: x[10**12], "n is 3, expected at least 1000000000001"),
    "x[-5:]": (lambda x: x[-5:], "n is 3, expected at least 5"),
    "x[2:6] in a sum": (lambda x: x[2:6] + 1, "2:6:1 is out of range for axis 0 of size n"),
    "x[2:6] in a concat": (lambda x: ops.concat([x[2:6], x[2:6]]), "expected at least 6"),
    "x[2:6] transposed": (lambda x: ops.transpose(x[2:6], 0, 1), "expected at least 6"),
    "x[2:6] in a product": (
        lambda x: x[2:6] @ ops.constant(np.ones((4, 3), np.float32), DType.float32, DEVICE),
        "expected at least 6",
    ),
    "x[::-1][4]": (lambda x: x[::-1][4], "expected at least 5"),
    "a slice of a slice": (lambda x: x[:5][:2], "n is 3, expected at least 5"),
    "a slice of a view": (lambda x: x.reshape((-1,))[:13], "n \\* 4 is 12, expected at least 13"),
    "top_k": (lambda x: ops.top_k(x, 4, 0)[0], "k is 4.*: n is 3, expected at least 4"),
    "scatter": (
        lambda x: ops.scatter(
            x,
            ops.constant(np.zeros((5, 1), np.float32), DType.float32, DEVICE),
            ops.constant(np.zeros((5, 1), np.int64), DType.int64, DEVICE),
            1,
        ),
        "n is 3, expected at least 5",
    ),
    "a size that a slice names": (
        lambda x: ops.slice_tensor(x, [(slice(1, 3), "n"), slice(None)]) * 2,
        "another size than the result: 2, expected n, which is 3",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_short_axis_is_refused(name: str) -> None:
    function, message = REFUSED[name]
    with Graph("short", input_types=[tensor("n", 4)]) as graph:
        graph.output(function(graph.inputs[0].tensor))
    model = SESSION.load(graph)
    for _ in range(2):
        with pytest.raises(ValueError, match=message) as raised:
            model.execute(X)
    assert f"(staged at {__file__}:" in str(raised.value)
    with pytest.raises(_interpreter.InterpreterError, match=message):
        _interpreter.run(graph, [X])


EMPTY: dict[str, Callable[..., Any]] = {
    "x[-1]": lambda x: x[-1],
    "max": lambda x: ops.max(x, axis=0),
    "min": lambda x: ops.min(x, axis=0),
    "argmax": lambda x: ops.argmax(x, axis=0),
    "argmin": lambda x: ops.argmin(x, axis=0),
    "resize": lambda x: ops.resize(
        x.reshape((1, 1, -1, 4)), (1, 1, 2, 2), ops.InterpolationMode.BILINEAR
    ),
}


@pytest.mark.parametrize("name", EMPTY)
def test_an_empty_axis_is_refused(name: str) -> None:
    with Graph("empty", input_types=[tensor("n", 4)]) as graph:
        graph.output(EMPTY[name](graph.inputs[0].tensor))
    model = SESSION.load(graph)
    model.execute(X)
    with pytest.raises(ValueError, match="n is 0, expected at least 1"):
        model.execute(X[:0])


def test_a_softmax_beside_an_axis_of_no_elements() -> None:
    with Graph("none", input_types=[tensor("n", 4)]) as graph:
        part = (graph.inputs[0].tensor * 0.5)[:3, 0:0:3]
        small = ops.tanh(part) * 0.5
        graph.output(part, small, ops.softmax(small, 0), ops.sum(part, axis=1))
    outputs = SESSION.load(graph).execute(X)
    assert [tuple(output.shape) for output in outputs] == [(3, 0), (3, 0), (3, 0), (3, 1)]
    assert not outputs[3].to_numpy().any()


def test_a_store_beyond_a_buffer_writes_nothing() -> None:
    with Graph("store", input_types=[BufferType(DType.float32, ("n", 4), DEVICE)]) as graph:
        buffer = graph.inputs[0].buffer
        buffer[2:6] = ops.constant(np.ones((4, 4), np.float32), DType.float32, DEVICE)
        graph.output()
    model = SESSION.load(graph)
    for rows in (3, 5):
        margins = Margins()
        given = margins.guard(np.zeros((rows, 4), np.float32))
        with pytest.raises(
            ValueError, match=f"buffer_store_slice: .*n is {rows}, expected at least 6"
        ):
            model.execute(given)
        margins.check()
        assert not given.any()
    model.execute(given := np.zeros((6, 4), np.float32))
    assert given.sum() == 16


def chosen(index: int) -> Any:
    """A graph that reads an element in one branch only."""
    types = [tensor("n", 4), TensorType(DType.bool, (), DEVICE)]
    with Graph("chosen", input_types=types) as graph:
        x, flag = (value.tensor for value in graph.inputs)
        graph.output(ops.cond(flag, [tensor(4)], lambda: x[index] * 2, lambda: x[0])[0])
    return SESSION.load(graph)


def test_a_branch_that_is_not_taken_is_not_checked() -> None:
    model = chosen(5)
    np.testing.assert_array_equal(model.execute(X, np.array(False))[0].to_numpy(), X[0])
    with pytest.raises(ValueError, match=r"slice: 5:6:1 .*n is 3, expected at least 6 \(staged"):
        model.execute(X, np.array(True))
    assert model.execute(np.ones((6, 4), np.float32), np.array(True))[0].to_numpy().sum() == 8


@pytest.mark.parametrize("turns", [0, 1, 3])
def test_a_loop_checks_each_iteration(turns: int) -> None:
    types = [tensor("n", 4), TensorType(DType.int32, (), DEVICE)]
    with Graph("looped", input_types=types) as graph:
        x, count = (value.tensor for value in graph.inputs)
        zero = ops.constant(0, DType.int32, DEVICE)
        graph.output(
            ops.while_loop(
                [zero, x], lambda i, _: i < count, lambda i, y: [i + 1, y + y[4:5].broadcast_to(y.shape)]
            )[1]
        )  # fmt: skip
    model = SESSION.load(graph)
    if turns == 0:
        np.testing.assert_array_equal(model.execute(X, np.int32(0))[0].to_numpy(), X)
    else:
        with pytest.raises(ValueError, match="n is 3, expected at least 5"):
            model.execute(X, np.int32(turns))
    big = np.ones((5, 4), np.float32)
    assert model.execute(big, np.int32(turns))[0].to_numpy()[0, 0] == 2**turns


def test_a_subgraph_is_checked_with_the_sizes_of_each_call() -> None:
    with Graph("calls", input_types=[tensor("a", 4), tensor("b", 4)]) as graph:
        a, b = (value.tensor for value in graph.inputs)
        with graph.add_subgraph("pick", input_types=[tensor("n", 4)]) as sub:
            sub.output(sub.inputs[0].tensor[3] * 2)
        graph.output(*(ops.call(sub, x, prefix=f"{n}.")[0] for n, x in (("one", a), ("two", b))))
    model = SESSION.load(graph)
    long = np.ones((4, 4), np.float32)
    assert [y.to_numpy().sum() for y in model.execute(long, long)] == [8, 8]
    with pytest.raises(ValueError, match="one.slice: .*: a is 3, expected at least 4"):
        model.execute(X, long)
    with pytest.raises(ValueError, match="two.slice: .*: b is 3, expected at least 4"):
        model.execute(long, X)


def test_unused_values_are_not_checked() -> None:
    with Graph("unused", input_types=[tensor("n", 4)]) as graph:
        x = graph.inputs[0].tensor
        _ = x[100]
        graph.output(x * 2)
    np.testing.assert_array_equal(SESSION.load(graph).execute(X)[0].to_numpy(), X * 2)
    np.testing.assert_array_equal(_interpreter.run(graph, [X])[0], X * 2)


def test_a_saved_graph_and_a_cached_program_are_checked(tmp_path: Any) -> None:
    with Graph("saved", input_types=[tensor("n", 4)]) as graph:
        graph.output(graph.inputs[0].tensor[2:6])
    graph.save(tmp_path / "saved.mo")
    for _ in range(2):
        model = InferenceSession(devices=[CPU()]).load(tmp_path / "saved.mo")
        with pytest.raises(ValueError, match=r"n is 3, expected at least 6$"):
            model.execute(X)


def test_lines_are_those_of_the_graph_that_is_loaded() -> None:
    """Two graphs with equal text share a cached program; each error names the line of its graph."""

    def first() -> Any:
        with Graph("lines", input_types=[tensor("n", 4)]) as graph:
            graph.output(graph.inputs[0].tensor[7:9])
        return graph

    def second() -> Any:
        with Graph("lines", input_types=[tensor("n", 4)]) as graph:
            graph.output(graph.inputs[0].tensor[7:9])
        return graph

    places: list[str] = []
    for made in (first(), second()):
        with pytest.raises(ValueError, match="expected at least 9") as raised:
            SESSION.load(made).execute(X)
        places.append(str(raised.value).rpartition(":")[2])
    assert places[0] != places[1]


def test_errors_of_kernels_name_the_line() -> None:
    types = [tensor("n", 4), TensorType(DType.int64, ("k",), DEVICE)]
    with Graph("gather", input_types=types) as graph:
        x, indices = (value.tensor for value in graph.inputs)
        graph.output(ops.gather(x, indices, 0))
    with pytest.raises(IndexError, match=r"index 3 .*\(staged at .*test_violations.py:\d+\)"):
        SESSION.load(graph).execute(X, np.array([0, 3]))


def test_errors_in_a_layer_name_the_line_that_calls_it() -> None:
    embed = nn.Embedding(4, 8, DType.float32, DEVICE)
    with Graph("layer", input_types=[TensorType(DType.int64, ("k",), DEVICE)]) as graph:
        graph.output(embed(graph.inputs[0].tensor))
    weights = {name: np.zeros((4, 8), np.float32) for name in embed.raw_state_dict()}
    model = SESSION.load(graph, weights_registry=weights)
    with pytest.raises(IndexError, match=r"index 7 .*\(staged at .*test_violations.py:\d+\)"):
        model.execute(np.array([0, 7]))
