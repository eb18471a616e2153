"""Functions of one operand, element by element, and activations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from max.dtype import DType
from max.graph import TensorValue, ops
from max.graph.ops.elementwise.binary import maximum, minimum
from max.importers.errors import Unsupported
from max.importers.functions import mathematics
from max.importers.node import Node
from max.importers.onnx.table import op

_SIMPLE: dict[str, Callable[[TensorValue], TensorValue]] = {
    "Acos": ops.acos, "Acosh": mathematics.acosh, "Asin": mathematics.asin, "Asinh": mathematics.asinh,
    "Atan": mathematics.atan, "Atanh": ops.atanh, "Cos": ops.cos, "Cosh": mathematics.cosh, "Erf": ops.erf,
    "Exp": ops.exp, "IsNaN": ops.is_nan, "Log": ops.log, "Neg": ops.negate, "Not": ops.logical_not,
    "Relu": ops.relu, "Sigmoid": ops.sigmoid, "Sign": mathematics.sign, "Sin": ops.sin, "Sinh": mathematics.sinh,
    "Softplus": mathematics.softplus, "Sqrt": ops.sqrt, "Tan": mathematics.tan, "Tanh": ops.tanh,
}  # fmt: skip
_ROUNDINGS = {"Ceil": ops.ceil, "Floor": ops.floor, "Round": ops.round}


def _register(name: str, function: Callable[[TensorValue], TensorValue]) -> None:
    @op(name)
    def stage(node: Node, x: TensorValue) -> TensorValue:
        return function(x)


for _name, _function in {**_SIMPLE, **_ROUNDINGS}.items():
    _register(_name, _function)


@op("Abs")
def absolute(node: Node, x: TensorValue) -> TensorValue:
    return x if x.dtype.is_unsigned_integral() else ops.abs(x)


@op("Reciprocal")
def reciprocal(node: Node, x: TensorValue) -> TensorValue:
    return 1.0 / x


@op("IsInf")
def is_inf(node: Node, x: TensorValue) -> TensorValue:
    negative, positive = node.attr("detect_negative", 1), node.attr("detect_positive", 1)
    infinite = ops.is_inf(x)
    if not positive:
        infinite = ops.logical_and(infinite, x < 0)
    return infinite if negative else ops.logical_and(infinite, x > 0)


@op("LeakyRelu")
def leaky_relu(node: Node, x: TensorValue) -> TensorValue:
    return ops.where(x < 0, x * node.attr("alpha", 0.01), x)


@op("PRelu")
def prelu(node: Node, x: TensorValue, slope: TensorValue) -> TensorValue:
    if slope.rank == 1 and x.rank > 2 and slope.shape[0] != 1 and slope.shape[0] != x.shape[-1]:
        # exporters of version 6 give a slope for each channel
        slope = ops.reshape(slope, [slope.shape[0], *[1] * (x.rank - 2)])
    return ops.where(x < 0, x * slope, x)


@op("Elu")
def elu(node: Node, x: TensorValue) -> TensorValue:
    return ops.where(x < 0, mathematics.expm1(x) * node.attr("alpha", 1.0), x)


@op("Celu")
def celu(node: Node, x: TensorValue) -> TensorValue:
    alpha = node.attr("alpha", 1.0)
    return maximum(x, 0.0) + minimum(mathematics.expm1(x / alpha) * alpha, 0.0)


@op("Selu")
def selu(node: Node, x: TensorValue) -> TensorValue:
    alpha = node.attr("alpha", 1.67326319217681884765625)
    gamma = node.attr("gamma", 1.05070102214813232421875)
    return ops.where(x > 0, x, mathematics.expm1(x) * alpha) * gamma


@op("ThresholdedRelu")
def thresholded_relu(node: Node, x: TensorValue) -> TensorValue:
    return ops.where(x > node.attr("alpha", 1.0), x, 0.0)


@op("HardSigmoid")
def hard_sigmoid(node: Node, x: TensorValue) -> TensorValue:
    return mathematics.clamp(x * node.attr("alpha", 0.2) + node.attr("beta", 0.5), 0.0, 1.0)


@op("HardSwish")
def hard_swish(node: Node, x: TensorValue) -> TensorValue:
    return x * mathematics.clamp(x * (1 / 6) + 0.5, 0.0, 1.0)


@op("Mish")
def mish(node: Node, x: TensorValue) -> TensorValue:
    return x * ops.tanh(mathematics.softplus(x))


@op("Softsign")
def softsign(node: Node, x: TensorValue) -> TensorValue:
    return x / (ops.abs(x) + 1.0)


@op("Swish")
def swish(node: Node, x: TensorValue) -> TensorValue:
    alpha = node.attr("alpha", 1.0)
    return ops.silu(x) if alpha == 1.0 else x * ops.sigmoid(x * alpha)


@op("Gelu")
def gelu(node: Node, x: TensorValue) -> TensorValue:
    return ops.gelu(x, node.attr("approximate", "none"))


@op("Shrink")
def shrink(node: Node, x: TensorValue) -> TensorValue:
    bias, lambd = node.attr("bias", 0.0), node.attr("lambd", 0.5)
    wide = x if x.dtype.is_float() else ops.cast(x, DType.float32)
    result = ops.where(wide < -lambd, wide + bias, ops.where(wide > lambd, wide - bias, 0.0))
    return ops.cast(result, x.dtype)


@op("Clip")
def clip(
    node: Node, x: TensorValue, low: TensorValue | None = None, high: TensorValue | None = None
) -> TensorValue:
    if node.version < 11:
        return mathematics.clamp(x, node.attr("min"), node.attr("max"))
    if low is not None:
        x = maximum(x, low)
    return x if high is None else minimum(x, high)


@op("Identity")
def identity(node: Node) -> Any:
    return node.operands[0]


@op("Dropout")
def dropout(node: Node) -> Any:
    """Inference: the operand itself, and a mask of ones."""
    if node.version >= 12 and node.has(2) and bool(node.number(2)):
        # a ratio of 0 drops nothing
        ratio = node.number(1, 0.5) if node.has(1) else 0.5
        if ratio != 0:
            raise Unsupported("drops elements at random, in training mode")
    x = node.value(0)
    if not node.wants(1):
        return (x,)
    return x, ops.broadcast_to(ops.constant(True, DType.bool), x.shape)


@op("LRN")
def local_response_normalization(node: Node, x: TensorValue) -> TensorValue:
    size = node.attr("size")
    alpha, beta, bias = node.attr("alpha", 1e-4), node.attr("beta", 0.75), node.attr("bias", 1.0)
    before = (size - 1) // 2
    pads = [0, 0] * x.rank
    # two amounts for each axis: channels are axis 1
    pads[2], pads[3] = before, size - 1 - before
    squares = ops.pad(x * x, pads)
    channels = x.shape[1]
    total = None
    for shift in range(size):
        # the sum over `size` neighbouring channels, by shifted copies
        window = squares[:, (slice(shift, shift + channels), channels)]
        total = window if total is None else total + window
    assert total is not None
    return x / ops.pow(total * (alpha / size) + bias, beta)


@op("Hardmax")
def hardmax(node: Node, x: TensorValue) -> TensorValue:
    if node.version < 13:
        # until version 12 the axes from `axis` on are one
        axis = node.axis("axis", x.rank, 1)
        flat = flatten_matrix(x, axis)
        return ops.reshape(_hardmax(flat, 1), x.shape)
    return _hardmax(x, node.axis("axis", x.rank, -1))


def _hardmax(x: TensorValue, axis: int) -> TensorValue:
    size = x.shape[axis]
    places = ops.range(0, size, 1, dtype=DType.int64, device=x.device)
    places = ops.reshape(places, [size if i == axis else 1 for i in range(x.rank)])
    return ops.cast(ops.equal(ops.argmax(x, axis), places), x.dtype)


def flatten_matrix(x: TensorValue, axis: int) -> TensorValue:
    """A matrix of the elements, with the axes before `axis` as rows."""
    rows, columns = math_prod(x.shape[:axis]), math_prod(x.shape[axis:])
    return ops.reshape(x, [rows, columns])


def math_prod(dims: Any) -> Any:
    """The product of dimensions."""
    return math.prod(dims, start=1)


@op("Softmax", "LogSoftmax")
def softmax(node: Node, x: TensorValue) -> TensorValue:
    function = ops.softmax if node.op == "Softmax" else ops.logsoftmax
    if node.version < 13:
        axis = node.axis("axis", x.rank, 1)
        return ops.reshape(function(flatten_matrix(x, axis), 1), x.shape)
    return function(x, node.axis("axis", x.rank, -1))
