"""Moves what a process has in memory into huge pages, so that the processor finds more of it without walking tables.

A request of a server runs much code once over objects that lie all over the heap. With pages of 4 KiB most of them miss
the processor's table of addresses, the more so in a virtual machine, where each miss walks two tables.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from max._host.host_memory import HUGE_PAGE
from max._host.machine import LINUX, libc

__all__ = ["gather_heap"]

LEAST_SHARE = 0.5
"""The least share of a huge page that must be in use already: the rest of it becomes memory of the process."""
MOST_S = 2.0
"""Seconds after which no further range is begun, as where free memory is in small pieces."""
_COLLAPSE = 25
"""The advice of madvise(2) that moves a range into huge pages at once, since Linux 6.1."""
_MAPS = Path("/proc/self/maps")
_TABLE = "/proc/self/pagemap"
_ENTRY = 8  # bytes of an entry of the table
_PRESENT = np.uint64(1 << 63)


def gather_heap() -> int:
    """Moves private memory that is in use into huge pages, as far as the system has them.

    Returns:
        The number of huge pages in runs that have moved as a whole; 0 where the system does not do that.
    """
    if not LINUX:
        return 0
    madvise = libc().madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    end, count = time.monotonic() + MOST_S, 0
    try:
        for start, stop in _runs(list(_ranges())):
            if time.monotonic() > end:
                break
            # a call waits for all processors, which takes longer than to move a page
            if madvise(start, stop - start, _COLLAPSE) == 0:
                count += (stop - start) // HUGE_PAGE
    except OSError:  # no /proc, as in some sandboxes
        pass
    return count


def _ranges() -> Iterator[tuple[int, int]]:
    """The begins and ends of mappings that are no files': the heaps of C and of Python, and blocks."""
    for line in _MAPS.read_text().splitlines():
        span, perms, _, _, _, *path = line.split(None, 5)
        if perms.startswith("rw-p") and path in ([], ["[heap]"]):
            start, stop = (int(end, 16) for end in span.split("-"))
            yield start, stop


def _runs(ranges: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The begins and ends of neighboring huge pages of a mapping whose pages are mostly in memory."""
    pages = HUGE_PAGE // mmap.PAGESIZE
    with open(_TABLE, "rb", buffering=0) as table:
        for first, last in ranges:
            run = None
            for address in range(
                -(-first // HUGE_PAGE) * HUGE_PAGE, last - HUGE_PAGE + 1, HUGE_PAGE
            ):
                table.seek(address // mmap.PAGESIZE * _ENTRY)
                entries = np.frombuffer(table.read(pages * _ENTRY), np.uint64)
                if np.count_nonzero(entries & _PRESENT) >= LEAST_SHARE * pages:
                    run = (run[0] if run else address, address + HUGE_PAGE)
                elif run:
                    yield run
                    run = None
            if run:
                yield run
