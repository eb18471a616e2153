"""Types of eager tensors, interned."""

from __future__ import annotations

from typing import Any

from max import driver
from max._host.process_caches import process_cache
from max.dtype import DType
from max.graph import DeviceRef, Dim

__all__ = ["CellType", "Kind", "cell_type", "type_of"]

_TYPES = 1 << 16
"""The maximum number of interned types."""


Kind = tuple[DType, int, DeviceRef]
"""A type without sizes: dtype, rank and device."""


class CellType:
    """The type of a cell. Equal types are one object, so that they compare and hash by identity."""

    __slots__ = ("device", "dims", "dtype", "shape")

    def __init__(self, dtype: DType, shape: tuple[int, ...], device: DeviceRef) -> None:
        self.dtype, self.shape, self.device = dtype, shape, device
        self.dims = tuple([Dim(size) for size in shape])

    @property
    def kind(self) -> Kind:
        """The type without the sizes: dtype, rank and device."""
        return self.dtype, len(self.shape), self.device


_types: dict[tuple[DType, tuple[int, ...], DeviceRef], CellType] = process_cache({})


def cell_type(dtype: DType, shape: tuple[int, ...], device: DeviceRef) -> CellType:
    """The type of a dtype, sizes and device."""
    key = (dtype, shape, device)
    cell_type = _types.get(key)
    if cell_type is None:
        if len(_types) >= _TYPES:
            # types in use stay alive; a later object for an equal type only costs look-ups that miss
            _types.clear()
        cell_type = _types.setdefault(key, CellType(dtype, shape, device))
    return cell_type


_cpu = DeviceRef.CPU()


def type_of(storage: driver.Tensor) -> CellType:
    """The type of a tensor in memory."""
    device: Any = storage.device
    ref = _cpu if device.is_host and device.id == 0 else DeviceRef.from_device(device)
    return cell_type(storage.dtype, storage.shape, ref)
