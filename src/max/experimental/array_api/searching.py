"""Indexing, searching, sorting."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any

from max.dtype import DType
from max.experimental import functional as F
from max.experimental.array_api.elementwise import isnan
from max.experimental.array_api.manipulation import moveaxis
from max.experimental.tensor import Tensor

__all__ = [
    "argmax",
    "argmin",
    "argsort",
    "nonzero",
    "searchsorted",
    "sort",
    "take",
    "take_along_axis",
]


def take(x: Tensor, indices: Tensor, /, *, axis: int | None = None) -> Tensor:
    """The parts of a tensor at indices along an axis."""
    return F.gather(x, indices, axis=0 if axis is None else axis)


def take_along_axis(x: Tensor, indices: Tensor, /, *, axis: int = -1) -> Tensor:
    """For each place of the other axes its own indices along an axis."""
    last = x.rank - 1
    values, places = moveaxis(x, axis, last), moveaxis(indices, axis, last)
    taken = F.gather_nd(values, places.unsqueeze(-1), batch_dims=last)
    return moveaxis(taken, last, axis)


def argmax(x: Tensor, /, *, axis: int | None = None, keepdims: builtins.bool = False) -> Tensor:
    """The indices of the first greatest elements."""
    return _index(F.argmax, x, axis, keepdims)


def argmin(x: Tensor, /, *, axis: int | None = None, keepdims: builtins.bool = False) -> Tensor:
    """The indices of the first smallest elements."""
    return _index(F.argmin, x, axis, keepdims)


def _index(op: Callable[..., Any], x: Tensor, axis: int | None, keepdims: builtins.bool) -> Tensor:
    if axis is None:
        result = op(x.reshape((-1,)), 0).reshape(())
        return result.reshape([1] * x.rank) if keepdims else result
    result = op(x, axis)
    return result if keepdims else result.squeeze(axis)


def argsort(
    x: Tensor, /, *, axis: int = -1, descending: builtins.bool = False, stable: builtins.bool = True
) -> Tensor:
    """The indices that sort along an axis."""
    # the op sorts along the first axis
    order = F.argsort(moveaxis(x, axis, 0), ascending=not descending)
    return moveaxis(order, 0, axis)


def sort(
    x: Tensor, /, *, axis: int = -1, descending: builtins.bool = False, stable: builtins.bool = True
) -> Tensor:
    """The elements in order along an axis."""
    return take_along_axis(x, argsort(x, axis=axis, descending=descending), axis=axis)


def nonzero(x: Tensor, /) -> tuple[Tensor, ...]:
    """For each axis the indices of the elements that are not 0; their number depends on the elements, so it is computed
    at once.
    """
    if not x.rank:
        raise ValueError("nonzero: the tensor has rank 0, expected an axis")
    indices = F.nonzero(x if x.dtype is DType.bool else F.not_equal(x, 0), "count")
    return tuple([indices[:, axis] for axis in range(x.rank)])


def searchsorted(
    x1: Tensor, x2: Any, /, *, side: str = "left", sorter: Tensor | None = None
) -> Tensor:
    """The indices at which `x2` would be inserted into `x1`, which is sorted: all pairs are compared.

    Args:
        x1: Values of rank 1 in ascending order.
        x2: Values.
        side: ``left`` of equal values, or ``right``.
        sorter: Indices that sort `x1`, which then may have any order.

    Raises:
        ValueError: Another side.
    """
    if side not in ("left", "right"):
        raise ValueError(f"searchsorted: the side is {side!r}, expected 'left' or 'right'")
    values = x1 if sorter is None else take(x1, sorter)
    x2 = x2 if isinstance(x2, Tensor) else Tensor.constant(x2, dtype=x1.dtype)
    places = x2.unsqueeze(-1)
    before = F.greater(places, values) if side == "left" else F.greater_equal(places, values)
    if x2.dtype.is_float():
        # NaNs are the greatest, as `sort` has them
        after = isnan(places)
        after = F.logical_and(after, F.logical_not(isnan(values))) if side == "left" else after
        before = F.logical_or(before, after)
    return F.sum(before.cast(DType.int64), -1).squeeze(-1)
