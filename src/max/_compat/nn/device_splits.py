"""How batches and heads are split over devices."""

from __future__ import annotations

from collections.abc import Sequence

from max.dtype import DType
from max.graph import DeviceRef, Dim, StaticDim, TensorValue, ops

__all__ = ["num_heads_for_device", "split_batch", "split_batch_replicated"]


def split_batch(
    devices: Sequence[DeviceRef],
    input: TensorValue,
    input_row_offsets: TensorValue,
    data_parallel_splits: TensorValue,
) -> tuple[list[TensorValue], list[TensorValue]]:
    """Splits the rows and the row offsets of a batch by device.

    Device ``i`` has the sequences from ``data_parallel_splits[i]`` up to ``data_parallel_splits[i + 1]``.

    Args:
        devices: The devices.
        input: ``[rows, …]``, the rows of all sequences.
        input_row_offsets: The first row of each sequence, then the end of the last sequence, ``[batch + 1]``.
        data_parallel_splits: Integers ``[devices + 1]``, from 0 up to the number of sequences. Not read if there is one
            device.

    Returns:
        For each device, the rows ``[rows of the device, …]`` and the offsets, which begin at 0,
        ``[sequences of the device + 1]``. Their first dimensions are the symbols ``input_split_i`` and
        ``offset_split_i``; with one device, those of the batch.

    Raises:
        ValueError: A shape does not fit. Splits that do not partition the batch raise when the graph runs.
        TypeError: Offsets or splits are not integers.
    """
    count = len(devices)
    inputs, offsets = [input] * count, [input_row_offsets] * count
    return _split(
        "split_batch", devices, inputs, offsets, input_row_offsets, data_parallel_splits, "", 1
    )


def split_batch_replicated(
    devices: Sequence[DeviceRef],
    input: Sequence[TensorValue],
    input_row_offsets: Sequence[TensorValue],
    input_row_offsets_int64: TensorValue,
    data_parallel_splits: TensorValue,
    prefix: str = "",
    group_size: int = 1,
) -> tuple[list[TensorValue], list[TensorValue]]:
    """`split_batch` for a batch that is replicated on each device.

    Args:
        devices: The devices.
        input: The same ``[rows, …]`` on each device.
        input_row_offsets: The same offsets on each device.
        input_row_offsets_int64: The offsets, on the CPU.
        data_parallel_splits: Integers ``[devices / group_size + 1]``.
        prefix: The prefix of the names of the dimensions, separated by ``_``.
        group_size: The number of consecutive devices that get the same sequences; a divisor of the number of devices.

    Returns:
        See `split_batch`.

    Raises:
        ValueError: A shape or count does not fit. Splits that do not partition the batch raise when the graph runs.
        TypeError: Offsets or splits are not integers.
    """
    return _split(
        "split_batch_replicated", devices, input, input_row_offsets, input_row_offsets_int64, data_parallel_splits,
        f"{prefix}_" if prefix else "", group_size,
    )  # fmt: skip


def _split(
    op: str,
    devices: Sequence[DeviceRef],
    inputs: Sequence[TensorValue],
    offsets: Sequence[TensorValue],
    bounds: TensorValue,
    splits: TensorValue,
    prefix: str,
    group_size: int,
) -> tuple[list[TensorValue], list[TensorValue]]:
    """See `split_batch_replicated`; `bounds` are the offsets from which the rows of a device are computed."""
    count = len(devices)
    _check(op, count, inputs, [*offsets, bounds], splits, group_size)
    groups = count // group_size
    if groups == 1:
        pairs = zip(devices, inputs, offsets, strict=True)
        parts = [(rows.to(device), starts.to(device)) for device, rows, starts in pairs]
        return [rows for rows, _ in parts], [starts for _, starts in parts]
    host = DeviceRef.CPU()
    splits, bounds = (ops.cast(value.to(host), DType.int64) for value in (splits, bounds))
    ends: list[TensorValue] = [splits[i] for i in range(groups + 1)]
    first_rows = [bounds[end] for end in ends]
    rows_of: list[TensorValue] = []
    starts_of: list[TensorValue] = []
    for index, (device, rows, starts) in enumerate(zip(devices, inputs, offsets, strict=True)):
        group = index // group_size
        span = slice(first_rows[group], first_rows[group + 1])
        sequences = slice(ends[group], ends[group + 1] + 1)
        row_names = [Dim(f"{prefix}input_split_{other}") for other in range(group + 1)]
        start_names = [Dim(f"{prefix}offset_split_{other}") for other in range(group + 1)]
        count_rows, count_starts = row_names[-1], start_names[-1]
        if group == groups - 1:
            # the sizes of all parts add up to the batch
            count_rows = rows.shape[0] - sum(row_names[:-1], Dim(0))
            count_starts = starts.shape[0] - sum(start_names[:-1], Dim(0)) + group
        part = ops.rebind(rows[(span, count_rows), ...], [row_names[-1], *rows.shape[1:]])
        begins = ops.rebind(starts[(sequences, count_starts),], [start_names[-1]])
        begins = begins - ops.cast(first_rows[group], begins.dtype).to(begins.device)
        rows_of.append(part.to(device))
        starts_of.append(begins.to(device))
    return rows_of, starts_of


def _check(
    op: str,
    count: int,
    inputs: Sequence[TensorValue],
    offsets: Sequence[TensorValue],
    splits: TensorValue,
    group_size: int,
) -> None:
    """Checks the arguments of `split_batch_replicated`."""
    if not count or group_size < 1 or count % group_size:
        raise ValueError(
            f"{op}: {count} devices in groups of {group_size}; expected whole groups, one or more"
        )
    if len(inputs) != count or len(offsets) != count + 1:
        raise ValueError(
            f"{op}: {len(inputs)} inputs and {len(offsets) - 1} offsets, expected one for each of {count} devices"
        )
    for value in inputs:
        if value.rank < 1:
            raise ValueError(f"{op}: an input is {value!r}, expected rows")
    for value in (*offsets, splits):
        if not value.dtype.is_integral():
            raise TypeError(f"{op}: offsets or splits are {value!r}, expected integers")
        if value.rank != 1:
            raise ValueError(f"{op}: offsets or splits are {value!r}, expected rank 1")
    expected_size = count // group_size + 1
    size = splits.shape[0]
    if isinstance(size, StaticDim) and int(size) != expected_size and expected_size > 2:
        raise ValueError(
            f"{op}: data_parallel_splits has {size} elements, expected {expected_size}"
        )


def num_heads_for_device(*, num_heads: int, device_idx: int, num_devices: int) -> int:
    """The number of heads of one device: heads are divided evenly, and the first devices take the remainder.

    Args:
        num_heads: The number of all heads.
        device_idx: The index of the device.
        num_devices: The number of devices.

    Raises:
        ValueError: A number is negative, or there is no device.
        IndexError: The device index is out of range.
    """
    if num_heads < 0 or num_devices < 1:
        raise ValueError(
            f"num_heads_for_device: {num_heads} heads on {num_devices} devices, expected 0 or more on 1 or more"
        )
    if not 0 <= device_idx < num_devices:
        raise IndexError(f"num_heads_for_device: device {device_idx} of {num_devices}")
    each, left = divmod(num_heads, num_devices)
    return each + (device_idx < left)
