"""A worker that does not read its commands holds up nobody but its own requests."""

from __future__ import annotations

import multiprocessing
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from max.pipelines.generation.process.channel import ConnectionChannel
from max.serve.worker.queued_channel import QueuedChannel
from tests.serve.conftest import RunningServer


def test_sends_do_not_wait_and_keep_their_order() -> None:
    here, there = map(ConnectionChannel, multiprocessing.Pipe())
    channel = QueuedChannel(here)
    for number in range(400):
        channel.send((number, b"x" * 10_000))  # far beyond the buffer of a pipe
    assert [there.receive()[0] for _ in range(400)] == list(range(400))
    thread = channel._sends._thread
    assert thread.is_alive()
    channel.end_sends()
    thread.join(60)
    assert not thread.is_alive()


def test_an_end_that_is_closed_is_an_error_of_a_later_send() -> None:
    here, there = map(ConnectionChannel, multiprocessing.Pipe())
    channel = QueuedChannel(here)
    there.close()
    deadline = time.monotonic() + 300
    while True:
        try:
            channel.send(1)
        except OSError:
            break
        assert time.monotonic() < deadline
    channel._sends._thread.join(60)
    assert not [each for each in threading.enumerate() if each is channel._sends._thread]
    with pytest.raises(OSError):
        channel.send(1)


def test_random_frames_arrive_whole_and_in_order() -> None:
    """Small ones at once, those beyond the buffer of the other end by the thread, and small ones again."""
    here, there = map(ConnectionChannel, multiprocessing.Pipe())
    channel, draw = QueuedChannel(here), random.Random(4)
    frames = [draw.randbytes(draw.choice((1, 300, 70_000, 500_000))) for _ in range(60)]

    def read() -> list[bytes]:
        received: list[bytes] = []
        while len(received) < len(frames):
            received.append(there.receive())
            time.sleep(draw.choice((0, 0, 0.003)))
        return received

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        for number, frame in enumerate(frames):
            channel.send(frame)
            if number % 20 == 19:
                time.sleep(0.05)  # all has arrived
        assert reading.result(60) == frames
    channel.close()
    channel._sends._thread.join(60)
    with pytest.raises(EOFError):
        there.receive()  # no descriptor of this end is left


def test_a_stopped_worker(server: RunningServer, http: httpx.Client) -> None:
    """Its requests wait, all else is answered, and it goes on where it was."""
    body = {"prompt": [[5] * 480] * 128, "max_tokens": 1, "temperature": 0}

    def ask() -> str:
        try:
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=3)
        except httpx.TimeoutException:
            return "waits"
        return "answered"

    worker = server.wait_ready().worker
    worker.send_signal(signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(4) as pool:
            asking = [pool.submit(ask) for _ in range(4)]
            for _ in range(20):
                assert http.get("/health", timeout=300).status_code == 200
                time.sleep(0.1)
            assert {each.result() for each in asking} == {"waits"}
    finally:
        worker.send_signal(signal.SIGCONT)
    answer = http.post("/v1/completions", json={**body, "prompt": "The"})
    assert answer.status_code == 200 and server.worker.pid == worker.pid
    deadline = time.monotonic() + 300
    while http.get("/load").json()["server_load"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
