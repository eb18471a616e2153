"""Meshes of devices and how tensors are placed on them: plain data, of which tensors here take meshes of one device."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import Any, Self

from max.driver import Device
from max.experimental.tensors.defaults import DEFAULT_DEVICE

__all__ = [
    "ConversionError", "DeviceMapping", "DeviceMesh", "Partial", "Placement", "Replicated", "Sharded", "ShardingError",
    "Unknown", "default_mesh", "mapping_of",
]  # fmt: skip


class ShardingError(RuntimeError):
    """A tensor cannot be placed as it was asked for."""


class ConversionError(Exception):
    """A mapping has no placements."""


@dataclass(frozen=True)
class DeviceMesh:
    """A grid of devices with named axes.

    Tensors are on one device: they take a mesh of one device as that device. Others are data only.

    Args:
        devices: The devices, the last axis fastest.
        mesh_shape: The number of devices along each axis.
        axis_names: The name of each axis.

    Raises:
        ValueError: There is no device, the numbers do not fit together, or a name occurs twice.
        TypeError: A device is no `Device`.
    """

    devices: tuple[Device, ...]
    mesh_shape: tuple[int, ...]
    axis_names: tuple[str, ...]

    def __post_init__(self) -> None:
        for name in ("devices", "mesh_shape", "axis_names"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not self.devices:
            raise ValueError("DeviceMesh: there are no devices, expected one or more")
        for device in self.devices:
            if not isinstance(device, Device):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(f"DeviceMesh: {device!r} is no device of max.driver")
        if min(self.mesh_shape, default=0) < 1 or math.prod(self.mesh_shape) != len(self.devices):
            raise ValueError(
                f"DeviceMesh: {len(self.devices)} devices and the shape {self.mesh_shape}"
            )
        if len(self.axis_names) != len(self.mesh_shape) or len(set(self.axis_names)) != len(
            self.axis_names
        ):
            raise ValueError(
                f"DeviceMesh: the names {self.axis_names} of the shape {self.mesh_shape}; expected a name of its own "
                "for each axis"
            )

    @staticmethod
    def single(device: Device) -> DeviceMesh:
        """The mesh of one device, whose axis has the name ``_``.

        Args:
            device: The device.
        """
        return DeviceMesh((device,), (1,), ("_",))

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.mesh_shape)

    @property
    def num_devices(self) -> int:
        """The number of devices."""
        return len(self.devices)

    def _axes(self, axis: str | int | Sequence[str | int]) -> list[int]:
        axes: list[int] = []
        for entry in [axis] if isinstance(axis, str | int) else axis:
            if isinstance(entry, str):
                if entry not in self.axis_names:
                    raise ValueError(f"DeviceMesh: no axis {entry!r}; there are {self.axis_names}")
                axes.append(self.axis_names.index(entry))
            elif not 0 <= entry < self.ndim:
                raise IndexError(f"DeviceMesh: axis {entry} of a mesh of {self.ndim} axes")
            else:
                axes.append(entry)
        return axes

    def axis_size(self, axis: str | int | Sequence[str | int]) -> int:
        """The number of devices along an axis, or along several.

        Args:
            axis: Names or numbers of axes.

        Raises:
            ValueError: There is no axis of a name.
            IndexError: There is no axis of a number.
        """
        return math.prod(self.mesh_shape[index] for index in self._axes(axis))

    def device_coord(self, device_idx: int, axis: str | int | Sequence[str | int]) -> int:
        """The place of a device along an axis, or along several, the last fastest.

        Args:
            device_idx: The number of the device.
            axis: Names or numbers of axes.

        Raises:
            ValueError: There is no axis of a name.
            IndexError: There is no device or axis of a number.
        """
        if not 0 <= device_idx < self.num_devices:
            raise IndexError(
                f"DeviceMesh: device {device_idx} of a mesh of {self.num_devices} devices"
            )
        place = 0
        for index in self._axes(axis):
            size = self.mesh_shape[index]
            inner = math.prod(self.mesh_shape[index + 1 :])
            place = place * size + device_idx // inner % size
        return place

    def one_device(self) -> Device:
        """The device of a mesh of one.

        Raises:
            ShardingError: The mesh has several devices.
        """
        if self.num_devices > 1:
            raise ShardingError(
                f"{self!r} has {self.num_devices} devices, and a tensor is on one; modules of max.nn are split by "
                "max.graph.ShardingStrategy"
            )
        return self.devices[0]

    def __repr__(self) -> str:
        sizes = zip(self.axis_names, self.mesh_shape, strict=True)
        return f"DeviceMesh({', '.join(f'{name}={size}' for name, size in sizes)})"


class Placement(ABC):
    """What an axis of a mesh does to a tensor."""

    def localized_axis(self) -> int | None:
        """The axis of the tensor that is split; None if none is."""
        return None

    @abstractmethod
    def __repr__(self) -> str: ...


@dataclass(frozen=True, repr=False)
class Replicated(Placement):
    """Each device has the whole tensor."""

    def __repr__(self) -> str:
        return "Replicated()"


@dataclass(frozen=True, repr=False)
class Sharded(Placement):
    """Each device has a part of the tensor.

    Args:
        axis: The axis of the tensor that is split.
    """

    axis: int

    def localized_axis(self) -> int | None:
        """The axis that is split."""
        return self.axis

    def __repr__(self) -> str:
        return f"Sharded(axis={self.axis})"


@dataclass(frozen=True, repr=False)
class Partial(Placement):
    """The tensor is the sum of what the devices have."""

    def __repr__(self) -> str:
        return "Partial()"


@dataclass(frozen=True, repr=False)
class Unknown(Placement):
    """The devices have tensors of no known relation."""

    def __repr__(self) -> str:
        return "Unknown()"


@dataclass(frozen=True, repr=False)
class DeviceMapping:
    """How a tensor is placed on a mesh.

    Args:
        mesh: The mesh.
        placements: A placement for each axis of the mesh.

    Raises:
        ValueError: There are more or fewer placements than axes.
        TypeError: The mesh is no `DeviceMesh`, or a placement no `Placement`.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "placements", tuple(self.placements))
        if not isinstance(self.mesh, DeviceMesh):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"DeviceMapping: the mesh is {self.mesh!r}, expected a DeviceMesh")
        for placement in self.placements:
            if not isinstance(placement, Placement):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(
                    f"DeviceMapping: {placement!r} is no placement, such as Replicated()"
                )
        if len(self.placements) != self.mesh.ndim:
            raise ValueError(
                f"DeviceMapping: {len(self.placements)} placements for the {self.mesh.ndim} axes of {self.mesh}"
            )

    @classmethod
    def replicated(cls, mesh: DeviceMesh) -> Self:
        """The mapping that has the whole tensor on each device.

        Args:
            mesh: The mesh.
        """
        return cls(mesh, (Replicated(),) * mesh.ndim)

    @property
    def is_fully_replicated(self) -> bool:
        """Whether each device has the whole tensor."""
        return all(isinstance(placement, Replicated) for placement in self.placements)

    def check_shape(self, shape: Sized) -> None:
        """Checks that a tensor has the axes that are split.

        Args:
            shape: The shape of the tensor.

        Raises:
            ValueError: It lacks one of them.
        """
        for placement in self.placements:
            axis = placement.localized_axis()
            if axis is not None and not -len(shape) <= axis < len(shape):
                raise ValueError(f"{placement!r} of a tensor of rank {len(shape)}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.mesh!r}, {list(self.placements)!r})"

    def one_device(self) -> Device:
        """The device of a mesh of one.

        Raises:
            ShardingError: The mesh has several devices, or the only one would hold a part of a sum.
        """
        device = self.mesh.one_device()
        if any(isinstance(placement, Partial | Unknown) for placement in self.placements):
            raise ShardingError(
                f"{self!r}: a tensor on one device is whole, expected Replicated() or Sharded(axis)"
            )
        return device


def mapping_of(device: Device) -> DeviceMapping:
    """How a tensor on a device is placed on the mesh of that device: whole.

    Args:
        device: The device.
    """
    return DeviceMapping.replicated(DeviceMesh.single(device))


def default_mesh() -> DeviceMesh | None:
    """The mesh that `default_device` set; that of a device if it set one."""
    device: Any = DEFAULT_DEVICE.get()
    return DeviceMesh.single(device) if isinstance(device, Device) else device
