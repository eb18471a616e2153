"""Functions of tensors that the graph API lacks, composed of its ops. Importers share them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from max.dtype import DType
from max.graph import TensorValue, ops
from max.graph.ops.elementwise.binary import maximum, minimum
from max.graph.ops.elementwise.inverse_constants import ARC_TANGENT_P, ARC_TANGENT_Q, LARGE

__all__ = [
    "acosh", "asin", "asinh", "atan", "clamp", "cosh", "expm1", "fmod", "is_negative", "limits", "power", "sign",
    "sinh", "softplus", "tan", "truncated_quotient",
]  # fmt: skip


def _wide(x: TensorValue) -> TensorValue:
    """Floats of 16 bits or fewer as float32: a formula of several ops rounds once."""
    return ops.cast(x, DType.float32) if x.dtype.size_in_bytes < 4 else x


def _like(result: TensorValue, x: TensorValue) -> TensorValue:
    return ops.cast(result, x.dtype) if result.dtype is not x.dtype else result


def sign(x: TensorValue) -> TensorValue:
    """-1, 0 or 1; NaN of NaN."""
    if x.dtype.is_unsigned_integral():
        return minimum(x, 1)
    result = ops.where(x > 0, 1, ops.where(x < 0, -1, x))
    return ops.cast(result, x.dtype)


def is_negative(x: TensorValue) -> TensorValue:
    """Whether the sign is negative, which -0.0's is."""
    return ops.logical_or(x < 0, ops.logical_and(ops.equal(x, 0.0), 1.0 / x < 0))


def _copysign(size: TensorValue, x: TensorValue) -> TensorValue:
    return ops.where(is_negative(x), -size, size)


def _polynomial(coefficients: Sequence[float], x: TensorValue) -> TensorValue:
    """A polynomial by Horner's rule, the highest power first."""
    result = x * coefficients[0] + coefficients[1]
    for coefficient in coefficients[2:]:
        result = result * x + coefficient
    return result


def expm1(x: TensorValue) -> TensorValue:
    """``exp(x) - 1`` (Kahan's quotient, in which the errors of `exp` and `log` cancel)."""
    wide = _wide(x)
    power_ = ops.exp(wide)
    minus_one = power_ - 1.0
    small = ops.equal(power_, 1.0)
    divisor = ops.log(ops.where(small, 2.0, power_))
    result = ops.where(small, wide, minus_one * wide / divisor)
    ends = ops.logical_or(ops.is_inf(power_), ops.equal(minus_one, -1.0))
    return _like(ops.where(ends, minus_one, result), x)


def sinh(x: TensorValue) -> TensorValue:
    """The hyperbolic sine."""
    wide = _wide(x)
    size = ops.abs(wide)
    small = expm1(minimum(size, 20.0))
    large = ops.exp(size - math.log(2))
    result = ops.where(size > 20.0, large, 0.5 * (small + small / (small + 1.0)))
    return _like(ops.where(ops.is_nan(wide), wide, _copysign(result, wide)), x)


def cosh(x: TensorValue) -> TensorValue:
    """The hyperbolic cosine."""
    wide = ops.abs(_wide(x))
    half = ops.exp(wide - math.log(2))
    return _like(half + 0.25 / half, x)


def tan(x: TensorValue) -> TensorValue:
    """The tangent."""
    wide = _wide(x)
    return _like(ops.sin(wide) / ops.cos(wide), x)


def asinh(x: TensorValue) -> TensorValue:
    """The inverse of the hyperbolic sine."""
    wide = _wide(x)
    size = ops.abs(wide)
    near = minimum(size, LARGE)
    result = ops.log1p(near + near * near / (1.0 + ops.sqrt(1.0 + near * near)))
    result = ops.where(size > LARGE, ops.log(size) + math.log(2), result)
    return _like(ops.where(ops.is_nan(wide), wide, _copysign(result, wide)), x)


def acosh(x: TensorValue) -> TensorValue:
    """The inverse of the hyperbolic cosine; NaN below 1."""
    wide = _wide(x)
    above = minimum(wide, LARGE) - 1.0
    result = ops.log1p(above + ops.sqrt(2.0 * above + above * above))
    result = ops.where(wide > LARGE, ops.log(wide) + math.log(2), result)
    result = ops.where(wide < 1.0, math.nan, result)
    return _like(ops.where(ops.is_nan(wide), wide, result), x)


def atan(x: TensorValue) -> TensorValue:
    """The arc tangent."""
    wide = _wide(x)
    size = ops.abs(wide)
    far, middle = size > math.tan(3 * math.pi / 8), size > 0.66
    inverse = -1.0 / ops.where(far, size, 1.0)
    reduced = ops.where(far, inverse, ops.where(middle, (size - 1.0) / (size + 1.0), size))
    square = reduced * reduced
    series = reduced + reduced * square * _polynomial(ARC_TANGENT_P, square) / _polynomial(
        ARC_TANGENT_Q, square
    )
    start = ops.where(far, math.pi / 2, ops.where(middle, math.pi / 4, size * 0.0))
    start = ops.where(ops.is_inf(wide), math.pi / 2, start)
    return _like(ops.where(ops.is_nan(wide), wide, _copysign(start + series, wide)), x)


def asin(x: TensorValue) -> TensorValue:
    """The arc sine; NaN outside of -1 to 1."""
    wide = _wide(x)
    return _like(atan(wide / ops.sqrt((1.0 - wide) * (1.0 + wide))), x)


def softplus(x: TensorValue) -> TensorValue:
    """``log(1 + exp(x))``, without overflow."""
    wide = _wide(x)
    return _like(maximum(wide, 0.0) + ops.log1p(ops.exp(-ops.abs(wide))), x)


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
    return _copysign(remainder, x)


def power(x: TensorValue, y: TensorValue) -> TensorValue:
    """``x ** y`` in the dtype of x; exponents of another type keep it."""
    if y.dtype is x.dtype:
        return ops.pow(x, y)
    if x.dtype.is_integral() and y.dtype.is_float():
        return ops.cast(ops.pow(ops.cast(x, DType.float64), ops.cast(y, DType.float64)), x.dtype)
    if y.dtype.is_integral() and x.dtype.is_float() and x.dtype is not DType.float64:
        return _like(ops.pow(_wide(x), ops.cast(y, _wide(x).dtype)), x)
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
