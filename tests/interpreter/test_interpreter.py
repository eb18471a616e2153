"""Checks of the interpreter, and runs of whole graphs."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from max import _interpreter, mlir
from max._interpreter import InterpreterError
from max.driver import Tensor
from max.dtype import DType
from max.graph import BufferType, DeviceRef, Dim, Graph, TensorType, TensorValue, Weight, ops
from tests.tolerance import assert_close

CPU = DeviceRef.CPU()


def f32(*shape: Any) -> TensorType:
    return TensorType(DType.float32, shape, CPU)


def array(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([array(2, 3)], r"g takes 2 inputs \(f32\[n, 3\], buffer f32\[n \* 2\]\), got 1"),
        ([array(2, 4), array(4)], r"input 0 of g: axis 1 of f32\[n, 3\] has size 4, expected 3"),
        ([array(2), array(4)], r"input 0 of g: shape \[2\] for the type f32\[n, 3\]"),
        (
            [array(2, 3), array(5)],
            r"input 1 of g: axis 0 of buffer f32\[n \* 2\] has size 5, expected n \* 2 = 4 \(n = 2\)",
        ),
        ([array(2, 3).astype(np.float64), array(4)], "input 0 of g is float64, expected f32"),
    ],
)
def test_inputs_that_do_not_fit(inputs: list[np.ndarray], message: str) -> None:
    types = [f32("n", 3), BufferType(DType.float32, (Dim("n") * 2,), CPU)]
    graph = Graph("g", lambda x, b: x, types)
    with pytest.raises(InterpreterError, match=message):
        _interpreter.run(graph, inputs)


def test_read_only_buffer() -> None:
    b = array(2)
    b.flags.writeable = False
    graph = Graph("g", lambda b: None, [BufferType(DType.float32, (2,), CPU)])
    with pytest.raises(InterpreterError, match="input 0 of g is a read-only buffer"):
        _interpreter.run(graph, [b])


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"v": array(2)}, "the weight 'layers.1.w' is missing; given: v"),
        ({"layers.1.w": array(3)}, r"the weight 'layers.1.w': axis 0 of f32\[2\] has size 3"),
        ({"layers.1.w": np.zeros(2)}, "the weight 'layers.1.w' is float64, expected f32"),
    ],
)
def test_weights_that_do_not_fit(weights: dict[str, np.ndarray], message: str) -> None:
    with Graph("g", input_types=[f32(2)]) as graph:
        sub = graph.add_subgraph("f", lambda x: x + Weight("w", DType.float32, (2,), CPU), [f32(2)])
        graph.output(*ops.call(sub, graph.inputs[0], prefix="layers.1."))
    with pytest.raises(InterpreterError, match=message):
        _interpreter.run(graph, [array(2)], weights)


def test_prefixes_of_nested_calls_add_up() -> None:
    with Graph("g", input_types=[f32(2)]) as graph:
        inner = graph.add_subgraph(
            "i", lambda x: x + Weight("w", DType.float32, (2,), CPU), [f32(2)]
        )
        outer = graph.add_subgraph("o", lambda x: ops.call(inner, x, prefix="mlp."), [f32(2)])
        graph.output(*ops.call(outer, graph.inputs[0], prefix="layers.3."))
    weights = {"layers.3.mlp.w": np.ones(2, np.float32)}
    assert _interpreter.run(graph, [array(2)], weights)[0].tolist() == [1, 1]


def test_takes_what_the_engine_takes() -> None:
    import torch

    graph = Graph(
        "g",
        lambda x, b: (x + Weight("w", DType.float32, (2,), CPU), b[...]),
        [f32(2), f32(2).as_buffer()],
    )
    inputs = [Tensor.from_numpy(np.ones(2, np.float32)), np.zeros(2, np.float32)]
    outputs = _interpreter.run(graph, inputs, {"w": torch.ones(2)})
    assert outputs[0].tolist() == [2, 2]
    assert _interpreter.run(graph.to_mlir(), inputs, {"w": torch.ones(2)})[0].tolist() == [2, 2]


def test_reading_a_buffer_copies_it() -> None:
    def forward(b: Any) -> Any:
        before = b[...]
        b[...] = 7
        return before

    b = np.array([1, 2], np.float32)
    (before,) = _interpreter.run(Graph("g", forward, [f32(2).as_buffer()]), [b])
    assert before.tolist() == [1, 2] and b.tolist() == [7, 7]


def test_each_op_rounds_to_its_dtype(rng: np.random.Generator) -> None:
    def forward(x: TensorValue) -> TensorValue:
        return (x * 3 + 0.1) * x

    x = rng.standard_normal(100).astype(ml_dtypes.bfloat16)
    (out,) = _interpreter.run(Graph("g", forward, [TensorType(DType.bfloat16, (100,), CPU)]), [x])
    wide = (x.astype(np.float32) * 3).astype(ml_dtypes.bfloat16).astype(np.float32)
    wide += np.float32(ml_dtypes.bfloat16(0.1))
    wide = wide.astype(ml_dtypes.bfloat16).astype(np.float32) * x.astype(np.float32)
    np.testing.assert_array_equal(out, wide.astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("dtype", [d for d in DType if d.is_float8()], ids=lambda d: d.name)
def test_narrow_floats(dtype: DType, rng: np.random.Generator) -> None:
    x = rng.uniform(-2, 2, 64).astype(dtype.to_numpy())
    graph = Graph("g", lambda x: x.cast(DType.float32) * 2, [TensorType(dtype, (64,), CPU)])
    assert_close(_interpreter.run(graph, [x])[0], x.astype(np.float32) * 2)


@pytest.mark.parametrize("index", [5, -6])
def test_index_out_of_range(index: int) -> None:
    indices = TensorType(DType.int32, (1,), CPU)
    graph = Graph("g", lambda x, i: ops.gather(x, i, 0), [f32(5), indices])
    with pytest.raises(
        IndexError, match=f"gather: index {index} is out of range for an axis of size 5"
    ):
        _interpreter.run(graph, [array(5), np.array([index], np.int32)])


def test_sizes_that_an_op_gives_are_checked() -> None:
    count = TensorType(DType.int64, (), CPU)

    def forward(x: TensorValue, n: TensorValue) -> TensorValue:
        return x + ops.range(0, n, out_dim="n", dtype=DType.float32, device=CPU)

    graph = Graph("g", forward, [f32("n"), count])
    assert _interpreter.run(graph, [array(3), np.array(3)])[0].tolist() == [0, 1, 2]
    with pytest.raises(
        InterpreterError, match=r"mo.range: axis 0 of f32\[n\] has size 4, expected n = 3"
    ):
        _interpreter.run(graph, [array(3), np.array(4)])


def test_integers() -> None:
    def forward(x: TensorValue, y: TensorValue) -> Any:
        return x // y, x % y, x**y, x / y, ops.mean(x)

    x = np.array([7, -7, 7, -7, 2, -1], np.int32)
    y = np.array([2, 2, -2, -2, -1, -3], np.int32)
    int32 = TensorType(DType.int32, (6,), CPU)
    quotient, rest, power, exact, mean = _interpreter.run(Graph("g", forward, [int32] * 2), [x, y])
    assert quotient.tolist() == [3, -4, -4, 3, -2, 0] and rest.tolist() == [1, 1, -1, -1, 0, -1]
    assert power.tolist() == [49, 49, 0, 0, 0, -1] and mean.tolist() == [0]
    np.testing.assert_allclose(exact, x / y)


def test_empty_tensors() -> None:
    def forward(x: TensorValue) -> Any:
        return ops.sum(x, 0), x @ np.ones((3, 2)), ops.softmax(x), ops.concat([x, x]), ops.cumsum(x)

    outputs = _interpreter.run(Graph("g", forward, [f32("n", 3)]), [array(0, 3)])
    assert [a.shape for a in outputs] == [(1, 3), (0, 2), (0, 3), (0, 3), (0, 3)]
    assert outputs[0].tolist() == [[0, 0, 0]]


def test_every_op_has_an_evaluation() -> None:
    structure = {"mo.graph", "mo.subgraph", "mo.output"}
    ops_of_mo = {name for name in mlir.OPS if name.startswith("mo.")}
    assert set(_interpreter.IMPLEMENTATIONS) == ops_of_mo - structure
