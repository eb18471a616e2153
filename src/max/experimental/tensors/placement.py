"""Where a tensor is: on one device, which programs may also name by a mesh of devices.

Meshes are forms that this package does not know. An object that stands for a device has `OnDevice.one_device`, a type
that states one has `Layout.local_types`.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from max.driver import Device
from max.graph import BufferType, DeviceRef, TensorType

__all__ = ["Layout", "OnDevice", "device_of"]


@runtime_checkable
class OnDevice(Protocol):
    """An object that stands for a device, such as a mesh of one."""

    def one_device(self) -> Device:
        """The device.

        Raises:
            RuntimeError: There are several.
        """
        ...


@runtime_checkable
class Layout(Protocol):
    """The type of a tensor, and where its parts are."""

    @property
    def local_types(self) -> list[TensorType | BufferType]:
        """The type of each part."""
        ...


def device_of(target: Any) -> Any:
    """The device that an object or a `DeviceRef` stands for; anything else as it is.

    Args:
        target: A device, a reference or an object that stands for one.

    Raises:
        RuntimeError: It stands for several devices.
    """
    if isinstance(target, Device):
        return target
    if isinstance(target, DeviceRef):
        return target.to_device()
    return target.one_device() if isinstance(target, OnDevice) else target
