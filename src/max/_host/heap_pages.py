"""Collapses the resident heap of a process into huge pages, which reduces TLB misses.

A server request executes much code over objects scattered across the heap. With 4 KiB pages most of these accesses miss
the TLB, and in a virtual machine each miss walks two page tables.
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

MIN_RESIDENT_SHARE = 0.5
"""The minimum share of a huge page that must be resident: a collapse makes the rest resident too."""
TIME_LIMIT_S = 2.0
"""Seconds after which no further range is collapsed, for example when free memory is fragmented."""
_COLLAPSE = 25
"""``MADV_COLLAPSE`` of madvise(2), since Linux 6.1."""
_MAPS = Path("/proc/self/maps")
_TABLE = "/proc/self/pagemap"
_ENTRY = 8  # bytes per pagemap entry
_PRESENT = np.uint64(1 << 63)


def gather_heap() -> int:
    """Collapses resident private memory into huge pages, as far as the system provides them.

    Returns:
        The number of huge pages in ranges that were collapsed completely; 0 if the system does not support it.
    """
    if not LINUX:
        return 0
    madvise = libc().madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    end, count = time.monotonic() + TIME_LIMIT_S, 0
    try:
        for start, stop in _runs(list(_ranges())):
            if time.monotonic() > end:
                break
            # one call per run: each call synchronizes all processors, which costs more than copying a page
            if madvise(start, stop - start, _COLLAPSE) == 0:
                count += (stop - start) // HUGE_PAGE
    except OSError:  # /proc is missing, as in some sandboxes
        pass
    return count


def _ranges() -> Iterator[tuple[int, int]]:
    """Yields the bounds of anonymous private mappings: the heaps of C and Python."""
    for line in _MAPS.read_text().splitlines():
        span, perms, _, _, _, *path = line.split(None, 5)
        if perms.startswith("rw-p") and path in ([], ["[heap]"]):
            start, stop = (int(end, 16) for end in span.split("-"))
            yield start, stop


def _runs(ranges: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yields the bounds of runs of adjacent huge pages that are mostly resident."""
    pages = HUGE_PAGE // mmap.PAGESIZE
    with open(_TABLE, "rb", buffering=0) as table:
        for first, last in ranges:
            run = None
            for address in range(
                -(-first // HUGE_PAGE) * HUGE_PAGE, last - HUGE_PAGE + 1, HUGE_PAGE
            ):
                table.seek(address // mmap.PAGESIZE * _ENTRY)
                entries = np.frombuffer(table.read(pages * _ENTRY), np.uint64)
                if np.count_nonzero(entries & _PRESENT) >= MIN_RESIDENT_SHARE * pages:
                    run = (run[0] if run else address, address + HUGE_PAGE)
                elif run:
                    yield run
                    run = None
            if run:
                yield run
