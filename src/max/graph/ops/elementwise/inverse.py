"""Functions whose small results keep their digits: differences of exponentials, inverse functions.

`max.graph.ops` lacks them; importers and `max.experimental.array_api` share them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from max.dtype import DType
from max.graph import TensorValue, ops
from max.graph.ops.elementwise.binary import minimum

__all__ = [
    "acosh", "as_type_of", "asin", "asinh", "atan", "cosh", "expm1", "is_negative", "sinh", "as_wide", "with_sign",
]  # fmt: skip

_ARC_TANGENT_P = (
    -8.750608600031904122785e-1,
    -1.615753718733365076637e1,
    -7.500855792314704667340e1,
    -1.228866684490136173410e2,
    -6.485021904942025371773e1,
)
_ARC_TANGENT_Q = (
    1.0,
    2.485846490142306297962e1,
    1.650270098316988542046e2,
    4.328810604912902668951e2,
    4.853903996359136964868e2,
    1.945506571482613964425e2,
)
"""The arc tangent is ``x + x * z * P(z) / Q(z)`` with ``z = x * x`` for ``|x| <= 0.66`` (Cephes, Moshier 1984)."""
_LARGE = 1e4
"""Beyond this, 1 is lost beside the square of a float32; of a float64 the formulas lose no digits either."""


def as_wide(x: TensorValue) -> TensorValue:
    """Floats of 16 bits or fewer as float32: a formula of several ops rounds once."""
    return ops.cast(x, DType.float32) if x.dtype.size_in_bytes < 4 else x


def as_type_of(result: TensorValue, x: TensorValue) -> TensorValue:
    """A result in the dtype of a value."""
    return ops.cast(result, x.dtype) if result.dtype is not x.dtype else result


def is_negative(x: TensorValue) -> TensorValue:
    """Whether the sign is negative, which -0.0's is."""
    return ops.logical_or(x < 0, ops.logical_and(ops.equal(x, 0.0), 1.0 / x < 0))


def with_sign(size: TensorValue, x: TensorValue) -> TensorValue:
    """A size with the sign of a value."""
    return ops.where(is_negative(x), -size, size)


def _polynomial(coefficients: Sequence[float], x: TensorValue) -> TensorValue:
    """A polynomial by Horner's rule, the highest power first."""
    result = x * coefficients[0] + coefficients[1]
    for coefficient in coefficients[2:]:
        result = result * x + coefficient
    return result


def expm1(x: TensorValue, /) -> TensorValue:
    """``exp(x) - 1`` (Kahan's quotient, in which the errors of `exp` and `log` cancel)."""
    wide = as_wide(x)
    power_ = ops.exp(wide)
    minus_one = power_ - 1.0
    small = ops.equal(power_, 1.0)
    divisor = ops.log(ops.where(small, 2.0, power_))
    # where exp rounds to 1, expm1 is x to its last digit
    # the product of the first two would overflow before the result
    result = ops.where(small, wide, minus_one * (wide / divisor))
    # where exp is infinite or 0, the quotient would be NaN or 0
    ends = ops.logical_or(ops.is_inf(power_), ops.equal(minus_one, -1.0))
    return as_type_of(ops.where(ends, minus_one, result), x)


def _half_exp(size: TensorValue) -> TensorValue:
    """``exp(size) / 2`` of sizes from 0 on, which overflows only where the half does."""
    root = ops.exp(0.5 * size)
    return 0.5 * root * root


def cosh(x: TensorValue, /) -> TensorValue:
    """The hyperbolic cosine."""
    half = _half_exp(ops.abs(as_wide(x)))
    return as_type_of(half + 0.25 / half, x)


def sinh(x: TensorValue, /) -> TensorValue:
    """The hyperbolic sine."""
    wide = as_wide(x)
    size = ops.abs(wide)
    small = expm1(minimum(size, 20.0))
    # beyond 20, e**-x is lost beside e**x
    result = ops.where(size > 20.0, _half_exp(size), 0.5 * (small + small / (small + 1.0)))
    return as_type_of(ops.where(ops.is_nan(wide), wide, with_sign(result, wide)), x)


def asinh(x: TensorValue, /) -> TensorValue:
    """The inverse of the hyperbolic sine."""
    wide = as_wide(x)
    size = ops.abs(wide)
    near = minimum(size, _LARGE)
    # the quotient is sqrt(1 + x * x) - 1 without the loss of digits near 0
    result = ops.log1p(near + near * near / (1.0 + ops.sqrt(1.0 + near * near)))
    result = ops.where(size > _LARGE, ops.log(size) + math.log(2), result)
    return as_type_of(ops.where(ops.is_nan(wide), wide, with_sign(result, wide)), x)


def acosh(x: TensorValue, /) -> TensorValue:
    """The inverse of the hyperbolic cosine; NaN below 1."""
    wide = as_wide(x)
    above = minimum(wide, _LARGE) - 1.0
    # with u = x - 1, 2 * u + u * u is x * x - 1 without the loss of digits near 1
    result = ops.log1p(above + ops.sqrt(2.0 * above + above * above))
    result = ops.where(wide > _LARGE, ops.log(wide) + math.log(2), result)
    result = ops.where(wide < 1.0, math.nan, result)
    return as_type_of(ops.where(ops.is_nan(wide), wide, result), x)


def atan(x: TensorValue, /) -> TensorValue:
    """The arc tangent."""
    wide = as_wide(x)
    size = ops.abs(wide)
    # far: atan(x) = pi/2 + atan(-1 / x), middle: pi/4 + atan((x - 1) / (x + 1))
    far, middle = size > math.tan(3 * math.pi / 8), size > 0.66
    inverse = -1.0 / ops.where(far, size, 1.0)
    reduced = ops.where(far, inverse, ops.where(middle, (size - 1.0) / (size + 1.0), size))
    square = reduced * reduced
    series = reduced + reduced * square * _polynomial(_ARC_TANGENT_P, square) / _polynomial(
        _ARC_TANGENT_Q, square
    )
    start = ops.where(far, math.pi / 2, ops.where(middle, math.pi / 4, size * 0.0))
    start = ops.where(ops.is_inf(wide), math.pi / 2, start)
    return as_type_of(ops.where(ops.is_nan(wide), wide, with_sign(start + series, wide)), x)


def asin(x: TensorValue, /) -> TensorValue:
    """The arc sine; NaN outside of -1 to 1."""
    wide = as_wide(x)
    # the product is 1 - x * x without the loss of digits near 1
    return as_type_of(atan(wide / ops.sqrt((1.0 - wide) * (1.0 + wide))), x)
