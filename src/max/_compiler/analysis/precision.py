"""Exact conversions: which element types hold all values of another."""

from __future__ import annotations

from typing import Any, cast

import ml_dtypes

from max._host.process_caches import cached_results
from max.dtype import DType

__all__ = ["KEEPS", "holds"]

KEEPS = frozenset(
    {"neg", "abs", "relu", "max", "min", "select", "floor", "ceil", "round", "trunc", "reduce_max", "reduce_min"}
)  # fmt: skip
"""Nodes that keep exactness: if a dtype holds the operands, it holds the result."""

_WIDE = frozenset({DType.float64, DType.float32, DType.bfloat16, DType.float16})
"""Floats with infinities, NaN and a negative zero, which narrower floats may have."""


def _float_limits(dtype: DType) -> Any:
    return cast("Any", ml_dtypes.finfo)(dtype.to_numpy())


@cached_results()
def holds(wide: DType, narrow: DType) -> bool:
    """Whether a conversion from `narrow` to the float `wide` is exact, NaN, infinities and signs of zero included."""
    if wide is narrow or narrow is DType.bool:
        return True
    if wide not in _WIDE:
        return False
    outer = _float_limits(wide)
    if not narrow.is_float():
        # the least value of a signed type is a power of two
        return narrow.size_in_bits - narrow.is_signed_integral() <= outer.nmant + 1
    inner = _float_limits(narrow)
    return (
        inner.nmant <= outer.nmant
        and float(inner.max) <= float(outer.max)
        and float(inner.smallest_subnormal) >= float(outer.smallest_subnormal)
    )
