"""Functions of one operand, element by element."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from max.dtype import DType
from max.graph import TensorValue, ops
from max.graph.ops.elementwise.binary import maximum, minimum
from max.graph.ops.elementwise.bits import bit_xor
from max.importers.functions import mathematics
from max.importers.torch.ops.arithmetic import convert, tensor_of
from max.importers.torch.table import Call, op

Unary = Callable[[TensorValue], TensorValue]


def _round(function: Unary) -> Unary:
    return lambda x: function(x) if x.dtype.is_float() else x


_FLOATING: dict[str, Unary] = {
    "exp": ops.exp, "log": ops.log, "log1p": ops.log1p, "sqrt": ops.sqrt, "rsqrt": ops.rsqrt, "sin": ops.sin,
    "cos": ops.cos, "tanh": ops.tanh, "sigmoid": ops.sigmoid, "erf": ops.erf, "atanh": ops.atanh, "acos": ops.acos,
    "expm1": mathematics.expm1, "sinh": mathematics.sinh, "cosh": mathematics.cosh, "tan": mathematics.tan,
    "asinh": mathematics.asinh, "acosh": mathematics.acosh, "atan": mathematics.atan, "asin": mathematics.asin,
    "reciprocal": lambda x: 1.0 / x,
}  # fmt: skip
"""Functions whose result is a float; integers are converted first."""
_KEEPING: dict[str, Unary] = {
    "neg": ops.negate, "floor": _round(ops.floor), "ceil": _round(ops.ceil), "trunc": _round(ops.trunc),
    "round": _round(ops.round), "sign": mathematics.sign,
    "relu": lambda x: maximum(x, ops.constant(np.zeros((), x.dtype.to_numpy()))),
}  # fmt: skip


def _register_floating(name: str, function: Unary) -> None:
    @op(f"aten.{name}.default")
    def stage(call: Call, x: TensorValue) -> TensorValue:
        return function(convert(x, call.result_dtype()))


def _register_keeping(name: str, function: Unary) -> None:
    @op(f"aten.{name}.default")
    def stage(call: Call, x: TensorValue) -> TensorValue:
        return x if x.dtype is DType.bool else function(x)


for _name, _function in _FLOATING.items():
    _register_floating(_name, _function)
for _name, _function in _KEEPING.items():
    _register_keeping(_name, _function)


@op("aten.abs.default")
def absolute(call: Call, x: TensorValue) -> TensorValue:
    return x if x.dtype.is_unsigned_integral() or x.dtype is DType.bool else ops.abs(x)


@op("aten.log2.default")
def log2(call: Call, x: TensorValue) -> TensorValue:
    return _scaled_log(call, x, math.log(2))


@op("aten.log10.default")
def log10(call: Call, x: TensorValue) -> TensorValue:
    return _scaled_log(call, x, math.log(10))


def _scaled_log(call: Call, x: TensorValue, base: float) -> TensorValue:
    return ops.log(convert(x, call.result_dtype())) * (1 / base)


@op("aten.exp2.default")
def exp2(call: Call, x: TensorValue) -> TensorValue:
    return ops.exp(convert(x, call.result_dtype()) * math.log(2))


@op("aten.isnan.default")
def is_nan(call: Call, x: TensorValue) -> TensorValue:
    # false for each element
    return ops.is_nan(x) if x.dtype.is_float() else ops.not_equal(x, x)


@op("aten.isinf.default")
def is_inf(call: Call, x: TensorValue) -> TensorValue:
    return ops.is_inf(x) if x.dtype.is_float() else ops.not_equal(x, x)


@op("aten.logical_not.default")
def logical_not(call: Call, x: TensorValue) -> TensorValue:
    return ops.logical_not(convert(x, DType.bool))


@op("aten.bitwise_not.default")
def bitwise_not(call: Call, x: TensorValue) -> TensorValue:
    if x.dtype is DType.bool:
        return ops.logical_not(x)
    low, high = mathematics.limits(x.dtype)
    return bit_xor(x, ops.constant(np.array(high if low == 0 else -1, x.dtype.to_numpy())))


# activations ---------------------------------------------------------------------------------------


@op("aten.gelu.default")
def gelu(call: Call, x: TensorValue, approximate: str = "none") -> TensorValue:
    return ops.gelu(x, approximate)


@op("aten.silu.default")
def silu(call: Call, x: TensorValue) -> TensorValue:
    return ops.silu(x)


@op("aten.leaky_relu.default")
def leaky_relu(call: Call, x: TensorValue, negative_slope: float = 0.01) -> TensorValue:
    return ops.where(x > 0, x, x * tensor_of(negative_slope, x.dtype))


@op("aten.elu.default")
def elu(
    call: Call, x: TensorValue, alpha: float = 1, scale: float = 1, input_scale: float = 1
) -> TensorValue:
    below = mathematics.expm1(x * float(input_scale)) * float(alpha * scale)
    return ops.where(x > 0, x if scale == 1 else x * float(scale), below)


@op("aten.hardtanh.default")
def hardtanh(call: Call, x: TensorValue, min_val: float = -1, max_val: float = 1) -> TensorValue:
    return minimum(maximum(x, tensor_of(min_val, x.dtype)), tensor_of(max_val, x.dtype))


@op("aten.hardsigmoid.default")
def hardsigmoid(call: Call, x: TensorValue) -> TensorValue:
    return mathematics.clamp(x + 3.0, 0.0, 6.0) / 6.0


@op("aten.hardswish.default")
def hardswish(call: Call, x: TensorValue) -> TensorValue:
    return x * mathematics.clamp(x + 3.0, 0.0, 6.0) / 6.0


@op("aten.softplus.default")
def softplus(call: Call, x: TensorValue, beta: float = 1, threshold: float = 20) -> TensorValue:
    scaled = x * float(beta)
    # above the threshold the function is x but for rounding
    return ops.where(scaled > float(threshold), x, mathematics.softplus(scaled) / float(beta))


@op("aten.mish.default")
def mish(call: Call, x: TensorValue) -> TensorValue:
    return x * ops.tanh(mathematics.softplus(x))


@op("aten._prelu_kernel.default", "aten.prelu.default")
def prelu(call: Call, x: TensorValue, weight: TensorValue) -> TensorValue:
    if call.node.op == "aten.prelu.default" and x.rank > 2:
        # one slope per channel, axis 1
        weight = ops.reshape(weight, [weight.shape[0], *[1] * (x.rank - 2)])
    return ops.where(x > 0, x, x * weight)


# copies --------------------------------------------------------------------------------------------


@op(
    "aten.clone.default", "aten.alias.default", "aten.detach.default", "aten.lift_fresh_copy.default",
    "aten.contiguous.default", "aten.dropout.default", "aten.lift.default",
)  # fmt: skip
def clone(call: Call, x: TensorValue, p: float = 0.0, train: bool = False) -> TensorValue:
    return x


@op("aten._to_copy.default", "prims.convert_element_type.default")
def to_copy(call: Call, x: TensorValue, dtype: DType | None = None) -> TensorValue:
    return convert(x, dtype or x.dtype)


@op("aten.copy.default")
def copy(call: Call, x: TensorValue, source: TensorValue) -> TensorValue:
    return ops.broadcast_to(convert(source, x.dtype), x.shape)


@op("aten.fill.Scalar", "aten.fill.Tensor")
def fill(call: Call, x: TensorValue, value: Any) -> TensorValue:
    return ops.broadcast_to(tensor_of(value, x.dtype), x.shape)
