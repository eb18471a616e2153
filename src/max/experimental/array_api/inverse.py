"""Functions whose small results keep their digits: differences of exponentials, inverse functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from max.experimental import functional as F
from max.experimental.array_api.bits import copysign, signbit
from max.experimental.array_api.creation import full_like, zeros_like
from max.experimental.array_api.manipulation import pair_of
from max.experimental.tensor import Tensor
from max.graph.ops.elementwise.inverse_constants import ARC_TANGENT_P, ARC_TANGENT_Q, LARGE

__all__ = ["acosh", "asin", "asinh", "atan", "atan2", "expm1", "hypot", "sinh"]


def expm1(x: Tensor, /) -> Tensor:
    """``exp(x) - 1`` (Kahan's quotient, in which the errors of `exp` and `log` cancel)."""
    power = F.exp(x)
    minus_one = power - 1.0
    small = F.equal(power, 1.0)
    divisor = F.log(F.where(small, full_like(x, 2.0), power))
    # where exp rounds to 1, expm1 is x to its last digit
    result = F.where(small, x, minus_one * x / divisor)
    # where exp is infinite or 0, the quotient would be NaN or 0
    ends = F.logical_or(F.is_inf(power), F.equal(minus_one, -1.0))
    return F.where(ends, minus_one, result)


def sinh(x: Tensor, /) -> Tensor:
    """The hyperbolic sine."""
    size = F.abs(x)
    small = expm1(F.min(size, 20.0))
    # beyond 20, e**-x is lost beside e**x; e**(x - ln 2) overflows later than e**x / 2
    result = F.where(size > 20.0, F.exp(size - math.log(2)), 0.5 * (small + small / (small + 1.0)))
    return F.where(F.is_nan(x), x, copysign(result, x))


def asinh(x: Tensor, /) -> Tensor:
    """The inverse of the hyperbolic sine."""
    size = F.abs(x)
    near = F.min(size, LARGE)
    # the quotient is sqrt(1 + x * x) - 1 without the loss of digits near 0
    result = F.log1p(near + near * near / (1.0 + F.sqrt(1.0 + near * near)))
    result = F.where(size > LARGE, F.log(size) + math.log(2), result)
    return F.where(F.is_nan(x), x, copysign(result, x))


def acosh(x: Tensor, /) -> Tensor:
    """The inverse of the hyperbolic cosine; NaN below 1."""
    above = F.min(x, LARGE) - 1.0
    # with u = x - 1, 2 * u + u * u is x * x - 1 without the loss of digits near 1
    result = F.log1p(above + F.sqrt(2.0 * above + above * above))
    result = F.where(x > LARGE, F.log(x) + math.log(2), result)
    result = F.where(x < 1, full_like(x, math.nan), result)
    return F.where(F.is_nan(x), x, result)


def hypot(x1: Any, x2: Any, /) -> Tensor:
    """``sqrt(x1 * x1 + x2 * x2)`` without overflow."""
    x1, x2 = pair_of("hypot", x1, x2)
    first, second = F.abs(x1), F.abs(x2)
    high, low = F.max(first, second), F.min(first, second)
    zero = F.equal(high, 0.0)
    ratio = low / F.where(zero, full_like(high, 1.0), high)
    result = F.where(zero, high, high * F.sqrt(1.0 + ratio * ratio))
    # beside a NaN too, as C defines it
    infinite = F.logical_or(F.is_inf(first), F.is_inf(second))
    return F.where(infinite, full_like(result, math.inf), result)


def atan(x: Tensor, /) -> Tensor:
    """The arc tangent."""
    size = F.abs(x)
    # far: atan(x) = pi/2 + atan(-1 / x), middle: pi/4 + atan((x - 1) / (x + 1))
    far, middle = size > math.tan(3 * math.pi / 8), size > 0.66
    inverse = -1.0 / F.where(far, size, full_like(size, 1.0))
    reduced = F.where(far, inverse, F.where(middle, (size - 1.0) / (size + 1.0), size))
    square = reduced * reduced
    series = reduced + reduced * square * _polynomial(ARC_TANGENT_P, square) / _polynomial(
        ARC_TANGENT_Q, square
    )
    zero = zeros_like(size)
    start = F.where(far, zero + math.pi / 2, F.where(middle, zero + math.pi / 4, zero))
    return F.where(F.is_nan(x), x, copysign(start + series, x))


def asin(x: Tensor, /) -> Tensor:
    """The arc sine; NaN outside of -1 to 1."""
    # the product is 1 - x * x without the loss of digits near 1
    return atan(x / F.sqrt((1.0 - x) * (1.0 + x)))


def atan2(x1: Any, x2: Any, /) -> Tensor:
    """The angle of the point ``(x2, x1)``, between -pi and pi; signs of zeros and infinities count."""
    x1, x2 = pair_of("atan2", x1, x2)
    height, width = F.abs(x1), F.abs(x2)
    both_zero = F.logical_and(F.equal(height, 0.0), F.equal(width, 0.0))
    both_infinite = F.logical_and(F.is_inf(height), F.is_inf(width))
    quotient = height / F.where(both_zero, full_like(width, 1.0), width)
    # of two zeros 0, of two infinities pi/4, as C defines them
    angle = atan(F.where(both_infinite, full_like(quotient, 1.0), quotient))
    angle = F.where(signbit(x2), math.pi - angle, angle)
    nan = F.logical_or(F.is_nan(x1), F.is_nan(x2))
    return F.where(nan, x1 + x2, copysign(angle, x1))


def _polynomial(coefficients: Sequence[float], x: Tensor) -> Tensor:
    """A polynomial by Horner's rule, the highest power first."""
    result = x * coefficients[0] + coefficients[1]
    for coefficient in coefficients[2:]:
        result = result * x + coefficient
    return result
