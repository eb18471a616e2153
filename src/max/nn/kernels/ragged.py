"""Rows of ragged batches: the sequence of each row, padded batches as ragged ones and back, two batches merged."""

from __future__ import annotations

from max.dtype import DType
from max.graph import (
    DeviceRef,
    Dim,
    Graph,
    TensorValue,
    ops,
)
from max.graph.ops.staging.stage import check_operand, stage_declared

__all__ = [
    "group_of_rows",
    "merge_ragged_tensors",
    "padded_rows",
    "ragged_rows",
]


def group_of_rows(rows: Dim, offsets: TensorValue) -> TensorValue:
    """The index of the group of each row, int64 ``[rows]``; for rows past the last offset, the number of groups.

    Args:
        rows: The number of rows.
        offsets: The first row of each group, then the end of the last group.
    """
    numbers = ops.range(
        0, TensorValue(rows), 1, out_dim=rows, dtype=DType.int64, device=offsets.device
    )
    ends = ops.unsqueeze(ops.cast(offsets[1:], DType.int64), 0)
    # [rows, groups]: the groups that end at or before each row
    passed = ops.cast(ops.greater_equal(ops.unsqueeze(numbers, 1), ends), DType.int64)
    return ops.reshape(ops.sum(passed, axis=1), [rows])


def _offsets(op: str, x: TensorValue, valid_lengths: TensorValue) -> TensorValue:
    """The first row of each sequence, int64 ``[batch + 1]``; lengths are clamped to that of the padded batch."""
    check_operand(op, "valid_lengths", valid_lengths, DType.uint32, 1)
    if x.rank < 2 or valid_lengths.shape[0] != x.shape[0]:
        raise ValueError(
            f"{op}: {x!r} and valid_lengths {valid_lengths!r}, expected [batch, seq_len, …] and [batch]"
        )
    lengths = ops.cast(valid_lengths, DType.int64)
    longest = ops.cast(TensorValue(x.shape[1]), DType.int64).to(x.device)
    # a length past the padded batch has no rows to read
    ends = ops.cumsum(ops.min(lengths, longest), axis=0)
    return ops.concat([ops.constant([0], DType.int64, x.device), ends])


def ragged_rows(
    op: str, x: TensorValue, valid_lengths: TensorValue
) -> tuple[TensorValue, TensorValue]:
    """Converts a padded batch ``[batch, seq_len, …]`` to a ragged one; returns its rows and row offsets.

    Args:
        op: The name of the op, for error messages.
        x: The padded batch.
        valid_lengths: The length of each sequence, uint32 ``[batch]``.

    Returns:
        The rows ``[rows, …]``, whose number is a new symbol, and the row offsets, uint32 ``[batch + 1]``.

    Raises:
        ValueError: A shape does not fit.
        TypeError: The lengths are not uint32.
    """
    offsets = _offsets(op, x, valid_lengths)
    batch, length = x.shape[:2]
    total = batch * length
    sequence = group_of_rows(total, offsets)
    inside = ops.range(0, TensorValue(total), 1, out_dim=total, dtype=DType.int64, device=x.device)
    # the index of each row in its sequence
    inside = inside - ops.gather(offsets, sequence, axis=0)
    size = ops.cast(TensorValue(length), DType.int64).to(x.device)
    source = sequence * size + inside
    # rows past the last sequence read row 0 and are cut off
    last = ops.cast(TensorValue(batch), DType.int64).to(x.device)
    source = ops.where(ops.equal(sequence, last), inside * 0, source)
    # the host needs the number of rows: it is the size of the result
    count = offsets[-1].to(DeviceRef.CPU())
    source = source[(slice(0, count), Graph.current.new_symbol("rows")),]
    rows = ops.gather(ops.reshape(x, [total, *x.shape[2:]]), source, axis=0)
    return rows, ops.cast(offsets, DType.uint32)


def padded_rows(
    op: str, rows: TensorValue, like: TensorValue, valid_lengths: TensorValue
) -> TensorValue:
    """Converts the rows of a ragged batch to a padded one, with zeros as padding; the inverse of `ragged_rows`.

    Args:
        op: The name of the op, for error messages.
        rows: ``[rows, …]``.
        like: The original padded batch, ``[batch, seq_len, …]``.
        valid_lengths: The length of each sequence, uint32 ``[batch]``.
    """
    batch, length = like.shape[:2]
    offsets = _offsets(op, like, valid_lengths)
    begins = ops.unsqueeze(offsets[:-1], 1)
    place = ops.range(
        0, TensorValue(length), 1, out_dim=length, dtype=DType.int64, device=rows.device
    )
    seen = ops.greater(ops.unsqueeze(ops.cast(valid_lengths, DType.int64), 1), place)
    seen = ops.rebind(seen, [batch, length])
    # padding reads the row of zeros appended to the rows
    source = ops.reshape(ops.where(seen, begins + place, offsets[-1]), [batch * length])
    zeros = ops.broadcast_to(ops.constant(0, rows.dtype, rows.device), [1, *rows.shape[1:]])
    chosen = ops.gather(ops.concat([rows, zeros]), source, axis=0)
    return ops.reshape(chosen, [batch, length, *rows.shape[1:]])


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
    # a sequence begins after all earlier rows of both; those of b begin after a's own rows, too
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
    # [count, batch]: the sequences that end at or before each row; their number is the row's sequence
    passed = ops.cast(ops.reshape(rows, [count, 1]) >= ends, DType.int64)
    sequence = ops.reshape(ops.sum(passed, axis=1), [count])
    return rows + ops.gather(shifts, sequence, axis=0)
