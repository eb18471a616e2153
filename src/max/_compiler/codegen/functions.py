"""Functions that generated kernels call: `mo` ops that are no single operation of the kernel language.

All take and give scalars or vectors of one element type.
"""

from __future__ import annotations

from typing import Any

from max import kernel as k

__all__ = [
    "acos", "atanh", "floor_mod", "gelu", "gelu_quick", "gelu_tanh", "relu", "signed_div", "signed_mod", "signed_pow",
    "silu", "unsigned_div", "unsigned_mod", "unsigned_pow",
]  # fmt: skip


@k.inline
def relu(x: Any) -> Any:
    """``max(x, 0)``; NaN stays."""
    return k.select(x < 0, x * 0, x)


@k.inline
def silu(x: Any) -> Any:
    """``x * sigmoid(x)``"""
    return x * k.sigmoid(x)


@k.inline
def gelu(x: Any) -> Any:
    """``x * Phi(x)`` through erf."""
    return 0.5 * x * (1.0 + k.erf(x * 0.7071067811865476))


@k.inline
def gelu_tanh(x: Any) -> Any:
    """GELU with the tanh approximation."""
    return 0.5 * x * (1.0 + k.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


@k.inline
def gelu_quick(x: Any) -> Any:
    """``x * sigmoid(1.702 * x)``"""
    return x * k.sigmoid(1.702 * x)


@k.inline
def atanh(x: Any) -> Any:
    """The inverse of tanh; odd, accurate near 0."""
    return 0.5 * (k.log1p(x) - k.log1p(-x))


@k.inline
def floor_mod(x: Any, y: Any) -> Any:
    """The remainder of floats with the sign of `y`, computed without the rounding of ``x - floor(x / y) * y``."""
    r = k.fma(-k.trunc(x / y), y, x)
    # the quotient may have rounded up across an integer
    r = k.select((r != 0) & ((r < 0) != (x < 0)), r + k.select(x < 0, -k.abs(y), k.abs(y)), r)
    return k.select((r != 0) & ((r < 0) != (y < 0)), r + y, r)


@k.inline
def signed_div(x: Any, y: Any) -> Any:
    """Floor division; 0 where `y` is 0, and wrapped where the quotient has no room."""
    safe = k.select((y == 0) | (y == -1), 1, y)
    return k.select(y == 0, 0, k.select(y == -1, -x, x // safe))


@k.inline
def unsigned_div(x: Any, y: Any) -> Any:
    """Division rounded down; 0 where `y` is 0."""
    return k.select(y == 0, 0, x // k.select(y == 0, 1, y))


@k.inline
def signed_mod(x: Any, y: Any) -> Any:
    """The remainder with the sign of `y`; 0 where `y` is 0."""
    safe = k.select((y == 0) | (y == -1), 1, y)
    return k.select((y == 0) | (y == -1), 0, x - (x // safe) * safe)


@k.inline
def unsigned_mod(x: Any, y: Any) -> Any:
    """The remainder; 0 where `y` is 0."""
    safe = k.select(y == 0, 1, y)
    return k.select(y == 0, 0, x - (x // safe) * safe)


@k.inline
def unsigned_pow(x: Any, y: Any) -> Any:
    """Integer power by repeated squaring, wrapped."""
    result = x * 0 + 1
    base = x
    exponent = y
    while k.any(exponent != 0):
        result = k.select((exponent & 1) != 0, result * base, result)
        base = base * base
        exponent = exponent >> 1
    return result


@k.inline
def signed_pow(x: Any, y: Any) -> Any:
    """Integer power, wrapped; a negative power is 0 but for bases 1 and -1."""
    power = unsigned_pow(x, k.select(y < 0, -(y + 1), y))
    odd = (y & 1) != 0
    unit = k.select(x == 1, 1, k.select(x == -1, k.select(odd, -1, 1), 0)) + x * 0
    return k.select(y < 0, unit, power)


@k.inline
def acos(x: Any) -> Any:
    """The arc cosine through asin on [0, 0.5]: ``acos(x) = 2 asin(sqrt((1 - x) / 2))`` above 0.5."""
    a = k.abs(x)
    big = a > 0.5
    z = k.select(big, 0.5 * (1.0 - a), x * x)
    s = k.select(big, k.sqrt(z), a)
    p = 4.2163199048e-2
    p = p * z + 2.4181311049e-2
    p = p * z + 4.5470025998e-2
    p = p * z + 7.4953002686e-2
    p = p * z + 1.6666752422e-1
    arc = p * z * s + s
    near = k.select(x < 0, 3.141592653589793 - 2.0 * arc, 2.0 * arc)
    return k.select(big, near, 1.5707963267948966 - k.copysign(arc, x))
