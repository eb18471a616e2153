"""Arguments of several functions of the array API."""

from __future__ import annotations

from copy import deepcopy

from max.experimental import functional as F
from max.experimental.tensor import Tensor

__all__ = [
    "Axis",
    "Scalar",
    "axes_of",
    "duplicate",
    "shape_of",
]

Axis = int | tuple[int, ...] | None
"""An axis, several, or all."""
Scalar = int | float | bool
"""A number of Python."""


def shape_of(x: Tensor) -> tuple[int, ...]:
    """The shape of a tensor, as integers."""
    return tuple(int(dim) for dim in x.shape)


def axes_of(x: Tensor, axis: Axis) -> tuple[int, ...]:
    """Axes as a tuple of numbers from 0."""
    if axis is None:
        return tuple(range(x.rank))
    return tuple(a % x.rank for a in (axis if isinstance(axis, tuple) else (axis,)))


def duplicate(x: Tensor) -> Tensor:
    """The elements in memory of their own: writes to one of the tensors do not change the other.

    Those of a tensor that is computed are copied at once, as other libraries may write to its memory.
    """
    return deepcopy(x) if x.real else F.reshape(x, list(x.shape))
