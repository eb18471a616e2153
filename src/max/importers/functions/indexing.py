"""Gathers along an axis, sequences in reverse order, and padding."""

from __future__ import annotations

from typing import Any

from max.dtype import DType
from max.graph import Dim, TensorValue, ops
from max.importers.errors import Unsupported

__all__ = ["gather_along", "pad_axes", "positive", "reverse_by_length"]


def positive(indices: TensorValue, size: Dim) -> TensorValue:
    """Indices as they are counted from 0."""
    if not indices.dtype.is_integral():
        raise Unsupported(f"the indices are {indices.dtype.name}, expected integers")
    if indices.dtype.is_unsigned_integral():
        return indices
    wide = ops.cast(indices, DType.int64)
    return ops.where(wide < 0, wide + size, wide)


def gather_along(x: TensorValue, indices: TensorValue, axis: int) -> TensorValue:
    """The elements at the places of the indices, whose index along an axis is replaced."""
    places = _places(indices, axis)
    return ops.gather_nd(x, places)


def _places(indices: TensorValue, axis: int) -> TensorValue:
    """For each index the coordinates of the element that it means: its own, but along the axis."""
    parts = []
    for other, size in enumerate(indices.shape):
        if other == axis:
            part = indices
        else:
            line = ops.range(0, size, 1, dtype=DType.int64, device=indices.device)
            shape = [size if i == other else Dim(1) for i in range(indices.rank)]
            part = ops.broadcast_to(ops.reshape(line, shape), indices.shape)
        parts.append(ops.unsqueeze(ops.cast(part, DType.int64), -1))
    return ops.concat(parts, -1)


def reverse_by_length(x: TensorValue, lengths: TensorValue, time: int, batch: int) -> TensorValue:
    """The tensor whose first elements along the time axis, as many as a sequence's length, are in reverse order."""
    size = x.shape[time]
    line = ops.range(0, size, 1, dtype=DType.int64, device=x.device)
    line = ops.reshape(line, [size if i == time else Dim(1) for i in range(x.rank)])
    rows = [x.shape[batch] if i == batch else Dim(1) for i in range(x.rank)]
    length = ops.reshape(ops.cast(lengths, DType.int64), rows)
    places = ops.where(line < length, length - 1 - line, line)
    return gather_along(x, ops.broadcast_to(places, x.shape), time)


def pad_axes(x: TensorValue, pairs: list[tuple[int, int]], mode: str, value: Any) -> TensorValue:
    """A tensor with elements added around it, or cut off where an amount is negative."""
    if any(amount < 0 for pair in pairs for amount in pair):
        index = tuple(
            slice(max(-before, 0), min(after, 0) if after < 0 else None) for before, after in pairs
        )
        x = x[index]
        pairs = [(max(before, 0), max(after, 0)) for before, after in pairs]
    if mode == "wrap":
        return _wrap_around(x, pairs)
    if mode not in ("constant", "reflect", "edge"):
        raise Unsupported(f"the mode is {mode!r}")
    flat = [amount for pair in pairs for amount in pair]
    if x.dtype is DType.bool:
        return ops.cast(ops.pad(ops.cast(x, DType.uint8), flat, mode, int(value)), DType.bool)
    return ops.pad(x, flat, mode, value if x.dtype.is_float() else int(value))


def _wrap_around(x: TensorValue, pairs: list[tuple[int, int]]) -> TensorValue:
    for axis, (before, after) in enumerate(pairs):
        if before or after:
            size = x.shape[axis]
            line = ops.range(
                -before, size + after, 1, size + before + after, dtype=DType.int64, device=x.device
            )
            x = ops.gather(x, ops.mod(line, TensorValue(size)), axis)
    return x
