"""RoPE on ragged batches without a cache, by explicit positions."""

from __future__ import annotations

from max._errors import ArgumentError
from max.dtype import DType
from max.graph import StaticDim, TensorValue, ops
from max.nn._adapters import group_of_rows
from max.nn._operand_checks import check_operand

__all__ = ["rope_ragged", "rope_ragged_with_position_ids"]


def _rotated(
    op: str,
    input: TensorValue,
    freqs_cis: TensorValue,
    positions: TensorValue,
    interleaved: bool,
    rope_first: bool,
) -> TensorValue:
    """Rotates heads ``[rows, heads, head_dim]`` by the table rows at int64 positions ``[rows]``."""
    if input.rank != 3 or not isinstance(input.shape[2], StaticDim):
        raise ValueError(
            f"{op}: the input is {input!r}, expected [total_seq_len, n_heads, a number]"
        )
    if freqs_cis.rank != 2 or not isinstance(freqs_cis.shape[1], StaticDim):
        raise ValueError(f"{op}: freqs_cis is {freqs_cis!r}, expected [positions, a number]")
    size, width = int(input.shape[2]), int(freqs_cis.shape[1])
    if width % 2 or not 0 < width <= size:
        raise ValueError(
            f"{op}: freqs_cis is {freqs_cis!r}, expected an even number of columns up to {size}"
        )
    rows, heads, _ = input.shape
    table = ops.gather(ops.cast(freqs_cis, DType.float32), positions, axis=0)
    pairs = ops.reshape(table, [rows, 1, width // 2, 2])
    cosine, sine = pairs[..., 0], pairs[..., 1]
    begin = 0 if rope_first else size - width
    x = ops.cast(input[:, :, begin : begin + width], DType.float32)
    if interleaved:
        parts = ops.reshape(x, [rows, heads, width // 2, 2])
        a, b = parts[..., 0], parts[..., 1]
        rotated = ops.stack([a * cosine - b * sine, a * sine + b * cosine], axis=-1)
        rotated = ops.reshape(rotated, x.shape)
    else:
        a, b = x[:, :, : width // 2], x[:, :, width // 2 :]
        rotated = ops.concat([a * cosine - b * sine, a * sine + b * cosine], axis=-1)
    rotated = ops.cast(rotated, input.dtype)
    if width == size:
        return rotated
    unrotated = input[:, :, width:] if rope_first else input[:, :, :begin]
    return ops.concat([rotated, unrotated] if rope_first else [unrotated, rotated], axis=-1)


def rope_ragged(
    input: TensorValue,
    input_row_offsets: TensorValue,
    start_pos: TensorValue,
    freqs_cis: TensorValue,
    *,
    interleaved: bool = True,
    rope_first: bool = False,
    output_dtype: DType | None = None,
) -> TensorValue:
    """Rotates the heads of each token by its position in its sequence; computed in float32.

    Args:
        input: ``[total_seq_len, n_heads, head_dim]``.
        input_row_offsets: The first row of each sequence, uint32 ``[batch + 1]``.
        start_pos: The position of each sequence's first row, uint32 ``[batch]``.
        freqs_cis: Interleaved cosines and sines, one row per position; if it has fewer columns than `head_dim`, that
            number of elements of a head is rotated.
        interleaved: Whether the two elements of a rotated pair are adjacent; otherwise element i is paired with element
            ``i + columns / 2``.
        rope_first: If only a part of a head is rotated: whether it is the first elements instead of the last ones.
        output_dtype: The dtype of the result; by default that of the input. The result is rounded to the dtype of the
            input before the cast.

    Returns:
        The rotated heads, of the shape of the input. Rows past the last offset are undefined.

    Raises:
        ValueError: A shape does not fit. A position past the table raises when the graph runs.
        TypeError: A dtype does not fit.
    """
    op = "rope_ragged"
    check_operand(op, "input_row_offsets", input_row_offsets, DType.uint32, 1)
    check_operand(op, "start_pos", start_pos, DType.uint32, 1)
    rows = input.shape[0]
    # rows past the last offset get positions as if a sequence began there
    starts = ops.cast(start_pos, DType.int64)
    nothing = ops.constant([0], DType.int64, starts.device)
    begins = ops.cast(input_row_offsets, DType.int64)
    group = group_of_rows(rows, input_row_offsets)
    first = ops.gather(ops.concat([starts, nothing]), group, axis=0)
    begin = ops.gather(begins, group, axis=0)
    numbers = ops.range(
        0, TensorValue(rows), 1, out_dim=rows, dtype=DType.int64, device=input.device
    )
    rotated = _rotated(op, input, freqs_cis, first + numbers - begin, interleaved, rope_first)
    return rotated if output_dtype is None else ops.cast(rotated, output_dtype)


def rope_ragged_with_position_ids(
    input: TensorValue,
    freqs_cis: TensorValue,
    position_ids: TensorValue,
    *,
    mrope_section: list[int] | None = None,
    interleaved: bool = True,
) -> TensorValue:
    """Rotates the heads of each token by an explicit position; computed in float32.

    Args:
        input: ``[total_seq_len, n_heads, head_dim]``.
        freqs_cis: Interleaved cosines and sines, one row of `head_dim` numbers per position.
        position_ids: uint32 ``[total_seq_len]`` or ``[1, total_seq_len]``.
        mrope_section: Sections of positions; not supported yet.
        interleaved: Whether the two elements of a rotated pair are adjacent; otherwise element i is paired with element
            ``i + columns / 2``.

    Returns:
        The rotated heads, of the shape and dtype of the input.

    Raises:
        ValueError: A shape does not fit. A position past the table raises when the graph runs.
        TypeError: The positions are not uint32.
        NotImplementedError: `mrope_section` or positions of several sections are given.
    """
    op = "rope_ragged_with_position_ids"
    sections = position_ids.rank == 2 and position_ids.shape[0] != 1
    if mrope_section is not None or sections:
        raise NotImplementedError(
            f"{op}: a token has one position; mrope_section and position_ids {position_ids!r} have no kernel yet"
        )
    if position_ids.rank == 2:
        position_ids = position_ids[0]
    if position_ids.dtype is not DType.uint32:
        raise ArgumentError(f"{op}: position_ids is {position_ids!r}, expected uint32")
    if position_ids.rank != 1 or position_ids.shape[0] != input.shape[0]:
        raise ValueError(f"{op}: position_ids is {position_ids!r}, expected [{input.shape[0]}]")
    if freqs_cis.rank == 2 and input.rank == 3 and freqs_cis.shape[1] != input.shape[2]:
        raise ValueError(
            f"{op}: freqs_cis is {freqs_cis!r}, expected [positions, {input.shape[2]}]"
        )
    positions = ops.cast(position_ids, DType.int64)
    return _rotated(op, input, freqs_cis, positions, interleaved, rope_first=True)
