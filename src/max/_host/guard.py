"""Memory between inaccessible pages, filled with a pattern: for tests (``MAX_GUARD=1``).

An access past the end faults at the instruction; a read of unwritten memory returns the pattern: -2.6e36 as f32,
-67372037 as a 32-bit integer.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from max._host.process_caches import cached_results

__all__ = [
    "CAN_PROTECT",
    "PAGE",
    "PATTERN",
    "allocate",
    "between_pages",
    "guarded_copy",
    "with_holes",
]

PATTERN = 0xFB
"""The byte that fills new memory."""
PAGE = mmap.PAGESIZE
CAN_PROTECT = sys.platform != "win32"
"""Whether the platform can make pages inaccessible; if not, memory has the pattern only."""

Bytes = npt.NDArray[np.uint8]


@cached_results()
def _mprotect() -> Any:
    function = ctypes.CDLL(None, use_errno=True).mprotect
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


def _protect(address: int, num_bytes: int, protection: int = 0) -> None:
    if CAN_PROTECT and _mprotect()(address, num_bytes, protection) != 0:
        raise OSError(ctypes.get_errno(), f"mprotect of {num_bytes} bytes failed")


def _new_pages(num_bytes: int) -> Bytes:
    """A new mapping of whole pages, owned by the array."""
    return np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE) * PAGE


def between_pages(num_bytes: int, pattern: int = PATTERN) -> Bytes:
    """Whole pages for at least the given number of bytes, between two inaccessible pages."""
    size = _whole_pages(num_bytes)
    mapping = _new_pages(size + 2 * PAGE)
    mapping[PAGE:-PAGE] = pattern
    address = mapping.ctypes.data
    _protect(address, PAGE)
    _protect(address + PAGE + size, PAGE)
    return mapping[PAGE : PAGE + size]


def allocate(num_bytes: int) -> Bytes:
    """Bytes of the pattern that end right before an inaccessible page.

    The address is a multiple of all powers of two that divide the size, up to that of a page.
    """
    pages = between_pages(num_bytes)
    return pages[pages.size - num_bytes :]


def guarded_copy(source: Bytes) -> Bytes:
    """A read-only copy of the bytes, placed as by `allocate`."""
    pages = between_pages(source.size)
    copy = pages[pages.size - source.size :]
    copy[:] = source
    _protect(pages.ctypes.data, pages.size, mmap.PROT_READ)
    copy.flags.writeable = False
    return copy


def with_holes(num_bytes: int, holes: Iterable[int]) -> Bytes:
    # no mapping is empty
    """Whole pages of the pattern; the pages at the offsets `holes` are inaccessible."""
    mapping = _new_pages(_whole_pages(max(num_bytes, 1)))
    mapping[:] = PATTERN
    for offset in holes:
        _protect(mapping.ctypes.data + offset, PAGE)
    return mapping
