"""The sum reuses the memory of a residual that is not used afterwards."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from max._backends.cpu.backend import cpu_backends
from max._compiler.pipeline import compile_module
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, TensorValue, Weight, ops
from max.kernel import host_target
from tests.tolerance import assert_close

CPU = DeviceRef.CPU()
SIZE = 72


def matmul(x: TensorValue, w: TensorValue) -> TensorValue:
    return x @ w


def convolve(x: TensorValue, w: TensorValue) -> TensorValue:
    image = ops.reshape(x, (1, x.shape[0], 1, SIZE))
    # three taps; the first and the last read only padding
    taps = ops.stack([w * 0, w, w * 0], 0)
    return ops.reshape(ops.conv2d(image, taps[None], padding=(0, 0, 1, 1)), (x.shape[0], SIZE))


PRODUCTS = {"matmul": matmul, "conv": convolve}
Build = Callable[[Callable[..., TensorValue], TensorValue, TensorValue], TensorValue]


def dies(product: Callable[..., TensorValue], x: TensorValue, w: TensorValue) -> TensorValue:
    for _ in range(4):
        x = ops.relu(product(ops.tanh(product(x, w)), w) + x)
    return x


def is_multiplied(
    product: Callable[..., TensorValue], x: TensorValue, w: TensorValue
) -> TensorValue:
    h = ops.tanh(x)
    return product(h, w) + h


def lives(product: Callable[..., TensorValue], x: TensorValue, w: TensorValue) -> TensorValue:
    h = ops.exp(product(x, w) * 0.1)
    return (product(x, w) + h) @ w - h


def is_turned(product: Callable[..., TensorValue], x: TensorValue, w: TensorValue) -> TensorValue:
    h = ops.softmax(x[:SIZE])
    return product(x[:SIZE] * 2, w) + ops.transpose(h, 0, 1)


def is_a_part(product: Callable[..., TensorValue], x: TensorValue, w: TensorValue) -> TensorValue:
    h = ops.softmax(x)
    return product(x[1:] * 2, w) + h[1:] - h[0]


def is_added_twice(
    product: Callable[..., TensorValue], x: TensorValue, w: TensorValue
) -> TensorValue:
    h = ops.softmax(x)
    return product(x, w) + h * h


def is_passed_twice(
    product: Callable[..., TensorValue], x: TensorValue, w: TensorValue
) -> TensorValue:
    types = [x.type, x.type, TensorType(DType.float32, (SIZE, SIZE), CPU)]
    inner = Graph.current.add_subgraph("inner", input_types=types)
    with inner:
        a, b, right = (value.tensor for value in inner.inputs)
        inner.output(product(a, right) + b)
    h = ops.tanh(x)
    return ops.call(inner, h, h, w)[0].tensor


CASES: dict[str, Build] = {
    f.__name__: f
    for f in (dies, is_multiplied, lives, is_turned, is_a_part, is_added_twice, is_passed_twice)
}


def build(case: str, product: str, inputs: bool) -> Graph:
    types = [TensorType(DType.float32, ("m", SIZE), CPU)]
    if inputs:
        types.append(TensorType(DType.float32, (SIZE, SIZE), CPU))
    with Graph("residual", input_types=types) as graph:
        x = graph.inputs[0].tensor
        w = (
            graph.inputs[1].tensor
            if inputs
            else TensorValue(Weight("w", DType.float32, (SIZE, SIZE), CPU))
        )
        # results of graphs have memory of their own, so the tested value is not a result
        graph.output(CASES[case](PRODUCTS[product], x, w) @ w)
    return graph


@pytest.mark.parametrize("inputs", [False, True])
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("case", CASES)
def test_values(case: str, product: str, inputs: bool, rng: np.random.Generator) -> None:
    w = (rng.standard_normal((SIZE, SIZE)) / SIZE).astype(np.float32)
    # one worker runs the tasks in order, so an early overwrite changes the result
    model = InferenceSession(num_threads=1).load(
        build(case, product, inputs), weights_registry={} if inputs else {"w": w}
    )
    for rows in (SIZE, 3 * SIZE + 5) if case == "is_turned" else (5, 3 * SIZE + 5):
        x = rng.standard_normal((rows, SIZE)).astype(np.float32)
        expected = reference(case, x.astype(np.float64), w.astype(np.float64)) @ w
        (y,) = model.execute(x, w) if inputs else model.execute(x)
        assert_close(y.to_numpy(), expected, scale=8)


def reference(case: str, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(1, keepdims=True))
    soft = e / e.sum(1, keepdims=True)
    match case:
        case "dies":
            for _ in range(4):
                x = np.maximum(np.tanh(x @ w) @ w + x, 0)
            return x
        case "lives":
            h = np.exp(x @ w * 0.1)
            return (x @ w + h) @ w - h
        case "is_turned":
            return x[:SIZE] * 2 @ w + soft[:SIZE].T
        case "is_a_part":
            return x[1:] * 2 @ w + soft[1:] - soft[0]
        case "is_added_twice":
            return x @ w + soft * soft
        case _:
            return np.tanh(x) @ w + np.tanh(x)


def test_memory() -> None:
    """A chain of residual blocks needs memory for one sum and one hidden layer, whatever its length."""
    module = build("dies", "matmul", False).to_mlir()
    program = compile_module(module, ["x"], cpu_backends(host_target()))[0]
    assert len(program.main.blocks) == 2
