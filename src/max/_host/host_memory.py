"""Memory of the system: aligned blocks, huge pages, pages that are given back, mappings of files.

On other systems than Linux blocks are plain, and nothing is given back.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np

from max._host.machine import LINUX, libc

__all__ = [
    "CACHE_LINE",
    "HUGE_PAGE",
    "MappedFiles",
    "advise_huge_pages",
    "allocate",
    "discard",
    "release_free_memory",
]

CACHE_LINE = 64
HUGE_PAGE = 2 << 20
_MADV_HUGEPAGE = 14


def release_free_memory() -> None:
    """Returns free memory of the C library's heap to the system, where the library supports it."""
    if LINUX and (trim := getattr(libc(), "malloc_trim", None)) is not None:
        trim(0)


def advise_huge_pages(address: int, num_bytes: int) -> bool:
    """Requests huge pages for the whole huge pages of a range; returns whether the system accepts."""
    start = -(-address // HUGE_PAGE) * HUGE_PAGE
    stop = (address + num_bytes) // HUGE_PAGE * HUGE_PAGE
    if not LINUX or stop <= start:
        return False
    madvise = libc().madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return madvise(start, stop - start, _MADV_HUGEPAGE) == 0


def allocate(num_bytes: int, alignment: int = CACHE_LINE) -> np.ndarray:
    """An uninitialized, aligned array of bytes.

    Args:
        num_bytes: The size; 0 gives an empty array.
        alignment: Of the first element; a power of two.

    Returns:
        A one-dimensional ``uint8`` array; huge pages are requested for arrays that contain one.
    """
    # room to begin at the next aligned address
    whole = np.empty(num_bytes + alignment, np.uint8)
    start = -whole.ctypes.data % alignment
    block = whole[start : start + num_bytes]
    if num_bytes >= 2 * HUGE_PAGE:
        advise_huge_pages(block.ctypes.data, num_bytes)
    return block


def discard(block: np.ndarray) -> bool:
    """Returns the whole pages of a block of private memory to the system; they read as 0 afterwards.

    Args:
        block: A contiguous array, whose elements are not needed any more.

    Returns:
        Whether the system took the pages; it does on Linux.
    """
    return _do_not_need(block.ctypes.data, block.nbytes)


def _do_not_need(address: int, num_bytes: int) -> bool:
    """Releases the whole pages in a range; returns whether the system accepts."""
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if not LINUX or stop <= start:
        return False
    madvise = libc().madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return madvise(start, stop - start, mmap.MADV_DONTNEED) == 0


class MappedFiles:
    """The read-only file mappings of this process; none on other systems than Linux."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []
        self._files: list[tuple[int, int, int, str]] = []
        if not LINUX:
            return
        # a line is: start-stop perms offset device inode path. Read-only pages never change: they can be read again
        for line in Path("/proc/self/maps").read_text().splitlines():
            span, perms, offset, _, inode, *path = line.split(None, 5)
            # anonymous mappings have inode 0
            if inode != "0" and "w" not in perms and "x" not in perms:
                start, stop = (int(end, 16) for end in span.split("-"))
                self._files.append((start, stop, int(offset, 16), "".join(path)))
                # neighboring mappings are given back as one range
                if self._ranges and self._ranges[-1][1] == start:
                    start = self._ranges.pop()[0]
                self._ranges.append((start, stop))

    def identity(self, address: int, num_bytes: int) -> str | None:
        """Identifies bytes of a mapped file by the file's path, inode, size and times, and their offset.

        It changes when the file does, and is the same on each machine that has mounted it.

        Args:
            address: The start of the range.
            num_bytes: The size of the range.

        Returns:
            The text; None if the bytes are not in one mapping of a file that still has its name.
        """
        for start, stop, offset, path in self._files:
            if start <= address and address + num_bytes <= stop:
                try:
                    stat = os.stat(path)
                except OSError:
                    return None
                # without the device, whose number each machine chooses: a copied file has another time of change
                times = f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}"
                return f"{path} {stat.st_ino} {times} {offset + address - start} {num_bytes}"
        return None

    def give_back(self, address: int, num_bytes: int) -> bool:
        """Releases the whole pages of a range of a mapped file; the system reads them again on the next access.

        Args:
            address: The start of the range.
            num_bytes: The size of the range.

        Returns:
            Whether the system released the pages.
        """
        # the pages at both ends may belong to other mappings
        start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if not any(low <= start and stop <= high for low, high in self._ranges):
            return False
        return _do_not_need(start, stop - start)
