"""Reductions over several axes, and axes that are dropped or reversed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from max.graph import TensorValue, ops

__all__ = ["Reduction", "drop_axes", "over", "reversed_along"]

Reduction = Callable[[TensorValue, int], TensorValue]


def over(x: TensorValue, axes: list[int], reduction: Reduction) -> TensorValue:
    """A reduction over several axes, which stay with size 1. Adjacent ones become one axis, for one pass."""
    axes = sorted(axes)
    while axes:
        last = first = axes.pop()
        while axes and axes[-1] == first - 1:
            first = axes.pop()
        shape = x.shape
        if last > first:
            merged = math.prod(shape[first : last + 1], start=1)
            x = ops.reshape(x, [*shape[:first], merged, *shape[last + 1 :]])
        x = reduction(x, first)
        if last > first:
            x = ops.reshape(x, [*shape[:first], *[1] * (last + 1 - first), *shape[last + 1 :]])
    return x


def drop_axes(x: TensorValue, axes: list[int]) -> TensorValue:
    """The tensor without axes of size 1."""
    return ops.reshape(x, [dim for axis, dim in enumerate(x.shape) if axis not in axes])


def reversed_along(x: TensorValue, axis: int) -> TensorValue:
    """The tensor with an axis in reverse order."""
    index: list[Any] = [slice(None)] * x.rank
    index[axis] = slice(None, None, -1)
    return x[tuple(index)]
