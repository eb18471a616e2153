"""Quantized models: products and convolutions of codes are integers; results differ by a quantum at most."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

from max import _interpreter  # noqa: E402
from max._backends.cpu.passes.int8_filters import PATCH_CHANNELS  # noqa: E402
from max.engine import InferenceSession  # noqa: E402
from max.onnx import from_onnx  # noqa: E402

KINDS = {np.uint8: TensorProto.UINT8, np.int8: TensorProto.INT8}


class Network:
    """Nodes and constants of a model under construction."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def constant(self, array: Any) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def node(self, op: str, *inputs: str, **attributes: Any) -> str:
        name = f"n{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [name], **attributes))
        return name

    def quantized(self, x: str, scale: float, zero: int, kind: Any) -> str:
        """The codes of a value."""
        constants = [self.constant(np.float32(scale)), self.constant(kind(zero))]
        return self.node("QuantizeLinear", x, *constants)

    def dequantized(self, codes: str, scale: Any, zero: Any, **attributes: Any) -> str:
        constants = [self.constant(np.asarray(scale, np.float32)), self.constant(zero)]
        return self.node("DequantizeLinear", codes, *constants, **attributes)

    def model(self, shape: list[Any], result: str, rank: int, kind: Any) -> Any:
        graph = helper.make_graph(
            self.nodes,
            "quantized",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
            [helper.make_tensor_value_info(result, KINDS[kind], [None] * rank)],
            self.constants,
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])


def weight(
    net: Network, rng: np.random.Generator, shape: tuple[int, ...], axis: int
) -> tuple[str, int]:
    """A dequantized weight with a scale for all, or for each place along an axis, and zero points."""
    kind = [np.int8, np.uint8][int(rng.integers(2))]
    places = shape[axis] if rng.integers(2) else 1
    zero = np.full(places, 128 if kind is np.uint8 else 0, kind)
    if kind is np.int8 and rng.integers(2):
        zero = rng.integers(-20, 20, places).astype(np.int8)
    low, high = (20, 236) if kind is np.uint8 else (-100, 100)
    codes = net.constant(rng.integers(low, high, shape).astype(kind))
    scale = rng.uniform(0.005, 0.02, places)
    if places == 1:
        return net.dequantized(codes, scale[0], zero[0]), places
    return net.dequantized(codes, scale, zero, axis=axis), places


def check(
    model: Any, x: Any, integers: bool = True, kernels: str = "packed_matmul|int8_conv"
) -> None:
    """Engine, interpreter and reference differ by a quantum at most; hardly any code differs."""
    graph = from_onnx(model)
    assert bool(re.search(r"mo\.(matmul|conv)\([^\n]*si32", str(graph))) is integers
    (want,) = ReferenceEvaluator(model).run(None, {"x": x})
    loaded = InferenceSession().load(graph)
    if integers:
        # the product is one of packed bytes, the rest its epilogue
        assert any(re.search(rf"({kernels})\+", name) for name in loaded.kernel_summaries)
    for got in (loaded.execute(x)[0].to_numpy(), _interpreter.run(graph, [x])[0]):
        assert got.dtype == want.dtype
        difference = np.abs(got.astype(int) - want.astype(int))
        assert difference.max(initial=0) <= 1
        assert difference.mean() < 0.01


@pytest.mark.parametrize("seed", range(8))
def test_convolutions(seed: int) -> None:
    rng = np.random.default_rng(seed)
    channels = int([3, 8, *rng.integers(16, 40, 6), 64][int(rng.integers(9))])
    features = int(rng.integers(32, 70))
    taps = [int(n) for n in rng.integers(1, 4, 2)]
    kind = [np.uint8, np.int8][seed % 2]
    zero = int(rng.integers(100, 150)) - (128 if kind is np.int8 else 0)
    net = Network()
    x = net.dequantized(net.quantized("x", 0.03, zero, kind), 0.03, kind(zero))
    filters, _ = weight(net, rng, (features, channels, *taps), 0)
    operands = [x, filters]
    if rng.integers(2):
        operands.append(net.constant(rng.standard_normal(features).astype(np.float32)))
    attributes = {
        "strides": [int(n) for n in rng.integers(1, 3, 2)], "dilations": [int(n) for n in rng.integers(1, 3, 2)],
        "pads": [int(n) for n in rng.integers(0, 3, 4)],
    }  # fmt: skip
    y = net.node("Relu", net.node("Conv", *operands, **attributes))
    result = net.quantized(y, 0.05, 3, kind)
    batch = "n" if seed % 3 else 2
    model = net.model([batch, channels, 9, 8], result, 4, kind)
    kernels = "packed_matmul|int8_conv"
    if channels < PATCH_CHANNELS:
        # without products of bytes, in floats
        kernels += "|packed_conv"
    x = rng.standard_normal((2, channels, 9, 8)).astype(np.float32)
    check(model, x, kernels=kernels)


@pytest.mark.parametrize("op", ["MatMul", "Gemm", "Gemm transposed"])
@pytest.mark.parametrize("seed", range(3))
def test_products(op: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    inner, columns = int(rng.integers(33, 90)), int(rng.integers(32, 70))
    kind = [np.uint8, np.int8][seed % 2]
    transposed = op.endswith("transposed")
    net = Network()
    x = net.dequantized(net.quantized("x", 0.03, 7, kind), 0.03, kind(7))
    shape = (columns, inner) if transposed else (inner, columns)
    right, _ = weight(net, rng, shape, 0 if transposed else 1)
    if op == "MatMul":
        y = net.node("MatMul", x, right)
    else:
        bias = net.constant(rng.standard_normal(columns).astype(np.float32))
        y = net.node("Gemm", x, right, bias, transB=int(transposed), alpha=0.5)
    lead = [2, 5] if op == "MatMul" else [11]
    result = net.quantized(y, 0.05, 3, kind)
    model = net.model([*lead[:-1], "rows", inner], result, len(lead) + 1, kind)
    check(model, rng.standard_normal((*lead, inner)).astype(np.float32))


@pytest.mark.parametrize("what", ["groups", "few channels", "scales of rows", "wide zero points"])
def test_what_stays_in_floats(what: str, rng: np.random.Generator) -> None:
    net = Network()
    x = net.dequantized(net.quantized("x", 0.03, 7, np.uint8), 0.03, np.uint8(7))
    if what in ("groups", "few channels"):
        channels = 12 if what == "few channels" else 32
        groups = 2 if what == "groups" else 1
        # of few channels sums of more products than floats hold exactly
        taps = 11 if what == "few channels" else 3
        shape_ = (32, channels // groups, taps, taps)
        codes = net.constant(rng.integers(-9, 9, shape_).astype(np.int8))
        filters = net.dequantized(codes, 0.02, np.int8(0))
        y, shape = net.node("Conv", x, filters, group=groups), [1, channels, taps + 2, taps + 1]
    else:
        codes = net.constant(rng.integers(0, 255, (40, 48)).astype(np.uint8))
        rows = what == "scales of rows"
        scale, zero = (np.full(40, 0.02), np.full(40, 128, np.uint8)) if rows else (0.02, np.uint8(0))  # fmt: skip
        y, shape = net.node("MatMul", x, net.dequantized(codes, scale, zero, axis=0)), [6, 40]
    result = net.quantized(y, 0.05, 3, np.uint8)
    model = net.model(shape, result, len(shape), np.uint8)
    check(model, rng.standard_normal(shape).astype(np.float32), integers=False)


@pytest.mark.parametrize("bias", ["codes", "scalar codes", "another scale", "a zero point"])
def test_residual_sums(bias: str) -> None:
    """A bias of codes is added to the sums, and scales are divided at import: kernels have no division."""
    rng = np.random.default_rng(len(bias))
    channels, zero = 32, np.uint8(120)
    net = Network()
    x = net.dequantized(net.quantized("x", 0.03, 120, np.uint8), 0.03, zero)
    codes = net.constant(rng.integers(-100, 100, (channels, channels, 3, 3)).astype(np.int8))
    many = bias != "scalar codes"
    scale = rng.uniform(0.005, 0.02, channels if many else 1).astype(np.float32)
    zeros = np.zeros(scale.size, np.int8)
    filters = net.dequantized(
        codes, scale if many else scale[0], zeros if many else zeros[0], axis=0
    )
    numbers = net.constant(rng.integers(-3000, 3000, channels).astype(np.int32))
    factors = scale * np.float32(0.06 if bias == "another scale" else 0.03)
    offsets = np.full(factors.size, bias == "a zero point", np.int32) * 500
    factor, offset = (factors, offsets) if many else (factors[0], offsets[0])
    added = net.dequantized(numbers, factor, offset, axis=0)
    y = net.node("Conv", x, filters, added, pads=[1, 1, 1, 1])
    inner = net.dequantized(net.quantized(y, 0.3, 90, np.uint8), 0.3, np.uint8(90))
    result = net.quantized(net.node("Add", inner, x), 0.35, 70, np.uint8)
    model = net.model(["n", channels, 9, 8], result, 4, np.uint8)
    check(model, rng.standard_normal((2, channels, 9, 8)).astype(np.float32))
    names = InferenceSession().load(from_onnx(model)).kernel_summaries
    (product,) = (name for name in names if re.search(r"(packed_matmul|int8_conv)\+", name))
    assert product.count("div") == (0 if bias.endswith("codes") else 1)


@pytest.mark.parametrize("seed", range(4))
def test_pooled_codes(seed: int) -> None:
    """The maxima of dequantized values are those of their codes; codes with the scale of their source are kept."""
    rng = np.random.default_rng(seed)
    kind = [np.uint8, np.int8][seed % 2]
    zero = kind(rng.integers(0, 100))
    net = Network()
    x = net.dequantized(net.quantized("x", 0.03, zero, kind), 0.03, zero)
    attributes = {
        "kernel_shape": [3, 2], "strides": [int(n) for n in rng.integers(1, 3, 2)],
        "pads": [int(n) for n in rng.integers(0, 2, 2)] * 2,
    }  # fmt: skip
    pooled = net.node("MaxPool", x, **attributes)
    result = net.quantized(pooled, 0.03 if seed < 3 else 0.05, zero, kind)
    model = net.model(["n", 5, 8, 7], result, 4, kind)
    graph = from_onnx(model)
    assert re.search(r"mo\.max_pool\([^\n]*si8", str(graph))
    array = rng.standard_normal((2, 5, 8, 7)).astype(np.float32)
    (want,) = ReferenceEvaluator(model).run(None, {"x": array})
    for got in (
        InferenceSession().load(graph).execute(array)[0].to_numpy(),
        _interpreter.run(graph, [array])[0],
    ):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("scale", [-0.03, 1e-38, np.inf])
def test_what_is_pooled_in_floats(scale: float) -> None:
    """A negative scale turns the order around; products of unusual ones may all be 0 or infinite."""
    net = Network()
    x = net.dequantized(net.quantized("x", 0.03, 3, np.uint8), scale, np.uint8(3))
    result = net.quantized(net.node("MaxPool", x, kernel_shape=[2, 2]), 0.03, 3, np.uint8)
    graph = from_onnx(net.model([1, 2, 4, 4], result, 4, np.uint8))
    assert re.search(r"mo\.max_pool\([^\n]*f32", str(graph))
