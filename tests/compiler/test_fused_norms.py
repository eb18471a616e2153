"""RMS norms fused into the launch of a product: results against NumPy, and the fused groups."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from max._config import flags
from max.driver import CPU
from max.dtype import DType
from max.dtype.blocks import BLOCK_FORMATS, decode, encode
from max.engine import InferenceSession, Model
from max.graph import DeviceRef, Graph, TensorType, TensorValue, ops
from max.graph.quantization import QuantizationEncoding

DEVICE = DeviceRef.CPU()
DENSE = {"float32": DType.float32, "bfloat16": DType.bfloat16, "float16": DType.float16}
BLOCKS = ("Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K")


def load(graph: Graph, threads: int = 2) -> Model:
    return InferenceSession(devices=[CPU()], num_threads=threads).load(graph)


def results(model: Model, *arrays: np.ndarray) -> list[np.ndarray]:
    """The results of the second of two executions."""
    outputs: list[np.ndarray] = []
    for _ in range(2):
        outputs = [out.to_numpy() for out in model.execute(*arrays)]
    return outputs


def run(graph: Graph, *arrays: np.ndarray, threads: int = 2) -> tuple[list[np.ndarray], list[str]]:
    """The results and the launches of a graph."""
    model = load(graph, threads)
    return results(model, *arrays), model.kernel_summaries


def normal(x: np.ndarray, gamma: np.ndarray, epsilon: float, offset: float) -> np.ndarray:
    x = x.astype(np.float64)
    x = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + epsilon)
    return x * (gamma.astype(np.float64) + offset)


class Weights:
    """Random weights of an encoding, as graph values and decoded."""

    def __init__(self, kind: str, inner: int, rng: np.random.Generator) -> None:
        self.kind, self.inner, self.rng = kind, inner, rng
        self.dtype = DENSE.get(kind, DType.float32)

    def __call__(self, x: TensorValue, columns: int) -> tuple[TensorValue, np.ndarray]:
        w = (self.rng.standard_normal((columns, self.inner)) / self.inner**0.5).astype(np.float32)
        if self.kind in DENSE:
            w = w.astype(self.dtype.to_numpy())
            return x @ ops.transpose(ops.constant(w, self.dtype, DEVICE), 0, 1), w.astype(
                np.float32
            )
        blocks = encode(w, self.kind)
        value = ops.constant(blocks, DType.uint8, DEVICE)
        made = ops.qmatmul(QuantizationEncoding[self.kind], None, x, value)
        return made, decode(blocks, self.kind)


def close(actual: np.ndarray, expected: np.ndarray, kind: str) -> None:
    """Compares relative to the greatest element; products with quantized weights round x to 8 bits."""
    share = {"float32": 1e-5, "bfloat16": 0.03, "float16": 4e-3}.get(kind, 0.03)
    spread = max(float(np.abs(expected).max()), 1.0)
    np.testing.assert_allclose(actual.astype(np.float64), expected, rtol=0, atol=share * spread)


@given(st.data())
@settings(max_examples=8, deadline=None)
def test_products_of_a_norm(data: st.DataObject) -> None:
    """One or several products of a norm, with and without an epilogue that reads x, of few and many rows."""
    kind = data.draw(st.sampled_from((*DENSE, *BLOCKS)))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    least = BLOCK_FORMATS[kind].elements if kind in BLOCKS else 1
    inner = least * data.draw(st.integers(1, 3)) if least > 1 else data.draw(st.integers(64, 300))
    epsilon = data.draw(st.sampled_from((1e-6, 1e-2)))
    offset = data.draw(st.sampled_from((0.0, 1.0)))
    columns = data.draw(st.lists(st.sampled_from((32, 45, 70)), min_size=1, max_size=3))
    residual = data.draw(st.booleans())
    weights = Weights(kind, inner, rng)
    dtype = weights.dtype
    gamma = rng.standard_normal(inner).astype(dtype.to_numpy())
    with Graph("g", input_types=[TensorType(dtype, ("b", "m", inner), DEVICE)]) as graph:
        x = graph.inputs[0].tensor
        scale = ops.constant(gamma, dtype, DEVICE)
        normed = ops.rms_norm(x, scale, epsilon, weight_offset=offset, multiply_before_cast=True)
        products = [weights(normed, n) for n in columns]
        values = [value for value, _ in products]
        if residual:
            # the epilogue reads the operand of the norm
            square, dense = weights(normed, inner)
            values, products = [*values, square + x], [*products, (square, dense)]
        graph.output(*values)
    with flags.override(MAX_CHECK=2):
        model = load(graph, data.draw(st.integers(1, 3)))
    assert not any(name == "rms_norm" for name in model.kernel_summaries), model.kernel_summaries
    for sizes in (((1, 1), (1, 3), (2, 2)), ((3, 7), (1, 70), (2, 130))):
        batch, rows = data.draw(st.sampled_from(sizes))
        given_ = rng.standard_normal((batch, rows, inner)).astype(dtype.to_numpy())
        expected = normal(given_, gamma, epsilon, offset).astype(dtype.to_numpy())
        outputs = results(model, given_)
        for number, (out, (_, w)) in enumerate(zip(outputs, products, strict=True)):
            want = expected.astype(np.float64) @ w.astype(np.float64).T
            if residual and number == len(columns):
                want = want + given_.astype(np.float64)
            close(out, want, kind)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "Q4_0"])
@pytest.mark.parametrize("machine", ["", "avx2,fma"])
def test_a_block(kind: str, machine: str) -> None:
    """Two launches: the product before stores the sum, the products after include the norm."""
    rng = np.random.default_rng(1)
    inner = 256
    weights = Weights(kind, inner, rng)
    dtype = weights.dtype
    gamma = rng.standard_normal(inner).astype(dtype.to_numpy())
    with Graph("g", input_types=[TensorType(dtype, ("m", inner), DEVICE)] * 2) as graph:
        h, y = (value.tensor for value in graph.inputs)
        scale = ops.constant(gamma, dtype, DEVICE)
        out, w_out = weights(y, inner)
        h = h + out
        normed = ops.rms_norm(h, scale, 1e-5, weight_offset=0.0, multiply_before_cast=True)
        (gate, w_gate), (up, w_up) = weights(normed, 64), weights(normed, 64)
        graph.output(h, ops.silu(gate) * up)
    with flags.override(MAX_CPU_FEATURES=machine):
        model = load(graph)
    assert model.kernel_summaries == ["packed_matmul+add", "rms_norm+packed_products+silu+mul"]
    for rows in (1, 9, 200):
        arrays = [rng.standard_normal((rows, inner)).astype(dtype.to_numpy()) for _ in range(2)]
        summed, gated = results(model, *arrays)
        close(summed, arrays[0].astype(np.float64) + arrays[1].astype(np.float64) @ w_out.T, kind)
        x = normal(summed, gamma, 1e-5, 0.0).astype(dtype.to_numpy()).astype(np.float64)
        a, b = x @ w_gate.T.astype(np.float64), x @ w_up.T.astype(np.float64)
        close(gated, a / (1 + np.exp(-a)) * b, kind)


def launches_of(build: Any) -> list[str]:
    """The launches of a graph over x `[m, 64]` with weights `[64, 64]`."""
    rng = np.random.default_rng(2)
    weights = Weights("float32", 64, rng)
    gamma = rng.standard_normal(64).astype(np.float32)
    with Graph("g", input_types=[TensorType(DType.float32, ("m", 64), DEVICE)]) as graph:
        scale = ops.constant(gamma, DType.float32, DEVICE)

        def norm(x: TensorValue) -> TensorValue:
            return ops.rms_norm(x, scale, 1e-5, weight_offset=0.0, multiply_before_cast=True)

        def product(x: TensorValue) -> TensorValue:
            return weights(x, 64)[0]

        graph.output(*build(graph.inputs[0].tensor, norm, product))
    return InferenceSession(devices=[CPU()]).load(graph).kernel_summaries


def test_norms_that_are_not_fused() -> None:
    """A norm with other uses, and one of a possibly strided view, has its own launch."""

    def also_an_output(x: TensorValue, norm: Any, product: Any) -> list[TensorValue]:
        y = norm(x)
        return [y, product(y)]

    def of_a_view(x: TensorValue, norm: Any, product: Any) -> list[TensorValue]:
        return [product(norm(x[1:]))]

    def of_an_op(x: TensorValue, norm: Any, product: Any) -> list[TensorValue]:
        return [product(norm(ops.tanh(x)))]

    def one_after_the_other(x: TensorValue, norm: Any, product: Any) -> list[TensorValue]:
        return [product(norm(product(norm(x))))]

    assert launches_of(also_an_output) == ["rms_norm", "packed_matmul"]
    assert launches_of(of_a_view) == ["slice+rms_norm", "packed_matmul"]
    assert launches_of(of_an_op) == ["tanh", "rms_norm+packed_matmul"]
    assert launches_of(one_after_the_other) == ["rms_norm+packed_matmul"] * 2
