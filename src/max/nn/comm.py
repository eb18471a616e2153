"""Communication between the devices of a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from max._names import lazy_names
from max.driver import CPU, Accelerator, Device, Tensor, accelerator_count
from max.dtype import DType
from max.graph import BufferType, BufferValue, DeviceRef, TensorValue, ops
from max.nn.layer import Module

__all__ = ["Allreduce", "Signals"]


class Allreduce(Module):
    """Adds the tensors of several devices, and gives each device the sum.

    Args:
        num_accelerators: The number of devices that take part. If the machine has fewer accelerators, virtual CPU
            devices are used instead.

    Raises:
        ValueError: `num_accelerators` is less than 1.
    """

    devices: Sequence[Device]
    """The devices that take part."""

    def __init__(self, num_accelerators: int) -> None:
        if num_accelerators < 1:
            raise ValueError(
                f"Allreduce: num_accelerators is {num_accelerators}, expected 1 or more"
            )
        on_accelerators = accelerator_count() >= num_accelerators
        self.devices = [
            Accelerator(i) if on_accelerators else CPU(i) for i in range(num_accelerators)
        ]

    def __call__(
        self, inputs: Iterable[TensorValue], signal_buffers: Iterable[BufferValue]
    ) -> list[TensorValue]:
        """The sum on each device.

        Args:
            inputs: One tensor per device, of one shape and dtype.
            signal_buffers: One signal buffer per device, in the same order; see `Signals`.

        Raises:
            ValueError: The number of inputs differs from the number of devices, or their shapes or dtypes differ.
        """
        tensors = list(inputs)
        if len(tensors) != len(self.devices):
            raise ValueError(f"Allreduce: {len(tensors)} inputs for {len(self.devices)} devices")
        return ops.allreduce.sum(tensors, signal_buffers)


class Signals:
    """The buffers that devices use to synchronize collectives.

    CPU devices share memory and never access the buffers, so the buffers reserve address space but occupy no memory.

    Args:
        devices: The devices that take part.

    Raises:
        ValueError: There is no device, or a device is repeated.
    """

    NUM_BYTES = 537919488
    """The size of a buffer."""

    devices: list[DeviceRef]
    """The devices that take part."""

    def __init__(self, devices: Iterable[DeviceRef]) -> None:
        self.devices = list(devices)
        if not self.devices:
            raise ValueError("Signals: no device is given")
        if len(set(self.devices)) != len(self.devices):
            raise ValueError(
                f"Signals: the devices are {', '.join(map(str, self.devices))}; expected each once"
            )

    def buffers(self) -> list[Tensor]:
        """New buffers, one per device, for the inputs of a model."""
        return [
            Tensor(DType.uint8, [self.NUM_BYTES], device.to_device()) for device in self.devices
        ]

    def input_types(self) -> list[BufferType]:
        """The types of the graph inputs for these buffers."""
        return [BufferType(DType.uint8, [self.NUM_BYTES], device) for device in self.devices]


__getattr__ = lazy_names(__name__)
