"""The sum over devices."""

from __future__ import annotations

from collections.abc import Iterable

from max.graph.ops._collective import stage_collective
from max.graph.value import BufferValue, TensorValue

__all__ = ["sum"]


def sum(inputs: Iterable[TensorValue], signal_buffers: Iterable[BufferValue]) -> list[TensorValue]:
    """Adds tensors of several devices, and gives each device the sum.

    bfloat16 and float16 are added in float32 and rounded once.

    Args:
        inputs: A tensor a device, of one shape and dtype.
        signal_buffers: A uint8 buffer a device for their synchronisation, in the same order; CPU
            devices share their memory and leave it as it is.

    Returns:
        The sum on the device of each input.

    Raises:
        ValueError: No input, two on one device, other numbers of buffers, shapes that differ.
        TypeError: Dtypes that differ, or bool.
    """
    return stage_collective("allreduce", inputs, signal_buffers)
