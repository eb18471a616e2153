"""Sends that do not wait: their order, what waits, and the ends of both sides."""

from __future__ import annotations

import multiprocessing
import os
import random
import socket
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest

from max.pipelines.generation.process.channel import wire
from max.serve.worker.send_queue import SendQueue

WAIT_S = 60.0


@pytest.fixture(params=[True, False], ids=["socket", "one direction"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[SendQueue, Connection, Connection]]:
    """A queue with a socket or, by a pipe of one direction, without; its connection, and the other end."""
    there, here = multiprocessing.Pipe(duplex=request.param)
    with there, here:
        sends = SendQueue(here, "test sends")
        assert (sends._socket is not None) == request.param
        yield sends, here, there
        sends.end()
        there.close()
        sends._thread.join(WAIT_S)
        assert not sends._thread.is_alive()


def test_frames_arrive_in_order(ends: tuple[SendQueue, Connection, Connection]) -> None:
    """Those that are taken at once, and those beyond the buffer of the other end."""
    sends, _, there = ends
    draw = random.Random(7)
    frames = [draw.randbytes(draw.choice((1, 300, 70_000, 500_000))) for _ in range(40)]
    for frame in frames[:20]:
        sends.send(frame)
    assert [there.recv_bytes() for _ in range(20)] == frames[:20]
    sends.flush(WAIT_S)
    for frame in frames[20:]:
        sends.send(frame)
        assert there.recv_bytes() == frame


def test_what_waits_is_counted_until_it_is_read(
    ends: tuple[SendQueue, Connection, Connection],
) -> None:
    sends, _, there = ends
    counts = [sends.send(bytes(1 << 20)) for _ in range(5)]
    # the first one, or a part of it, may be on the way
    assert 3 << 20 < counts[-1] <= (5 << 20) + 200
    assert counts == sorted(set(counts))
    sends.flush(0)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.extend(there.recv_bytes() for _ in range(5)))
    reader.start()
    sends.flush(WAIT_S)
    reader.join(WAIT_S)
    assert list(map(len, read)) == [1 << 20] * 5
    assert sends._left_bytes == 0 and sends._thread.daemon
    assert sends.send(b"x") <= 5  # with its length, where the thread sends it


def test_what_waits_is_sent_after_the_end(ends: tuple[SendQueue, Connection, Connection]) -> None:
    """What is sent later is not, and no descriptor is left."""
    sends, here, there = ends
    frames = [bytes([number]) * 300_000 for number in range(4)]
    for frame in frames:
        sends.send(frame)
    sends.end()
    assert sends.send(b"later") == 0
    assert [there.recv_bytes() for _ in frames] == frames
    sends._thread.join(WAIT_S)
    assert sends.send(b"later") == 0
    here.close()
    with pytest.raises(EOFError):
        there.recv_bytes()


def test_an_end_that_is_closed_ends_what_waits(
    ends: tuple[SendQueue, Connection, Connection],
) -> None:
    sends, _, there = ends
    for _ in range(3):
        sends.send(bytes(1 << 20))
    there.close()
    sends.flush(WAIT_S)
    sends._thread.join(WAIT_S)
    assert not sends._thread.is_alive()
    for _ in range(2):
        with pytest.raises(OSError):
            sends.send(b"x")


def test_a_closed_end_ends_a_thread_without_work() -> None:
    here, there = multiprocessing.Pipe()
    with here:
        sends = SendQueue(here, "test sends")
        there.close()
        with pytest.raises(OSError):
            sends.send(b"x")
        sends._thread.join(WAIT_S)
        assert not sends._thread.is_alive()


def test_an_end_that_takes_nothing_gets_a_frame_later() -> None:
    """Nothing waits, but the buffer is full: the whole frame is left to the thread."""
    here, there = multiprocessing.Pipe()
    with here, there:
        sends, count = SendQueue(here, "test sends"), 0
        with socket.socket(fileno=os.dup(here.fileno())) as same, pytest.raises(BlockingIOError):
            while True:
                same.send(wire(b"x"), socket.MSG_DONTWAIT)  # so few bytes are taken whole or not
                count += 1
        assert sends.send(b"later") == len(wire(b"later"))
        assert [there.recv_bytes() for _ in range(count + 1)] == [b"x"] * count + [b"later"]
        sends.end()
        sends._thread.join(WAIT_S)
        assert not sends._thread.is_alive()


def test_no_thread_is_an_error_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none)
    here, there = multiprocessing.Pipe()
    with there:
        with here, pytest.raises(OSError, match="can't start new thread"):
            SendQueue(here, "test sends")
        with pytest.raises(EOFError):
            there.recv_bytes()  # no descriptor of the other end is left
