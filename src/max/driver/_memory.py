"""Memory of devices and of the host: aligned allocations, mapped files, arrays at an address."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
from abc import ABC, abstractmethod
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from max.dtype import DType

# a cache line, and the widest vector
ALIGNMENT = 64
_HUGE_PAGE = 2 << 20
# zeros of this size and above come from the system a huge page at a time
_LARGE = 4 * _HUGE_PAGE

Array: TypeAlias = "np.ndarray[Any, Any]"
MapMode: TypeAlias = Literal["readonly", "r", "copyonwrite", "c", "readwrite", "r+", "write", "w+"]

_MAP_MODES: dict[str, Literal["r", "c", "r+", "w+"]] = {
    "readonly": "r", "r": "r", "copyonwrite": "c", "c": "c",
    "readwrite": "r+", "r+": "r+", "write": "w+", "w+": "w+",
}  # fmt: skip


class Memory(NamedTuple):
    """An address, and the object that keeps its memory alive."""

    ptr: int
    owner: object


def address(array: Array) -> int:
    """The address of an array's first element."""
    return array.__array_interface__["data"][0]


def owned_address(array: Any) -> int:
    """`address` of a writable, contiguous array, in a quarter of the time."""
    return ctypes.addressof(NO_CHARS.from_buffer(array))


NO_CHARS = ctypes.c_char * 0
"""A view of no elements of a buffer: it has the buffer's address."""


class DeviceMemory(ABC):
    """The memory of a device, as tensors use it.

    Addresses are numbers that only this memory interprets, except on the host; offsets may be added. Copies are ordered
    after all launches queued before, and complete when the call returns.
    """

    addressable: bool = False
    """Whether an address is one of the process: the host reads and writes the memory in place."""

    @abstractmethod
    def allocate(self, op: str, dtype: DType, shape: tuple[int, ...], zero: bool) -> Memory:
        """Allocates memory for a contiguous tensor, aligned to :data:`ALIGNMENT`; the returned owner frees it.

        Args:
            op: The caller, for messages.
            dtype: The element type.
            shape: The sizes.
            zero: Whether to fill the memory with zeros.

        Raises:
            MemoryError: The device is out of memory.
        """

    @abstractmethod
    def read(self, ptr: int, nbytes: int) -> Array:
        """Reads bytes into a uint8 array of the host: a copy, or on the host the memory itself.

        Args:
            ptr: The address of the first byte.
            nbytes: The number of bytes.
        """

    @abstractmethod
    def write(self, ptr: int, data: Array) -> None:
        """Copies a uint8 array of the host to the device.

        Args:
            ptr: The address of the first byte.
            data: The bytes, contiguous.
        """


def allocate(op: str, dtype: DType, shape: tuple[int, ...], zero: bool) -> Memory:
    """Allocates host memory for a contiguous tensor, aligned to :data:`ALIGNMENT`.

    Raises:
        MemoryError: The host is out of memory.
    """
    nbytes = math.prod(shape) * dtype.size_in_bytes
    try:
        if zero and nbytes >= _LARGE:
            owner = _zeroed_huge_pages(nbytes)
            # the mapping has a huge page to spare, so that the tensor begins at one
            return Memory(-(-address(owner) // _HUGE_PAGE) * _HUGE_PAGE, owner)
        if not zero:
            return Memory(*allocate_bytes(nbytes))
        owner = np.zeros(nbytes + ALIGNMENT, np.uint8)
    except (ValueError, OverflowError, MemoryError, OSError) as error:
        gib = nbytes / 2**30
        raise MemoryError(f"{op}: no memory for {gib:.6g} GiB: {shape} {dtype}") from error
    return Memory(-(-owned_address(owner) // ALIGNMENT) * ALIGNMENT, owner)


def allocate_bytes(nbytes: int) -> tuple[int, object]:
    """Uninitialized host memory, aligned to :data:`ALIGNMENT`: its address and owner. Each output calls it.

    Args:
        nbytes: The number of bytes.

    Raises:
        MemoryError, ValueError: The host has less.
    """
    owner: Any = np.empty(nbytes + ALIGNMENT, np.uint8)
    return -(-ctypes.addressof(NO_CHARS.from_buffer(owner)) // ALIGNMENT) * ALIGNMENT, owner


def _zeroed_huge_pages(nbytes: int) -> Array:
    """Zeroed memory that the system allocates at first use, in huge pages if supported.

    NumPy requests huge pages for ``empty``, but not for ``zeros``. A page fault per 4 KiB would cost more than writing
    the memory, for example the keys of a prompt.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.zeros(nbytes + _HUGE_PAGE, np.uint8)
    # private: Python's default, shared memory, has small pages
    mapping = mmap.mmap(-1, nbytes + _HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # an error means that the system has none
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapping, np.uint8)


class HostMemory(DeviceMemory):
    """The memory of the host: addresses are those of the process."""

    addressable = True

    # the function itself: each output of an execution calls it
    allocate = staticmethod(allocate)  # pyright: ignore[reportAssignmentType]

    def read(self, ptr: int, nbytes: int) -> Array:
        return array_at(Memory(ptr, None), DType.uint8, (nbytes,), None, False)

    def write(self, ptr: int, data: Array) -> None:
        self.read(ptr, data.size)[:] = data


def copy_between(
    target: DeviceMemory, target_ptr: int, source: DeviceMemory, source_ptr: int, nbytes: int
) -> None:
    """Copies bytes from one memory to another, through the host.

    Args:
        target: The target memory.
        target_ptr: The address of the first target byte.
        source: The source memory.
        source_ptr: The address of the first source byte.
        nbytes: The number of bytes.
    """
    if nbytes:
        target.write(target_ptr, source.read(source_ptr, nbytes))


def map_file(
    op: str,
    filename: os.PathLike[str] | str,
    dtype: DType,
    shape: tuple[int, ...],
    mode: str,
    offset: int,
) -> tuple[Memory, bool]:
    """Maps a file; returns its memory, and whether it is read-only. See ``Tensor.mmap``."""
    short = _MAP_MODES.get(mode)
    if short is None:
        raise ValueError(f"{op}: mode {mode!r} is none of {', '.join(_MAP_MODES)}")
    if offset < 0:
        raise ValueError(f"{op}: offset {offset} is negative")
    nbytes = math.prod(shape) * dtype.size_in_bytes
    if short != "w+" and (present := os.stat(filename).st_size) < offset + nbytes:
        raise ValueError(
            f"{op}: {os.fspath(filename)} has {present} bytes; {shape} {dtype} at offset "
            f"{offset} needs {offset + nbytes}"
        )
    if nbytes == 0:
        return allocate(op, dtype, shape, zero=True), short == "r"
    mapped = np.memmap(filename, np.uint8, short, offset, (nbytes,))
    return Memory(address(mapped), mapped), short == "r"


class _ArrayInterface:
    """An object with NumPy's array interface that keeps the memory's owner alive."""

    __slots__ = ("__array_interface__", "owner")


def _typestr(dtype: np.dtype[Any]) -> str:
    # the array interface lacks the dtypes of ml_dtypes: use raw bytes, then a view
    return dtype.str if dtype.isbuiltin == 1 else f"|V{dtype.itemsize}"


_TYPESTR: dict[DType, str] = {dtype: _typestr(dtype.to_numpy()) for dtype in DType}


def array_at(
    memory: Memory,
    dtype: DType,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
    read_only: bool,
) -> Array:
    """A NumPy array on host memory; strides in elements, None for contiguous."""
    numpy = dtype.to_numpy()
    layout: dict[str, Any] = {
        "version": 3,
        "data": (memory.ptr, read_only),
        "shape": shape,
        "typestr": _TYPESTR[dtype],
    }
    if strides is not None:
        layout["strides"] = tuple(stride * numpy.itemsize for stride in strides)
    interface = _ArrayInterface()
    interface.owner = memory.owner
    interface.__array_interface__ = layout
    array = np.asarray(interface)
    return array if array.dtype is numpy else array.view(numpy)
