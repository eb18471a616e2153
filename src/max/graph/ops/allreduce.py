"""Sum across devices."""

from __future__ import annotations

from collections.abc import Iterable

from max.graph.ops.devices.collectives import stage_collective
from max.graph.value import BufferValue, TensorValue

__all__ = ["sum"]


def sum(inputs: Iterable[TensorValue], signal_buffers: Iterable[BufferValue]) -> list[TensorValue]:
    """Adds one tensor per device and leaves the sum on every device.

    Floats narrower than 32 bits are accumulated in float32 and rounded once.

    Args:
        inputs: One tensor per device, of equal shape and dtype.
        signal_buffers: One uint8 buffer per device for synchronization, in the same order. CPU devices do not write
            them.

    Returns:
        The sum, once on the device of each input.

    Raises:
        ValueError: There is no input, two inputs share a device, the number of buffers or the shapes differ.
        TypeError: The dtypes differ, or are bool.
    """
    return stage_collective("allreduce", inputs, signal_buffers)
