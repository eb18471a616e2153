"""Bounds of the elements of values in a region: finite numbers between two others, or unknown."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from xdsl.ir import BlockArgument, SSAValue

from max._compiler.mok import BodyOp
from max._compiler.passes.base import constant_of
from max.dtype import DType
from max.mlir import MoOp, ShapedType
from max.mlir.ops.elementwise import (
    AddOp,
    CastOp,
    DivOp,
    MaxOp,
    MinOp,
    MulOp,
    RoundOp,
    SelectOp,
    SubOp,
)

__all__ = ["Bounds", "integer_range"]

Interval = tuple[float, float]

LARGEST = 2.0**100
"""Magnitudes up to this are followed: products of them and a few rounding errors are finite in float32."""
MOST_ELEMENTS = 1 << 16
"""The most elements of a constant that are looked at."""
ROUNDING = 1e-6
"""More than the relative error of a rounded float32."""


def integer_range(dtype: DType) -> Interval | None:
    """The least and greatest element of an integer type or of `bool`; None for floats."""
    if dtype is DType.bool:
        return 0, 1
    if dtype.is_float():
        return None
    info = np.iinfo(dtype.to_numpy())
    return int(info.min), int(info.max)


class Bounds:
    """Computes bounds; those of a value are kept.

    Args:
        region: The region whose values are asked for; the constants among its operands are known.
    """

    def __init__(self, region: BodyOp) -> None:
        self._region = region
        self._known: dict[SSAValue, Interval | None] = {}

    def of(self, value: SSAValue) -> Interval | None:
        """The bounds of all elements of a value; None: they are unknown, or elements may be NaN or infinite."""
        if value not in self._known:
            self._known[value] = self._in_type(value)
        return self._known[value]

    def _in_type(self, value: SSAValue) -> Interval | None:
        type_ = value.type
        if not isinstance(type_, ShapedType):
            return None
        found, whole = self._of_result(value), integer_range(type_.dtype)
        if whole is not None:
            # floats are cut to integers, sums of integers wrap
            low, high = found or whole
            low, high = math.floor(low), math.ceil(high)
            return (low, high) if whole[0] <= low and high <= whole[1] else whole
        if found is None or type_.dtype is not DType.float32:
            return None
        low, high = found
        if type(value.owner) in _ROUNDED:
            low, high = low - ROUNDING * abs(low), high + ROUNDING * abs(high)
        # of NaN and infinities it is false
        return (low, high) if max(-low, high) <= LARGEST else None

    def _of_result(self, value: SSAValue) -> Interval | None:
        """The bounds before they are rounded, or wrap."""
        if isinstance(value, BlockArgument):
            return (
                # an argument of the region stands for the operand of the same index
                _of_constant(self._region.operands[value.index])
                if value.block is self._region.block
                else None
            )
        op = value.owner
        if not isinstance(op, MoOp):
            return None
        if op.spec.view:
            (source,) = op.operands
            return self.of(source)
        if constant_of(op) is not None:
            return _of_constant(value)
        rule = _RULES.get(type(op))
        if rule is None:
            return None
        parts = [self.of(operand) for operand in op.operands]
        known = [part for part in parts if part is not None]
        return rule(*known) if len(known) == len(parts) else None


def _of_constant(value: SSAValue) -> Interval | None:
    """The least and greatest element of a constant; they may be NaN or infinite."""
    array = constant_of(value.owner)
    if array is None or not 0 < array.size <= MOST_ELEMENTS:
        return None
    return float(array.min()), float(array.max())


def _sum(a: Interval, b: Interval) -> Interval:
    return a[0] + b[0], a[1] + b[1]


def _difference(a: Interval, b: Interval) -> Interval:
    return a[0] - b[1], a[1] - b[0]


def _product(a: Interval, b: Interval) -> Interval:
    # signs are unknown: each extreme is the product of two ends
    ends = [x * y for x in a for y in b]
    return min(ends), max(ends)


def _quotient(a: Interval, b: Interval) -> Interval | None:
    # a divisor that may be 0 has no bounds; 1 / x falls, so the ends swap
    return None if b[0] <= 0 <= b[1] else _product(a, (1 / b[1], 1 / b[0]))


def _greater(a: Interval, b: Interval) -> Interval:
    return max(a[0], b[0]), max(a[1], b[1])


def _less(a: Interval, b: Interval) -> Interval:
    return min(a[0], b[0]), min(a[1], b[1])


def _either(condition: Interval, a: Interval, b: Interval) -> Interval:
    return min(a[0], b[0]), max(a[1], b[1])


def _round_bounds(a: Interval) -> Interval:
    return math.floor(a[0]), math.ceil(a[1])


def _same_bounds(a: Interval) -> Interval:
    return a


_ROUNDED = (AddOp, SubOp, MulOp, DivOp, CastOp)
"""Ops whose results in float32 are rounded."""
_RULES: dict[type[MoOp], Callable[..., Interval | None]] = {
    AddOp: _sum,
    SubOp: _difference,
    MulOp: _product,
    DivOp: _quotient,
    MaxOp: _greater,
    MinOp: _less,
    RoundOp: _round_bounds,
    CastOp: _same_bounds,
    SelectOp: _either,
}
