"""Collectives: one tensor of each device, one result on each device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from max.graph import graph
from max.graph.ops.staging.stage import as_tensor, normalize_axis
from max.graph.value import BufferValue, TensorValue, tensor_of

__all__ = ["allgather", "stage_collective"]


def stage_collective(
    name: str,
    inputs: Iterable[TensorValue],
    signal_buffers: Iterable[BufferValue],
    attrs: Mapping[str, Any] | None = None,
) -> list[TensorValue]:
    """Stages a collective with one tensor, one signal buffer and one result per device.

    Raises:
        ValueError: There is no input, or the numbers of inputs and signal buffers differ.
    """
    tensors = [as_tensor(x) for x in inputs]
    buffers = list(signal_buffers)
    if not tensors:
        raise ValueError(f"{name}: no inputs; expected one a device")
    if len(buffers) != len(tensors):
        raise ValueError(
            f"{name}: {len(tensors)} inputs and {len(buffers)} signal buffers; expected a buffer "
            "for each input"
        )
    results = graph.Graph.current.stage_effect(f"mo.{name}", (*tensors, *buffers), attrs)
    return [tensor_of(result) for result in results]


def allgather(
    inputs: Iterable[TensorValue],
    signal_buffers: Iterable[BufferValue],
    axis: int = 0,
    group_size: int | None = None,
) -> list[TensorValue]:
    """Concatenates one tensor per device and leaves the result on every device.

    Args:
        inputs: One tensor per device, of equal dtype, and of equal shape except along `axis`.
        signal_buffers: One uint8 buffer per device for synchronization, in the same order. CPU devices do not write
            them.
        axis: The axis; negative counts from the last.
        group_size: The number of neighbors that exchange their tensors; None or 0: all of them.

    Returns:
        The concatenation of a group, once on the device of each of its inputs.

    Raises:
        ValueError: There is no input, two inputs share a device, the number of buffers differs, the shapes do not
            match, the axis is out of range, or `group_size` does not divide the number of inputs.
        TypeError: The dtypes differ.
    """
    tensors = list(inputs)
    buffers = list(signal_buffers)
    group = group_size or len(tensors)
    if tensors and (group < 1 or len(tensors) % group):
        raise ValueError(
            f"allgather: group_size is {group_size}, expected a divisor of {len(tensors)}, the number of inputs"
        )
    if len(tensors) > group and len(buffers) == len(tensors):
        return [
            gathered
            for begin in range(0, len(tensors), group)
            for gathered in allgather(
                tensors[begin : begin + group], buffers[begin : begin + group], axis
            )
        ]
    rank = tensors[0].rank if tensors else 0
    attrs = {"axis": normalize_axis("allgather", axis, rank)} if tensors else {}
    return stage_collective("allgather", tensors, buffers, attrs)
