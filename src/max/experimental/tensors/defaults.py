"""The dtype and device of tensors that are created without one."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

from max.driver import CPU, Accelerator, Device, accelerator_count
from max.dtype import DType
from max.experimental.tensors.placement import OnDevice, device_of

__all__ = [
    "DEFAULT_DEVICE",
    "contextvar_context",
    "default_device",
    "default_dtype",
    "defaults",
    "defaults_like",
]

T = TypeVar("T")


class TypedTensor(Protocol):
    """An object with a dtype and a device."""

    @property
    def dtype(self) -> DType: ...

    @property
    def device(self) -> Device: ...


DEFAULT_DEVICE: ContextVar[Device | OnDevice | None] = ContextVar("default_device", default=None)
"""What `default_device` set."""
_DEFAULT_DTYPE: ContextVar[DType | None] = ContextVar("default_dtype", default=None)


@contextlib.contextmanager
def contextvar_context(var: ContextVar[T], value: T) -> Generator[T]:
    """Sets a context variable while a ``with`` block runs.

    Args:
        var: The variable.
        value: Its value in the block.
    """
    token = var.set(value)
    try:
        yield value
    finally:
        var.reset(token)


def default_device(device: Device | OnDevice) -> contextlib.AbstractContextManager[Any]:
    """Makes a device the default for tensors that are created in a ``with`` block.

    Args:
        device: The device, or a mesh of one device.

    Raises:
        ShardingError: The mesh has several devices.
    """
    # raises an error for several devices
    device_of(device)
    return contextvar_context(DEFAULT_DEVICE, device)


def default_dtype(dtype: DType) -> contextlib.AbstractContextManager[Any]:
    """Makes a dtype the default for tensors that are created in a ``with`` block.

    Args:
        dtype: The dtype.
    """
    return contextvar_context(_DEFAULT_DTYPE, dtype)


@contextlib.contextmanager
def defaults_like(like: TypedTensor) -> Generator[None]:
    """Makes the dtype and the device of a tensor the defaults in a ``with`` block.

    Args:
        like: The tensor.
    """
    with default_dtype(like.dtype), default_device(like.device):
        yield


def defaults(
    dtype: DType | None = None, device: Device | OnDevice | None = None
) -> tuple[DType, Device]:
    """The dtype and device of a new tensor.

    Args:
        dtype: The dtype, if given; else float32 on a CPU, bfloat16 on an accelerator.
        device: The device, or a mesh or mapping of one device, if given; else an accelerator where there is one, or the
            CPU.

    Raises:
        TypeError: An argument is not a dtype or device.
        ShardingError: A mesh has several devices.
    """
    if device is None:
        device = DEFAULT_DEVICE.get()
    if device is None:
        device = Accelerator() if accelerator_count() else CPU()
    device = device_of(device)
    if dtype is None:
        dtype = _DEFAULT_DTYPE.get()
    if not isinstance(device, Device):
        raise TypeError(f"the device is {device!r}, expected a max.driver.Device or a DeviceRef")
    if dtype is None:
        dtype = DType.float32 if device.is_host else DType.bfloat16
    if not isinstance(dtype, DType):
        raise TypeError(f"the dtype is {dtype!r}, expected a DType")
    return dtype, device
