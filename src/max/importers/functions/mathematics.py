"""Functions of tensors that the graph API lacks, composed of its ops. Importers share them."""

from __future__ import annotations

from max.dtype import DType
from max.graph import TensorValue, ops
from max.graph.ops.elementwise.binary import maximum, minimum
from max.graph.ops.elementwise.inverse import (
    acosh,
    as_type_of,
    as_wide,
    asin,
    asinh,
    atan,
    cosh,
    expm1,
    is_negative,
    sinh,
    with_sign,
)

__all__ = [
    "acosh", "asin", "asinh", "atan", "clamp", "cosh", "expm1", "fmod", "is_negative", "limits", "power", "sign",
    "sinh", "softplus", "tan", "truncated_quotient",
]  # fmt: skip


def sign(x: TensorValue) -> TensorValue:
    """-1, 0 or 1; NaN of NaN."""
    if x.dtype.is_unsigned_integral():
        return minimum(x, 1)
    result = ops.where(x > 0, 1, ops.where(x < 0, -1, x))
    return ops.cast(result, x.dtype)


def tan(x: TensorValue) -> TensorValue:
    """The tangent."""
    wide = as_wide(x)
    return as_type_of(ops.sin(wide) / ops.cos(wide), x)


def softplus(x: TensorValue) -> TensorValue:
    """``log(1 + exp(x))``, without overflow."""
    wide = as_wide(x)
    return as_type_of(maximum(wide, 0.0) + ops.log1p(ops.exp(-ops.abs(wide))), x)


def truncated_quotient(x: TensorValue, y: TensorValue) -> TensorValue:
    """The quotient of integers, rounded to 0."""
    quotient = ops.floor_div(x, y)
    if x.dtype.is_unsigned_integral():
        return quotient
    inexact = ops.not_equal(quotient * y, x)
    negative = ops.logical_xor(x < 0, y < 0)
    return quotient + ops.cast(ops.logical_and(inexact, negative), x.dtype)


def fmod(x: TensorValue, y: TensorValue) -> TensorValue:
    """The remainder with the sign of the dividend."""
    if x.dtype.is_unsigned_integral():
        return ops.mod(x, y)
    if x.dtype.is_integral():
        return x - truncated_quotient(x, y) * y
    remainder = ops.mod(ops.abs(x), ops.abs(y))
    remainder = ops.where(
        ops.logical_and(ops.is_inf(y), ops.logical_not(ops.is_inf(x))), ops.abs(x), remainder
    )
    return with_sign(remainder, x)


def power(x: TensorValue, y: TensorValue) -> TensorValue:
    """``x ** y`` in the dtype of x; exponents of another type keep it."""
    if y.dtype is x.dtype:
        return ops.pow(x, y)
    if x.dtype.is_integral() and y.dtype.is_float():
        return ops.cast(ops.pow(ops.cast(x, DType.float64), ops.cast(y, DType.float64)), x.dtype)
    if y.dtype.is_integral() and x.dtype.is_float() and x.dtype is not DType.float64:
        return as_type_of(ops.pow(as_wide(x), ops.cast(y, as_wide(x).dtype)), x)
    return ops.pow(x, ops.cast(y, x.dtype))


def limits(dtype: DType) -> tuple[int, int]:
    """The least and the greatest integer of a type."""
    bits = dtype.size_in_bits
    if dtype.is_unsigned_integral():
        return 0, (1 << bits) - 1
    return -(1 << (bits - 1)), (1 << (bits - 1)) - 1


def clamp(x: TensorValue, low: float | None, high: float | None) -> TensorValue:
    """Values between two numbers; NaN stays."""
    if low is not None:
        x = maximum(x, low)
    return x if high is None else minimum(x, high)
