"""The heap in huge pages: what is in use moves, with its contents; what is mostly empty stays as it is."""

from __future__ import annotations

import mmap
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from max._host import heap_pages
from max._host.heap_pages import gather_heap
from max._host.host_memory import HUGE_PAGE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux moves pages")
NUM_HUGE = 8
PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS if sys.platform == "linux" else 0


def kilobytes(block: np.ndarray) -> tuple[int, int]:
    """The KiB of the mapping of a block that are in memory, and in huge pages."""
    address, found = block.ctypes.data, {"Rss": 0, "AnonHugePages": 0}
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, value = line.partition(":")
        if "-" in name.split()[0]:
            start, stop = (int(end, 16) for end in name.split()[0].split("-"))
            is_inside = start <= address < stop
        elif is_inside and name in found:
            found[name] = int(value.split()[0])
    return found["Rss"], found["AnonHugePages"]


def block() -> np.ndarray:
    """Memory without huge pages, none of which is in use; it begins at one."""
    size = (NUM_HUGE + 1) * HUGE_PAGE
    memory = mmap.mmap(-1, size, flags=PRIVATE)
    # others may be mapped beside it
    memory.madvise(mmap.MADV_DONTDUMP)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    begin = -whole.ctypes.data % HUGE_PAGE
    return whole[begin : begin + NUM_HUGE * HUGE_PAGE]


@pytest.fixture
def is_moved() -> None:
    """Skips the test where the system moves nothing."""
    if not gather_heap():
        pytest.skip("the system does not move private memory into huge pages")


def allow(memory: np.ndarray) -> None:
    owner: Any = memory
    while not isinstance(owner, mmap.mmap):
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    owner.madvise(mmap.MADV_HUGEPAGE)


def test_what_is_in_use_moves_with_its_contents(is_moved: None) -> None:
    memory = block()
    content = np.random.default_rng(0).integers(0, 256, memory.size, np.uint8)
    memory[:] = content
    assert kilobytes(memory)[1] == 0
    allow(memory)
    ends = threading.Event()
    seen: list[bool] = []

    def read() -> None:
        while not ends.is_set():
            seen.append(bool(memory[0] == content[0] and memory[-1] == content[-1]))

    thread = threading.Thread(target=read)
    thread.start()
    count = gather_heap()
    ends.set()
    thread.join()
    np.testing.assert_array_equal(memory, content)
    assert count >= NUM_HUGE and all(seen)
    assert kilobytes(memory)[1] == NUM_HUGE * HUGE_PAGE >> 10


def test_what_is_mostly_empty_takes_no_more_memory(is_moved: None) -> None:
    memory = block()
    pages = HUGE_PAGE // mmap.PAGESIZE
    memory.reshape(NUM_HUGE, pages, -1)[:, : pages // 2 - 1] = 1
    memory.reshape(NUM_HUGE, pages, -1)[0, : pages // 2] = 1
    allow(memory)
    before = kilobytes(memory)[0]
    gather_heap()
    rss, huge = kilobytes(memory)
    # only the first one is half full
    assert huge == HUGE_PAGE >> 10 and rss == before + (HUGE_PAGE >> 11)
    assert int(memory.sum()) == (NUM_HUGE * (pages // 2 - 1) + 1) * mmap.PAGESIZE


def test_files_and_shared_memory_stay_as_they_are(tmp_path: Path) -> None:
    with open(tmp_path / "file", "w+b") as file:
        file.truncate(4 * HUGE_PAGE)
        shared = mmap.mmap(file.fileno(), 4 * HUGE_PAGE)
        both = [
            shared,
            mmap.mmap(-1, 4 * HUGE_PAGE),
            mmap.mmap(file.fileno(), 4 * HUGE_PAGE, PRIVATE ^ mmap.MAP_ANONYMOUS),
        ]
        for each in both:
            each.write(b"a" * (4 * HUGE_PAGE))
        addresses = [np.frombuffer(each, np.uint8).ctypes.data for each in both]
        ranges = list(heap_pages._ranges())  # pyright: ignore[reportPrivateUsage]
    assert ranges
    for address in addresses:
        assert not any(start <= address < stop for start, stop in ranges)


def test_neighbors_are_one_run() -> None:
    memory = block()
    pages = memory.reshape(NUM_HUGE, HUGE_PAGE)
    for used in (0, 1, 3, 6, 7):
        pages[used] = 1
    start = memory.ctypes.data
    ranges = [(start - 5, start + memory.size), (start - 5, start + 4 * HUGE_PAGE - 1)]
    runs = heap_pages._runs(ranges)  # pyright: ignore[reportPrivateUsage]
    places = [((a - start) / HUGE_PAGE, (b - start) / HUGE_PAGE) for a, b in runs]
    assert places == [(0, 2), (3, 4), (6, 8), (0, 2)]


def test_there_is_a_limit_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap_pages, "TIME_LIMIT_S", -1.0)
    assert gather_heap() == 0


def test_a_sandbox_without_proc_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap_pages, "_MAPS", Path("/absent/maps"))
    assert gather_heap() == 0
