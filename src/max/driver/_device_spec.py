"""Specifications of devices: they name a device without opening it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from max.driver._device import CPU, Accelerator, Device, accelerator_count

__all__ = ["DeviceSpec", "devices_exist", "load_device", "load_devices", "scan_available_devices"]


@dataclass(frozen=True)
class DeviceSpec:
    """Identifies a device by type and id, without opening it.

    Args:
        id: The device's id; -1 is the default device of the type.
        device_type: ``cpu`` or ``gpu``.
    """

    __module__ = "max.driver"

    id: int
    device_type: Literal["cpu", "gpu"] = "cpu"

    def __post_init__(self) -> None:
        if self.device_type not in ("cpu", "gpu"):
            raise ValueError(f"DeviceSpec: device_type {self.device_type!r} is not cpu or gpu")
        if type(self.id) is not int:
            raise TypeError(f"DeviceSpec: the id is {self.id!r}, expected an integer")
        if self.id < -1:
            raise ValueError(f"DeviceSpec: id {self.id} is not a device; expected -1, 0, 1, …")

    @staticmethod
    def cpu(id: int = -1) -> DeviceSpec:
        """The specification of a CPU device."""
        return DeviceSpec(id, "cpu")

    @staticmethod
    def accelerator(id: int = 0) -> DeviceSpec:
        """The specification of an accelerator."""
        return DeviceSpec(id, "gpu")


def devices_exist(devices: list[DeviceSpec]) -> bool:
    """Whether all of these devices exist."""
    count = accelerator_count()
    return all(spec.device_type == "cpu" or max(spec.id, 0) < count for spec in devices)


def load_devices(device_specs: list[DeviceSpec]) -> list[Device]:
    """Opens the devices, in the order of their specifications.

    Raises:
        ValueError: A device does not exist; the message names it and the available ones.
    """
    return [load_device(spec) for spec in device_specs]


def load_device(device_spec: DeviceSpec) -> Device:
    """Opens a device.

    Raises:
        ValueError: The device does not exist; the message names it and the available ones.
        TypeError: The argument is no `DeviceSpec`.
    """
    if not isinstance(device_spec, DeviceSpec):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"load_device: expected a DeviceSpec, got {type(device_spec).__name__}")
    device_type, id = device_spec.device_type, device_spec.id
    if not devices_exist([device_spec]):
        raise ValueError(
            f"load_devices: {device_type}:{id} does not exist; there are the CPU and {accelerator_count()} accelerators"
        )
    return CPU(id) if device_type == "cpu" else Accelerator(id)


def scan_available_devices() -> list[DeviceSpec]:
    """All accelerators; without one, the CPU."""
    count = accelerator_count()
    return [DeviceSpec.accelerator(i) for i in range(count)] or [DeviceSpec.cpu()]
