"""Repetition of whole tensors (`tile`) and of each element along an axis (`repeat_interleave`)."""

from __future__ import annotations

from collections.abc import Iterable

from max import mlir
from max.dtype import DType
from max.graph.dim import Dim, DimLike
from max.graph.ops.creation.range import range
from max.graph.ops.movement.gather import gather
from max.graph.ops.movement.shape import broadcast_to, flatten, reshape, unsqueeze
from max.graph.ops.reductions.reduction import cumsum, sum
from max.graph.ops.staging.promotion import cast_to
from max.graph.ops.staging.stage import as_tensor, normalize_axis, stage_declared
from max.graph.shape import Shape
from max.graph.value import TensorValue, TensorValueLike

__all__ = ["repeat_interleave", "tile"]


def tile(x: TensorValueLike, repeats: Iterable[DimLike]) -> TensorValue:
    """Repeats a whole tensor along each axis.

    Args:
        x: The tensor.
        repeats: The number of repetitions of each axis.

    Returns:
        A tensor of the same dtype; axis i has size ``x.shape[i] * repeats[i]``.

    Raises:
        ValueError: The number of repeats differs from the rank, or one is negative.
    """
    tensor = as_tensor(x)
    shape = tensor.shape
    times = [Dim(r) for r in repeats]
    if len(times) != len(shape):
        raise ValueError(f"tile: {len(times)} repeats for a tensor of rank {len(shape)}")
    if any(r.expr.is_static and r.expr.value < 0 for r in times):
        raise ValueError(f"tile: the repeats {[str(r) for r in times]} must not be negative")
    # [1, d0, 1, d1, …] broadcasts to [r0, d0, r1, d1, …]
    split_shape = Shape(d for dim in shape for d in (1, dim))
    wide_shape = Shape(d for r, dim in zip(times, shape, strict=True) for d in (r, dim))
    final = Shape(r * dim for r, dim in zip(times, shape, strict=True))
    return reshape(broadcast_to(reshape(tensor, split_shape), wide_shape), final)


def repeat_interleave(
    x: TensorValueLike,
    repeats: int | TensorValue,
    axis: int | None = None,
    out_dim: DimLike | None = None,
) -> TensorValue:
    """Repeats each element along an axis.

    Args:
        x: The tensor.
        repeats: The number of repetitions: an int, or integers of rank 1, one for each element of the axis, or one for
            all elements. Negative elements of a tensor raise when the graph runs.
        axis: The axis; negative counts from the last. None flattens the tensor first.
        out_dim: The size of the axis in the result; required if `repeats` is a tensor other than a constant.

    Returns:
        A tensor of the same dtype, with the size of the axis multiplied, or `out_dim`.

    Raises:
        ValueError: `repeats` is not positive or of a wrong shape, the axis is out of range, or `out_dim` is missing.
    """
    tensor = as_tensor(x)
    if axis is None:
        tensor, axis = flatten(tensor), 0
    shape = tensor.shape
    index = normalize_axis("repeat_interleave", axis, len(shape))
    if isinstance(repeats, TensorValue):
        return _repeat_by_tensor(tensor, repeats, index, out_dim)
    if repeats < 1:
        raise ValueError(f"repeat_interleave: repeats is {repeats}, expected 1 or more")
    wide = unsqueeze(tensor, index + 1)
    wide = broadcast_to(wide, Shape([*shape[: index + 1], repeats, *shape[index + 1 :]]))
    return reshape(wide, Shape([*shape[:index], shape[index] * repeats, *shape[index + 1 :]]))


def _sum_of_constant(repeats: TensorValue, size: Dim) -> Dim:
    op = repeats.to_mlir().owner
    if not isinstance(op, mlir.MoOp) or op.name != "mo.constant":
        raise ValueError(
            "repeat_interleave: repeats is a tensor; set out_dim, the size of the result"
        )
    counts = op.attr("value")
    if (counts < 0).any():
        raise ValueError(f"repeat_interleave: repeats are {counts.tolist()}, expected 0 or more")
    return Dim(int(counts.sum())) if counts.size > 1 else size * int(counts.sum())


def _repeat_by_tensor(
    x: TensorValue, repeats: TensorValue, axis: int, out_dim: DimLike | None
) -> TensorValue:
    """Element i of the result is element j of `x`, for the smallest j with i < sum(repeats[:j + 1])."""
    size = x.shape[axis]
    if repeats.rank != 1 or not repeats.dtype.is_integral():
        raise ValueError(
            f"repeat_interleave: repeats is {repeats!r}, expected a vector of integers"
        )
    if out_dim is None:
        out_dim = _sum_of_constant(repeats, size)
    counts = cast_to(repeats, DType.int64).to(x.device)
    if counts.shape[0] == 1 and size != 1:
        counts = broadcast_to(counts, [size])
    if counts.shape[0] != size:
        raise ValueError(
            f"repeat_interleave: repeats has size {counts.shape[0]}, axis {axis} has {size}"
        )
    attrs = {"what": "repeat_interleave: repeats"}
    (counts,) = stage_declared("check.counts", [counts], attrs)
    total = Dim(out_dim)
    ends = cumsum(counts, axis=0)
    # a new symbol as out_dim is bound by the range
    last = reshape(sum(counts, axis=0), [])
    positions = range(0, last, 1, out_dim=total, dtype=DType.int64, device=x.device)
    # [total, size]: the runs that end at or before each position
    passed = reshape(positions, [total, 1]) >= reshape(ends, [1, size])
    return gather(x, reshape(sum(cast_to(passed, DType.int64), axis=1), [total]), axis)
