"""The memory of a tensor: its address and owner, how elements lie in it, and its device."""

from __future__ import annotations

import math
from enum import Flag
from typing import Self

from max.driver._arguments import target_of
from max.driver._device import Device, DeviceStream
from max.driver._indexing import contiguous_strides, is_contiguous
from max.driver._shared_memory import SharedMemory
from max.dtype import DType

__all__ = ["StridedMemory", "Usage"]


class Usage(Flag):
    """What the memory of a tensor is for."""

    __module__ = "max.driver"

    DEFAULT = 0
    STAGING = 1
    """Copies to and from an accelerator: page-locked where there is one."""
    UNTRACKED = 2
    """The caller orders accesses of host and accelerator itself; on a CPU operations are complete when they return."""


def usage_of(op: str, pinned: bool | Usage, usage: Usage | None) -> Usage:
    """The usage that the arguments of an allocation name.

    Args:
        op: The call, for error messages.
        pinned: Whether the memory is page-locked, or a usage by position.
        usage: A usage by keyword.

    Raises:
        TypeError: Both are given, or one is of another type.
    """
    if isinstance(pinned, Usage):
        pinned, usage = False, pinned if usage is None else usage
    if usage is None:
        return Usage.STAGING if pinned else Usage.DEFAULT
    if not isinstance(usage, Usage):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"{op}: usage is {usage!r}, expected a max.driver.Usage")
    if pinned:
        raise TypeError(f"{op}: expected pinned or usage, got both")
    return usage


_DEFAULT = Usage.DEFAULT  # a global is quicker than an attribute of an enumeration


class StridedMemory:
    """Elements of one dtype in the memory of a device, at regular distances; the base of `max.driver.Tensor`."""

    __slots__ = (
        "__weakref__", "_device", "_dtype", "_owner", "_ptr", "_read_only", "_shape",
        "_stream", "_strides", "_usage",
    )  # fmt: skip

    _ptr: int
    """Address of the first element."""
    _strides: tuple[int, ...] | None
    """The strides in elements; None for row-major and contiguous."""
    _owner: object
    """Keeps the memory alive."""

    def _allocate(
        self,
        dtype: DType,
        shape: tuple[int, ...],
        target: Device | DeviceStream | None,
        *,
        zero: bool = False,
        usage: Usage = Usage.DEFAULT,
    ) -> None:
        device, stream = target_of("Tensor", target)
        self._ptr, self._owner = device.memory.allocate("Tensor", dtype, shape, zero)
        self._dtype, self._shape, self._strides = dtype, shape, None
        self._read_only, self._usage = False, usage
        self._device, self._stream = device, stream

    @classmethod
    def _empty(cls, dtype: DType, shape: tuple[int, ...], device: Device) -> Self:
        """An uninitialized tensor of a checked shape: the fast path for outputs of executions."""
        memory = device.memory.allocate("Tensor", dtype, shape, False)
        return cls._over(memory, dtype, shape, device, device.default_stream)

    @classmethod
    def _over(
        cls,
        memory: tuple[int, object],
        dtype: DType,
        shape: tuple[int, ...],
        device: Device,
        stream: DeviceStream,
    ) -> Self:
        """A writable, contiguous tensor over new memory, an address and its owner."""
        tensor = cls.__new__(cls)
        tensor._ptr, tensor._owner = memory
        tensor._dtype, tensor._shape, tensor._strides = dtype, shape, None
        tensor._read_only, tensor._usage = False, _DEFAULT
        tensor._device, tensor._stream = device, stream
        return tensor

    @classmethod
    def _wrap(
        cls,
        ptr: int,
        dtype: DType,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None = None,
        owner: object = None,
        target: Device | DeviceStream | None = None,
        read_only: bool = False,
    ) -> Self:
        """Wraps memory that ``owner`` keeps alive.

        Args:
            ptr: The address of the first element.
            dtype: The element type.
            shape: The sizes.
            strides: The strides in elements; None for contiguous.
            owner: Any object that holds the memory.
            target: The device or stream; by default the CPU.
            read_only: Whether the first write copies the memory (`SharedMemory`).
        """
        self = cls.__new__(cls)
        # None lets others see at once that memory is contiguous
        if strides is not None and is_contiguous(shape, strides):
            strides = None
        self._ptr, self._dtype, self._shape, self._strides = ptr, dtype, shape, strides
        self._owner, self._read_only, self._usage = owner, read_only, _DEFAULT
        self._device, self._stream = target_of("Tensor", target)
        if read_only:
            if not isinstance(owner, SharedMemory):
                self._owner = owner = SharedMemory(*self._span(), owner)
            owner.add(self)
        return self

    def _begin_write(self) -> None:
        """Copies read-only memory before a write.

        Raises:
            ValueError: A loaded model or an array reads the memory.
        """
        if self._read_only and isinstance(self._owner, SharedMemory):
            self._owner.separate(self)

    def _fixed_address(self) -> int:
        """The address of the first element, for a program that keeps it; read-only memory stays read-only."""
        if isinstance(self._owner, SharedMemory):
            self._owner.fix()
        return self._ptr

    def _derive(
        self, dtype: DType, shape: tuple[int, ...], strides: tuple[int, ...] | None, offset: int = 0
    ) -> Self:
        """A view of this tensor's memory; ``offset`` in elements of this tensor."""
        ptr = self._ptr + offset * self._dtype.size_in_bytes
        view = self._wrap(ptr, dtype, shape, strides, self._owner, self._stream, self._read_only)
        view._usage = self._usage
        return view

    @property
    def device(self) -> Device:
        """The device that holds the tensor."""
        return self._device

    @property
    def stream(self) -> DeviceStream:
        """The stream of the tensor."""
        return self._stream

    @property
    def dtype(self) -> DType:
        """The element type."""
        return self._dtype

    @property
    def element_size(self) -> int:
        """The size of an element in bytes."""
        return self._dtype.size_in_bytes

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes."""
        return self._shape

    @property
    def strides(self) -> tuple[int, ...]:
        """The distance between neighbors along each axis in elements."""
        return contiguous_strides(self._shape) if self._strides is None else self._strides

    @property
    def rank(self) -> int:
        """The number of axes."""
        return len(self._shape)

    @property
    def num_elements(self) -> int:
        """The number of elements; 1 for rank 0."""
        return math.prod(self._shape)

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements are in row-major order without gaps."""
        return self._strides is None

    @property
    def is_host(self) -> bool:
        """Whether the tensor is in host memory, on a CPU device."""
        return self._device.is_host

    @property
    def pinned(self) -> bool:
        """Whether the tensor was allocated with ``pinned``, or for :attr:`Usage.STAGING`."""
        return Usage.STAGING in self._usage

    @property
    def usage(self) -> Usage:
        """What the memory was allocated for."""
        return self._usage

    def _span(self) -> tuple[int, int]:
        """Address and length in bytes of the memory range that the elements span."""
        if 0 in self._shape:
            return self._ptr, 0
        size = self._dtype.size_in_bytes
        # strides may be negative: the first element need not be the lowest
        reach = [(n - 1) * stride for n, stride in zip(self._shape, self.strides, strict=True)]
        low, high = sum(min(r, 0) for r in reach), sum(max(r, 0) for r in reach)
        return self._ptr + low * size, (high - low + 1) * size
