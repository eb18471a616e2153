"""Memory whose pages are requested ahead of their use."""

from __future__ import annotations

import sys
import threading
import time

import numpy as np
import pytest

from max._host import host_memory, reserve
from max._host.reserve import Reserve

STEP = host_memory.HUGE_PAGE
SIZE = 4 * STEP + 4096


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reserve, "LEAST_BYTES", STEP)
    monkeypatch.setattr(reserve, "STEP_BYTES", STEP)
    monkeypatch.setattr(reserve, "SPARE_BYTES", 0)
    monkeypatch.setattr(reserve, "usable_cpus", lambda: 2)


def touched(num_bytes: int) -> Reserve:
    """A reserve whose thread has touched all of it."""
    made = Reserve(num_bytes)
    end = time.monotonic() + 100
    while made.touched < num_bytes:
        assert time.monotonic() < end
        time.sleep(0.001)
    return made


def resident(block: np.ndarray) -> int:
    """The pages of a block that have memory."""
    entry = np.fromfile(
        "/proc/self/pagemap",
        np.uint64,
        -(-block.nbytes // 4096),
        offset=block.ctypes.data // 4096 * 8,
    )
    return int(np.count_nonzero(entry >> np.uint64(63)))


def test_the_block_is_the_one_that_was_touched() -> None:
    made = touched(SIZE)
    block = made.take(SIZE)
    assert block.size == SIZE and block.dtype == np.uint8 and block.ctypes.data % 64 == 0
    if sys.platform == "linux":
        assert resident(block) == -(-SIZE // 4096)
    block[:] = 7
    # the second one is another block
    assert not np.shares_memory(made.take(SIZE), block)


@pytest.mark.skipif(sys.platform != "linux", reason="the system takes no pages back")
def test_pages_beyond_the_size_are_given_back() -> None:
    made = touched(SIZE)
    own = made._block
    block = made.take(STEP + 100)
    assert own is not None and block.size == STEP + 100
    assert resident(block) == STEP // 4096 + 1
    # the last page is not a whole one
    assert resident(own[STEP + 4096 :]) <= 1


@pytest.mark.parametrize(("asked", "reserved"), [(SIZE + SIZE // 8, True), (2 * SIZE, False)])
def test_more_than_expected(asked: int, reserved: bool) -> None:
    made = touched(SIZE)
    own = made._block
    block = made.take(asked)
    assert block.size == asked
    assert own is not None and np.shares_memory(block, own) == reserved
    block[:] = 1


def test_the_end_is_left_to_the_first_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reserve, "SPARE_BYTES", STEP)
    made = Reserve(SIZE)
    thread = made._thread
    assert thread is not None
    thread.join(100)
    assert made.touched == SIZE - STEP
    made.take(SIZE)[:] = 1


@pytest.mark.parametrize(("num_bytes", "cores"), [(STEP - 1, 2), (SIZE, 1), (0, 2)])
def test_no_thread_where_it_does_not_pay(
    num_bytes: int, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reserve, "usable_cpus", lambda: cores)
    threads = threading.active_count()
    made = Reserve(num_bytes)
    assert threading.active_count() == threads and made.touched == 0
    assert made.take(num_bytes).size == num_bytes


def test_a_closed_reserve_ends_its_thread() -> None:
    made = Reserve(1 << 40 if sys.maxsize > 1 << 32 else SIZE)
    made.close()
    assert not [t for t in threading.enumerate() if t.name == "max-reserve"]
    assert made.take(10).size == 10


@pytest.mark.skipif(sys.platform != "linux", reason="the system takes no pages back")
def test_discarded_pages_are_empty() -> None:
    block = host_memory.allocate(STEP)
    block[:] = 1
    assert host_memory.discard(block[100 : STEP // 2])
    pages = -(-(block.ctypes.data + 100) // 4096) * 4096 - block.ctypes.data
    stop = (block.ctypes.data + STEP // 2) // 4096 * 4096 - block.ctypes.data
    assert not block[pages:stop].any() and block[:pages].all() and block[stop:].all()
    assert not host_memory.discard(block[:0])
