"""The concatenation over devices."""

from __future__ import annotations

from collections.abc import Iterable

from max.graph.ops._collective import stage_collective
from max.graph.ops._stage import normalize_axis
from max.graph.value import BufferValue, TensorValue

__all__ = ["allgather"]


def allgather(
    inputs: Iterable[TensorValue], signal_buffers: Iterable[BufferValue], axis: int = 0
) -> list[TensorValue]:
    """Concatenates tensors of several devices, and gives each device the result.

    Args:
        inputs: A tensor a device, of one dtype, and of one shape but for `axis`.
        signal_buffers: A uint8 buffer a device for their synchronisation, in the same order; CPU
            devices share their memory and leave it as it is.
        axis: The axis; negative counts from the last.

    Returns:
        The concatenation on the device of each input.

    Raises:
        ValueError: No input, two on one device, other numbers of buffers, shapes that do not fit,
            or the axis is out of range.
        TypeError: Dtypes that differ.
    """
    tensors = list(inputs)
    rank = tensors[0].rank if tensors else 0
    attrs = {"axis": normalize_axis("allgather", axis, rank)} if tensors else {}
    return stage_collective("allgather", tensors, signal_buffers, attrs)
