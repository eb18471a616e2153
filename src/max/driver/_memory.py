"""Host memory: aligned allocations, mapped files, and arrays on an address."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
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
    """An address, and the object that keeps what is there alive."""

    ptr: int
    owner: object


def address(array: Array) -> int:
    """The address of an array's first element."""
    return array.__array_interface__["data"][0]


def allocate(op: str, dtype: DType, shape: tuple[int, ...], zero: bool) -> Memory:
    """Memory for a contiguous tensor, aligned to :data:`ALIGNMENT`.

    Raises:
        MemoryError: There is not as much.
    """
    nbytes = math.prod(shape) * dtype.size_in_bytes
    try:
        if zero and nbytes >= _LARGE:
            owner = _zeroed_huge_pages(nbytes)
            return Memory(-(-address(owner) // _HUGE_PAGE) * _HUGE_PAGE, owner)
        make = np.zeros if zero else np.empty
        owner = make(nbytes + ALIGNMENT, np.uint8)
    except (ValueError, OverflowError, MemoryError, OSError) as error:
        gib = nbytes / 2**30
        raise MemoryError(f"{op}: no memory for {gib:.6g} GiB: {shape} {dtype}") from error
    return Memory(-(-address(owner) // ALIGNMENT) * ALIGNMENT, owner)


def _zeroed_huge_pages(nbytes: int) -> Array:
    """Zeros that the system makes page by page, at their first use, in huge pages where it has them.

    NumPy asks for huge pages for ``empty``, not for ``zeros``: a fault each 4 KiB then costs more than what is
    written, such as the keys of a prompt.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.zeros(nbytes + _HUGE_PAGE, np.uint8)
    # private, as Python's default is shared memory, which has small pages
    mapping = mmap.mmap(-1, nbytes + _HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # an error means that the system has none
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapping, np.uint8)


def map_file(
    op: str,
    filename: os.PathLike[str] | str,
    dtype: DType,
    shape: tuple[int, ...],
    mode: str,
    offset: int,
) -> tuple[Memory, bool]:
    """A file's bytes as memory, and whether they are read-only; see ``Tensor.mmap``."""
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


class _Holder:
    """What NumPy makes an array of that keeps the memory's owner alive."""

    __slots__ = ("__array_interface__", "owner")


def _typestr(dtype: np.dtype[Any]) -> str:
    # the array interface has no names for the types of ml_dtypes: raw bytes, then a view
    return dtype.str if dtype.isbuiltin == 1 else f"|V{dtype.itemsize}"


_TYPESTR: dict[DType, str] = {dtype: _typestr(dtype.to_numpy()) for dtype in DType}


def array_at(
    memory: Memory,
    dtype: DType,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
    read_only: bool,
) -> Array:
    """A NumPy array on memory of the host; strides in elements, None for contiguous."""
    numpy = dtype.to_numpy()
    interface: dict[str, Any] = {
        "version": 3,
        "data": (memory.ptr, read_only),
        "shape": shape,
        "typestr": _TYPESTR[dtype],
    }
    if strides is not None:
        interface["strides"] = tuple(stride * numpy.itemsize for stride in strides)
    holder = _Holder()
    holder.owner = memory.owner
    holder.__array_interface__ = interface
    array = np.asarray(holder)
    return array if array.dtype is numpy else array.view(numpy)
