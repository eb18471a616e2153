"""Functions whose small results keep their digits: differences of exponentials, inverse functions."""

from __future__ import annotations

import math
from typing import Any

from max.experimental import functional as F
from max.experimental.array_api.bits import copysign, signbit
from max.experimental.array_api.creation import full_like
from max.experimental.array_api.manipulation import pair_of
from max.experimental.tensor import Tensor
from max.graph.ops.elementwise import inverse

__all__ = ["acosh", "asin", "asinh", "atan", "atan2", "cosh", "expm1", "hypot", "sinh"]

expm1 = F.functional(inverse.expm1)
sinh, cosh = F.functional(inverse.sinh), F.functional(inverse.cosh)
asin, atan = F.functional(inverse.asin), F.functional(inverse.atan)
asinh, acosh = F.functional(inverse.asinh), F.functional(inverse.acosh)


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
