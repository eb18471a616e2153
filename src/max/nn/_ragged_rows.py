"""Ops on rows of ragged batches: merging two batches, and setting elements to a constant."""

from __future__ import annotations

from max.dtype import DType
from max.graph import (
    BufferValue,
    BufferValueLike,
    DeviceRef,
    Dim,
    HasBufferValue,
    TensorValue,
    TensorValueLike,
    ops,
)
from max.graph.ops._stage import stage_declared


def merge_ragged_tensors(
    a: TensorValue, a_row_offsets: TensorValue, b: TensorValue, b_row_offsets: TensorValue
) -> tuple[TensorValue, TensorValue]:
    """Concatenates two ragged batches sequence by sequence: the rows of `a`, then those of `b`.

    Args:
        a: ``[a_rows, …]``.
        a_row_offsets: The first row of each sequence in `a`, ``[batch + 1]``.
        b: ``[b_rows, …]``, with the dtype and the other dimensions of `a`.
        b_row_offsets: The first row of each sequence in `b`, ``[batch + 1]``.

    Returns:
        The rows ``[a_rows + b_rows, …]``, and the first row of each sequence in them, ``[batch + 1]``.

    Raises:
        ValueError: A shape does not fit. Offsets must begin at 0, be non-decreasing and end at the number of rows;
            others raise when the graph runs.
        TypeError: The dtypes differ.
    """
    op = "merge_ragged_tensors"
    if a.rank < 1 or a.rank != b.rank or a.shape[1:] != b.shape[1:]:
        raise ValueError(f"{op}: {a!r} and {b!r}; expected equal sizes but for the rows")
    if a.dtype is not b.dtype:
        raise TypeError(f"{op}: {a!r} and {b!r}; expected one dtype")
    if a_row_offsets.rank != 1 or a_row_offsets.shape != b_row_offsets.shape:
        raise ValueError(
            f"{op}: the offsets are {a_row_offsets!r} and {b_row_offsets!r}; expected vectors of "
            "one size"
        )
    a_row_offsets = _checked_offsets(f"{op}: a_row_offsets", a_row_offsets, a)
    b_row_offsets = _checked_offsets(f"{op}: b_row_offsets", b_row_offsets, b)
    a_bounds, b_bounds = (ops.cast(o, DType.int64) for o in (a_row_offsets, b_row_offsets))
    a_places = _shifted_rows(a.shape[0], a_bounds, b_bounds[:-1], a.device)
    b_places = _shifted_rows(b.shape[0], b_bounds, a_bounds[1:], a.device)
    places = ops.concat([a_places, b_places])
    total = a.shape[0] + b.shape[0]
    rows = ops.concat([a, b])
    # invert the permutation: from the target of each source row to the source of each target row
    order = ops.scatter_nd(
        ops.broadcast_to(ops.constant(0, DType.int64, a.device), [total]),
        ops.range(0, TensorValue(total), 1, out_dim=total, dtype=DType.int64, device=a.device),
        ops.reshape(places, [total, 1]),
    )
    return ops.gather(rows, order, axis=0), a_row_offsets + b_row_offsets


def _checked_offsets(what: str, offsets: TensorValue, rows: TensorValue) -> TensorValue:
    """Adds a run-time check to row offsets."""
    return stage_declared("check.offsets", [offsets, TensorValue(rows.shape[0])], {"what": what})[0]


def _shifted_rows(
    count: Dim, bounds: TensorValue, shifts: TensorValue, device: DeviceRef
) -> TensorValue:
    """Adds the shift of its sequence to the index of each row."""
    rows = ops.range(0, TensorValue(count), 1, out_dim=count, dtype=DType.int64, device=device)
    ends = ops.reshape(bounds[1:], [1, bounds.shape[0] - 1])
    passed = ops.cast(ops.reshape(rows, [count, 1]) >= ends, DType.int64)
    sequence = ops.reshape(ops.sum(passed, axis=1), [count])
    return rows + ops.gather(shifts, sequence, axis=0)


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
