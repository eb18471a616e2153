"""Functions of two operands that broadcast: arithmetic, comparisons, logic, bits. Torch promotes the operands first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from max.dtype import DType
from max.graph import Dim, TensorValue, ops
from max.graph.ops.elementwise.binary import maximum, minimum
from max.graph.ops.elementwise.bits import bit_and, bit_or, bit_xor, shift_left, shift_right
from max.importers.errors import Unsupported
from max.importers.functions import mathematics
from max.importers.torch.table import Call, op

Binary = Callable[[TensorValue, TensorValue], TensorValue]


def tensor_of(value: Any, dtype: DType) -> TensorValue:
    """A tensor or a number as a tensor of a type."""
    if isinstance(value, TensorValue):
        return convert(value, dtype)
    if isinstance(value, Dim):
        return ops.cast(ops.reshape(ops.shape_to_tensor([value]), []), dtype)
    with np.errstate(all="ignore"):
        return ops.constant(np.array(value).astype(dtype.to_numpy()))


def convert(x: TensorValue, dtype: DType) -> TensorValue:
    """A tensor as another type; bool is whether an element is not 0."""
    if x.dtype is dtype:
        return x
    if dtype is DType.bool:
        return ops.not_equal(x, ops.constant(np.zeros((), x.dtype.to_numpy())))
    return ops.cast(x, dtype)


def pair(call: Call, x: Any, y: Any, dtype: DType | None = None) -> tuple[TensorValue, TensorValue]:
    """The operands in their common type."""
    common = dtype or call.common
    if common is None:
        tensors = [value for value in (x, y) if isinstance(value, TensorValue)]
        common = tensors[0].dtype
    return tensor_of(x, common), tensor_of(y, common)


@op("aten.add.Tensor", "aten.add.Scalar")
def add(call: Call, x: Any, y: Any, alpha: Any = 1) -> TensorValue:
    dtype = call.result_dtype()
    a, b = pair(call, x, y, dtype)
    if dtype is DType.bool:
        # a factor of bools only matters if it is 0
        return ops.logical_or(a, b) if alpha else a
    return a + (b if alpha == 1 else b * tensor_of(alpha, dtype))


@op("aten.sub.Tensor", "aten.sub.Scalar")
def sub(call: Call, x: Any, y: Any, alpha: Any = 1) -> TensorValue:
    dtype = call.result_dtype()
    a, b = pair(call, x, y, dtype)
    return a - (b if alpha == 1 else b * tensor_of(alpha, dtype))


@op("aten.rsub.Scalar", "aten.rsub.Tensor")
def rsub(call: Call, x: Any, y: Any, alpha: Any = 1) -> TensorValue:
    return sub(call, y, x, alpha)


@op("aten.mul.Tensor", "aten.mul.Scalar")
def mul(call: Call, x: Any, y: Any) -> TensorValue:
    a, b = pair(call, x, y, call.result_dtype())
    return ops.logical_and(a, b) if a.dtype is DType.bool else a * b


@op("aten.div.Tensor", "aten.div.Scalar")
def div(call: Call, x: Any, y: Any) -> TensorValue:
    return ops.div(*pair(call, x, y, call.result_dtype()))


@op("aten.div.Tensor_mode", "aten.div.Scalar_mode")
def div_mode(call: Call, x: Any, y: Any, rounding_mode: str | None = None) -> TensorValue:
    a, b = pair(call, x, y, call.result_dtype())
    if rounding_mode is None:
        return ops.div(a, b)
    if rounding_mode == "floor":
        return ops.floor_div(a, b)
    if a.dtype.is_integral():
        return mathematics.truncated_quotient(a, b)
    return ops.trunc(ops.div(a, b))


@op("aten.floor_divide.default")
def floor_divide(call: Call, x: Any, y: Any) -> TensorValue:
    return ops.floor_div(*pair(call, x, y, call.result_dtype()))


@op("aten.remainder.Tensor", "aten.remainder.Scalar")
def remainder(call: Call, x: Any, y: Any) -> TensorValue:
    return ops.mod(*pair(call, x, y, call.result_dtype()))


@op("aten.fmod.Tensor", "aten.fmod.Scalar")
def fmod(call: Call, x: Any, y: Any) -> TensorValue:
    a, b = pair(call, x, y, call.result_dtype())
    shape = ops.add(a, b).shape
    return mathematics.fmod(ops.broadcast_to(a, shape), ops.broadcast_to(b, shape))


@op("aten.pow.Tensor_Tensor", "aten.pow.Tensor_Scalar", "aten.pow.Scalar")
def power(call: Call, x: Any, y: Any) -> TensorValue:
    dtype = call.result_dtype()
    if isinstance(x, TensorValue) and not isinstance(y, TensorValue):
        base = tensor_of(x, dtype)
        simple: dict[Any, Callable[[], TensorValue]] = {
            0.5: lambda: ops.sqrt(base), 1: lambda: base, 2: lambda: base * base, 3: lambda: base * base * base,
            -0.5: lambda: ops.rsqrt(base), -1: lambda: 1.0 / base,
        }  # fmt: skip
        if y in simple and (y in (1, 2, 3) or dtype.is_float()):
            return simple[y]()
    return ops.pow(*pair(call, x, y, dtype))


@op("aten.maximum.default")
def maximum_(call: Call, x: Any, y: Any) -> TensorValue:
    a, b = pair(call, x, y, call.result_dtype())
    return ops.logical_or(a, b) if a.dtype is DType.bool else maximum(a, b)


@op("aten.minimum.default")
def minimum_(call: Call, x: Any, y: Any) -> TensorValue:
    a, b = pair(call, x, y, call.result_dtype())
    return ops.logical_and(a, b) if a.dtype is DType.bool else minimum(a, b)


@op("aten.atan2.default")
def atan2(call: Call, x: Any, y: Any) -> TensorValue:
    """The angle of the point ``(y, x)``: the arc tangent, moved by pi where the second operand is negative."""
    a, b = pair(call, x, y, call.result_dtype())
    wide = DType.float64 if a.dtype is DType.float64 else DType.float32
    a, b = ops.cast(a, wide), ops.cast(b, wide)
    # the quotient of two infinities is NaN, the angle that of (1, 1)
    both = ops.logical_and(ops.is_inf(a), ops.is_inf(b))
    quotient = ops.abs(ops.where(both, 1.0, a / b))
    undefined = ops.logical_and(ops.equal(a, 0.0), ops.equal(b, 0.0))
    angle = mathematics.atan(ops.where(undefined, 0.0, quotient))
    # `is_negative` tells -0 from 0
    angle = ops.where(mathematics.is_negative(b), np.pi - angle, angle)
    return ops.cast(ops.where(mathematics.is_negative(a), -angle, angle), call.result_dtype())


_COMPARISONS: dict[str, Binary] = {
    "eq": ops.equal, "ne": ops.not_equal, "gt": ops.greater, "ge": ops.greater_equal,
    "lt": lambda x, y: ops.greater(y, x), "le": lambda x, y: ops.greater_equal(y, x),
}  # fmt: skip
_LOGIC: dict[str, Binary] = {
    "logical_and": ops.logical_and, "logical_or": ops.logical_or, "logical_xor": ops.logical_xor,
}  # fmt: skip
_BITS: dict[str, tuple[Binary, Binary]] = {
    "bitwise_and": (bit_and, ops.logical_and),
    "bitwise_or": (bit_or, ops.logical_or),
    "bitwise_xor": (bit_xor, ops.logical_xor),
}


def _register_comparison(name: str, function: Binary) -> None:
    @op(f"aten.{name}.Tensor", f"aten.{name}.Scalar")
    def compare(call: Call, x: Any, y: Any) -> TensorValue:
        a, b = pair(call, x, y)
        if a.dtype is DType.bool:
            # false is less than true
            a, b = ops.cast(a, DType.uint8), ops.cast(b, DType.uint8)
        return function(a, b)


def _register_logic(name: str, function: Binary) -> None:
    @op(f"aten.{name}.default")
    def combine(call: Call, x: TensorValue, y: TensorValue) -> TensorValue:
        return function(convert(x, DType.bool), convert(y, DType.bool))


def _register_bits(name: str, of_bits: Binary, of_bools: Binary) -> None:
    @op(f"aten.{name}.Tensor", f"aten.{name}.Scalar")
    def combine(call: Call, x: Any, y: Any) -> TensorValue:
        a, b = pair(call, x, y, call.result_dtype())
        return of_bools(a, b) if a.dtype is DType.bool else of_bits(a, b)


for _name, _function in _COMPARISONS.items():
    _register_comparison(_name, _function)
for _name, _function in _LOGIC.items():
    _register_logic(_name, _function)
for _name, (_first, _second) in _BITS.items():
    _register_bits(_name, _first, _second)


@op("aten.bitwise_left_shift.Tensor", "aten.bitwise_left_shift.Tensor_Scalar")
def left_shift(call: Call, x: Any, y: Any) -> TensorValue:
    return shift_left(*pair(call, x, y, call.result_dtype()))


@op("aten.bitwise_right_shift.Tensor", "aten.bitwise_right_shift.Tensor_Scalar")
def right_shift(call: Call, x: Any, y: Any) -> TensorValue:
    return shift_right(*pair(call, x, y, call.result_dtype()))


@op("aten.where.self", "aten.where.ScalarOther", "aten.where.ScalarSelf", "aten.where.Scalar")
def where(call: Call, condition: TensorValue, x: Any, y: Any) -> TensorValue:
    dtype = call.result_dtype()
    return ops.where(convert(condition, DType.bool), tensor_of(x, dtype), tensor_of(y, dtype))


@op("aten.masked_fill.Scalar", "aten.masked_fill.Tensor")
def masked_fill(call: Call, x: TensorValue, mask: TensorValue, value: Any) -> TensorValue:
    return ops.where(mask, tensor_of(value, x.dtype), x)


@op("aten.clamp.default", "aten.clamp.Tensor")
def clamp(call: Call, x: TensorValue, min: Any = None, max: Any = None) -> TensorValue:
    dtype = call.result_dtype()
    result = convert(x, dtype)
    if min is not None:
        result = maximum(result, tensor_of(min, dtype))
    return result if max is None else minimum(result, tensor_of(max, dtype))


@op("aten.lerp.Scalar", "aten.lerp.Tensor")
def lerp(call: Call, x: TensorValue, y: TensorValue, weight: Any) -> TensorValue:
    return x + tensor_of(weight, x.dtype) * (y - x)


@op("aten.addcmul.default")
def addcmul(
    call: Call, x: TensorValue, a: TensorValue, b: TensorValue, value: Any = 1
) -> TensorValue:
    if x.dtype is DType.bool:
        raise Unsupported("takes no bool")
    dtype = call.result_dtype()
    product = convert(a, dtype) * convert(b, dtype)
    return convert(x, dtype) + (product if value == 1 else product * tensor_of(value, dtype))


@op("aten.addcdiv.default")
def addcdiv(
    call: Call, x: TensorValue, a: TensorValue, b: TensorValue, value: Any = 1
) -> TensorValue:
    quotient = a / b
    return x + (quotient if value == 1 else quotient * tensor_of(value, x.dtype))
