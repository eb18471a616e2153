"""Concatenation across devices."""

from __future__ import annotations

from collections.abc import Iterable

from max.graph.ops._collective import stage_collective
from max.graph.ops._stage import normalize_axis
from max.graph.value import BufferValue, TensorValue

__all__ = ["allgather"]


def allgather(
    inputs: Iterable[TensorValue], signal_buffers: Iterable[BufferValue], axis: int = 0
) -> list[TensorValue]:
    """Concatenates one tensor per device and leaves the result on every device.

    Args:
        inputs: One tensor per device, of equal dtype, and of equal shape except along `axis`.
        signal_buffers: One uint8 buffer per device for synchronisation, in the same order. CPU devices do not write
            them.
        axis: The axis; negative counts from the last.

    Returns:
        The concatenation, once on the device of each input.

    Raises:
        ValueError: There is no input, two inputs share a device, the number of buffers differs, the shapes do not
            match, or the axis is out of range.
        TypeError: The dtypes differ.
    """
    tensors = list(inputs)
    rank = tensors[0].rank if tensors else 0
    attrs = {"axis": normalize_axis("allgather", axis, rank)} if tensors else {}
    return stage_collective("allgather", tensors, signal_buffers, attrs)
