"""Exact conversions: which element types hold all values of another."""

from __future__ import annotations

from max.dtype import DType

__all__ = ["KEEPS", "holds"]

KEEPS = frozenset(
    {"neg", "abs", "relu", "max", "min", "select", "floor", "ceil", "round", "trunc", "reduce_max", "reduce_min"}
)  # fmt: skip
"""Nodes that keep exactness: if a dtype holds the operands, it holds the result."""

_FORMATS: dict[DType, tuple[int, int, int]] = {
    DType.float64: (53, 1024, -1074), DType.float32: (24, 128, -149),
    DType.bfloat16: (8, 128, -133), DType.float16: (11, 16, -24),
    DType.float8_e4m3fn: (4, 9, -9), DType.float8_e4m3fnuz: (4, 8, -10),
    DType.float8_e5m2: (3, 16, -16), DType.float8_e5m2fnuz: (3, 16, -17),
    DType.float6_e2m3fn: (4, 3, -3), DType.float6_e3m2fn: (3, 5, -4), DType.float4_e2m1fn: (2, 3, -1),
}  # fmt: skip
"""Per float: significant bits, an exclusive bound of the exponents, the exponent of the least subnormal."""
_WIDE = frozenset({DType.float64, DType.float32, DType.bfloat16, DType.float16})
"""Floats with infinities, NaN and a negative zero, which narrower floats may have."""


def holds(wide: DType, narrow: DType) -> bool:
    """Whether a conversion from `narrow` to the float `wide` is exact, NaN, infinities and signs of zero included."""
    if wide is narrow or narrow is DType.bool:
        return True
    if wide not in _WIDE:
        return False
    bits, max_exponent, min_exponent = _FORMATS[wide]
    if not narrow.is_float():
        # the least value of a signed type is a power of two
        return narrow.size_in_bits - narrow.is_signed_integral() <= bits
    inner = _FORMATS[narrow]
    return inner[0] <= bits and inner[1] <= max_exponent and inner[2] >= min_exponent
