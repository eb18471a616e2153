"""Functions that generated kernels call: `mo` ops without a single equivalent in the kernel language.

Arguments and results are scalars or vectors of one element type.
"""

from __future__ import annotations

from typing import Any

from max import kernel as k
from max._compiler.codegen.sums import add_part, no_sum, rounded_sum

__all__ = [
    "acos", "add_part", "floor_div", "floor_divide", "floor_mod", "gelu", "gelu_quick", "gelu_tanh", "integer_mod",
    "no_sum", "rounded_sum", "shift_left", "shift_right", "signed_pow", "unsigned_pow",
]  # fmt: skip


@k.inline
def gelu(x: Any) -> Any:
    """``x * Phi(x)``.

    In f32 it is ``max(x, 0) - |x| Phi(-|x|)``; NaN of -infinity and -0 below -14, as the product would be. The
    logarithm of Phi(-t) is a polynomial: a weighted minimax fit on [0, 6] that decreases beyond. Error: 4 units in the
    last place above 0, relative 4e-7 down to -2 and 3e-6 down to -5.
    """
    if x.dtype is k.f64:
        return 0.5 * x * (1.0 + k.erf(x * 0.7071067811865476))
    else:
        # Phi(-14) is 0 in f32; the clamp also avoids infinity * 0 above 0
        t = k.min(k.abs(x), 14.0)
        log_tail = k.polynomial(
            t,
            -1.3422853051281436e-08,
            4.211353257232986e-07,
            -5.659619546349859e-06,
            4.115826959605329e-05,
            -0.0001508996938355267,
            -9.482774476055056e-05,
            0.004940462298691273,
            -0.0364430770277977,
            -0.31827250123023987,
            -0.7978896498680115,
            -0.6931471228599548,
        )
        # -0 below 0, and NaN of -infinity
        return k.fma(-t, k.exp(log_tail), k.select(x < 0, x * 0.0, x))


@k.inline
def gelu_tanh(x: Any) -> Any:
    """GELU with the tanh approximation."""
    return 0.5 * x * (1.0 + k.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


@k.inline
def gelu_quick(x: Any) -> Any:
    """``x * sigmoid(1.702 * x)``"""
    return x * k.sigmoid(1.702 * x)


@k.inline
def truncated_mod(x: Any, y: Any) -> Any:
    """The exact remainder of floats with the sign of `x`, as C's ``fmod``."""
    q = k.trunc(x / y)
    r = k.fma(-q, y, x)
    # the quotient may have rounded up across an integer
    r = k.select((r != 0) & ((r < 0) != (x < 0)), r + k.select(x < 0, -k.abs(y), k.abs(y)), r)
    # beyond these limits the rounded quotient has no exact integer part; and infinity times 0 is NaN
    far = k.abs(q) > (4503599627370496.0 if x.dtype is k.f64 else 4194304.0)
    far = far | (k.abs(y) == float("inf"))
    if k.any(far):  # almost never taken
        r = k.select(far, k.fmod(x, y), r)
    return r


@k.inline
def floor_mod(x: Any, y: Any) -> Any:
    """The remainder of floats with the sign of `y`, which a zero has too, as NumPy's."""
    r = truncated_mod(x, y)
    r = k.select((r != 0) & ((r < 0) != (y < 0)), r + y, r)
    return k.select(r == 0, k.select(y < 0, -0.0, 0.0), r)


@k.inline
def floor_divide(x: Any, y: Any) -> Any:
    """The greatest integer not above the exact quotient of floats, as NumPy's; ``x / y`` if `y` is 0."""
    r = truncated_mod(x, y)
    # x - r is a multiple of y: the quotient is an integer up to the rounding of the division
    q = (x - r) / y
    q = k.select((r != 0) & ((r < 0) != (y < 0)), q - 1.0, q)
    low = k.floor(q)
    low = k.select(q - low > 0.5, low + 1.0, low)
    rounded = x / y
    return k.select(y == 0, rounded, k.select(low == 0, rounded * 0.0, low))


@k.inline
def floor_div(x: Any, y: Any) -> Any:
    """Floor division of integers; 0 if `y` is 0."""
    # no lane divides by 0, even if its result is not used
    return k.select(y == 0, 0, x // k.select(y == 0, 1, y))


@k.inline
def integer_mod(x: Any, y: Any) -> Any:
    """The remainder of integers, with the sign of `y`; 0 if `y` is 0."""
    return k.select(y == 0, 0, x % k.select(y == 0, 1, y))


@k.inline
def shift_left(x: Any, y: Any) -> Any:
    """The bits of integers moved up; 0 if `y` is negative, or at least the width."""
    bits = x.dtype.bits
    inside = (y >= 0) & (y < bits)
    # a shift by the width or more is undefined
    return k.select(inside, x << k.select(inside, y, 0), 0)


@k.inline
def shift_right(x: Any, y: Any) -> Any:
    """The bits of integers moved down; all are the sign if `y` is negative, or at least the width."""
    bits = x.dtype.bits
    inside = (y >= 0) & (y < bits)
    return k.select(inside, x >> k.select(inside, y, 0), k.select(x < 0, ~(x * 0), 0))


@k.inline
def unsigned_pow(x: Any, y: Any) -> Any:
    """Integer power by repeated squaring; wraps."""
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
    """Integer power; wraps. A negative power is 0, except for bases 1 and -1."""
    # where y is negative, some exponent that does not overflow: the power is not used
    power = unsigned_pow(x, k.select(y < 0, -(y + 1), y))
    odd = (y & 1) != 0
    unit = k.select(x == 1, 1, k.select(x == -1, k.select(odd, -1, 1), 0)) + x * 0
    return k.select(y < 0, unit, power)


@k.inline
def acos(x: Any) -> Any:
    """The arc cosine of `x`, clamped to [-1, 1]."""
    return k.acos(k.max(k.min(x, 1.0), -1.0))
