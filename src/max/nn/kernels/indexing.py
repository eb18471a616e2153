"""Writes to chosen elements or rows of a tensor or buffer."""

from __future__ import annotations

from max.dtype import DType
from max.graph import (
    BufferValue,
    BufferValueLike,
    Dim,
    DimLike,
    HasBufferValue,
    TensorValue,
    TensorValueLike,
    ops,
)

__all__ = [
    "ceildiv",
    "inplace_memcpy",
    "scatter_nd_skip_oob_indices",
    "scatter_set_constant",
    "sliced_add",
]


def scatter_set_constant(
    data: BufferValue | HasBufferValue, indices: TensorValueLike, fill_val: float
) -> None:
    """Sets elements of a buffer to a number.

    Args:
        data: ``[rows, columns]``, changed in place.
        indices: Row and column of each element, int32 or int64 ``[n, 2]``.
        fill_val: The number.

    Raises:
        ValueError: A shape does not fit.
    """
    op = "scatter_set_constant"
    buffer: BufferValueLike = data
    tensor = ops.buffer_load(buffer)
    where = TensorValue(indices)
    if tensor.rank != 2 or where.rank != 2 or where.shape[1] != 2:
        raise ValueError(f"{op}: data {tensor!r} and indices {where!r}; expected rank 2 and [n, 2]")
    values = ops.broadcast_to(ops.constant(fill_val, tensor.dtype, tensor.device), [where.shape[0]])
    ops.buffer_store(buffer, ops.scatter_nd(tensor, values, where))


def inplace_memcpy(dst: BufferValue, src: TensorValue) -> None:
    """Copies a tensor to a buffer.

    Args:
        dst: The destination buffer.
        src: A tensor of the buffer's shape and dtype.

    Raises:
        ValueError: The shape or the dtype differs.
    """
    if dst.dtype is not src.dtype or dst.shape != src.shape:
        raise ValueError(
            f"inplace_memcpy: {src!r} is copied to {dst!r}, expected its shape and dtype"
        )
    ops.buffer_store(dst, src)


def sliced_add(x: TensorValue, y: TensorValue, lora_end_idx: TensorValue) -> TensorValue:
    """``x + y`` in the first `lora_end_idx` rows, `x` in the others.

    Args:
        x: ``[rows, …]``.
        y: A tensor of the shape and dtype of `x`.
        lora_end_idx: The number of rows that `y` is added to, an integer tensor of one element.

    Returns:
        A tensor of the type of `x`.

    Raises:
        ValueError: The shapes or dtypes of `x` and `y` differ, or `lora_end_idx` has more elements.
        TypeError: `lora_end_idx` is not an integer.
    """
    op = "sliced_add"
    if not x.rank or x.dtype is not y.dtype or x.shape != y.shape:
        raise ValueError(f"{op}: x is {x!r} and y {y!r}, expected one type of rank 1 or more")
    if not lora_end_idx.dtype.is_integral():
        raise TypeError(f"{op}: lora_end_idx is {lora_end_idx!r}, expected an integer")
    end = ops.reshape(ops.cast(lora_end_idx, DType.int64).to(x.device), [])
    rows = x.shape[0]
    numbers = ops.range(0, TensorValue(rows), 1, out_dim=rows, dtype=DType.int64, device=x.device)
    # [rows, 1, …]
    added = ops.reshape(ops.greater(end, numbers), [rows, *([1] * (x.rank - 1))])
    return ops.where(added, x + y, x)


def scatter_nd_skip_oob_indices(
    input: TensorValueLike, updates: TensorValueLike, indices: TensorValueLike
) -> TensorValue:
    """`max.graph.ops.scatter_nd` that skips updates whose indices are out of range.

    Args:
        input: The tensor, of rank 1 or more.
        updates: The elements or slices to write.
        indices: Integers ``[…, depth]``: the first `depth` indices of each update; negative ones count from the end.

    Returns:
        A tensor of the type of `input`.

    Raises:
        ValueError: A shape does not fit.
        TypeError: The indices are not integers.
    """
    op = "scatter_nd_skip_oob_indices"
    x, values, places = TensorValue(input), TensorValue(updates), TensorValue(indices)
    if not places.dtype.is_integral():
        raise TypeError(f"{op}: the indices are {places!r}, expected integers")
    depth = int(places.shape[-1]) if places.rank else 0
    if not 0 < depth <= x.rank:
        raise ValueError(f"{op}: the indices are {places!r}, expected […, 1 to {x.rank}]")
    sizes = ops.cast(ops.shape_to_tensor(x.shape[:depth]), DType.int64).to(x.device)
    wide = ops.cast(places, DType.int64)
    wide = ops.where(wide < 0, wide + sizes, wide)
    fits = ops.logical_and(ops.greater_equal(wide, 0), ops.greater(sizes, wide))
    inside = ops.greater(ops.min(ops.cast(fits, DType.int32), axis=-1), 0)
    # updates out of range write to an extra last row, which is cut off
    # the index of that row: [rows, 0, …]
    behind = ops.concat([sizes[:1], sizes[1:] * 0]) if depth > 1 else sizes
    wide = ops.where(inside, wide, behind)
    row = ops.broadcast_to(ops.constant(0, x.dtype, x.device), [1, *x.shape[1:]])
    written = ops.scatter_nd(ops.concat([x, row]), values, wide)
    return written[(slice(0, x.shape[0]), x.shape[0]),]


def ceildiv(n: DimLike, d: DimLike) -> Dim:
    """``n / d``, rounded up.

    Args:
        n: The dividend.
        d: The divisor.

    Raises:
        ZeroDivisionError: The divisor is 0.
    """
    divisor = Dim(d)
    return (Dim(n) + (divisor - 1)) // divisor
