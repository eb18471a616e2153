"""A worker that does not read its commands holds up nobody but its own requests."""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from max.pipelines.generation.process.channel import ConnectionChannel, MessageCodec
from max.pipelines.generation.process.commands import (
    CancelRequest,
    ForgetPrefixes,
    GenerationRequest,
)
from max.pipelines.generation.process.events import EngineReady, PrefixesForgotten
from max.serve.worker import answers, queued_channel
from max.serve.worker.client import EngineClient, EngineUnavailableError
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


def test_frames_of_one_turn_are_sent_together_and_in_order() -> None:
    here, there = map(ConnectionChannel, multiprocessing.Pipe())
    channel, draw = QueuedChannel(here), random.Random(5)
    calls: list[int] = []
    send = channel._sends.send
    channel._sends.send = lambda *frames: calls.append(len(frames)) or send(*frames)  # type: ignore[method-assign]

    async def turns(*counts: int) -> list[object]:
        """Sends `abs(count)` messages by `send_soon` in each turn of the loop; after a negative count one by `send`."""
        sent: list[object] = []
        for count in counts:
            for _ in range(abs(count)):
                sent.append((len(sent), draw.randbytes(draw.choice((1, 3000)))))
                channel.send_soon(sent[-1], asyncio.get_running_loop())
            if count < 0:
                sent.append("now")
                channel.send("now")
            await asyncio.sleep(0)
        return sent

    with ThreadPoolExecutor(1) as pool:
        counts = [3, 1, -2, 0, 16, -16, *(draw.randint(-9, 9) for _ in range(20))]
        expected = sum(map(abs, counts)) + sum(count < 0 for count in counts)
        reading = pool.submit(lambda: [there.receive() for _ in range(expected)])
        assert asyncio.run(turns(*counts)) == reading.result(60)
    assert calls == [abs(count) + (count < 0) for count in counts if count]
    # many bytes do not wait for the end of the turn, as they count as unread only once they are sent
    calls.clear()
    loop = asyncio.new_event_loop()
    for size in (60_000, 4_000, 4_000, 90_000):
        channel.send_soon(b"x" * size, loop)
    assert calls == [3, 1] and [len(there.receive()) for _ in calls] == [60_000, 4_000]
    loop.run_until_complete(asyncio.sleep(0))  # the calls of the turn find nothing
    loop.close()
    assert calls == [3, 1]
    channel.close()


def test_a_message_that_cannot_be_encoded_harms_no_other_of_its_turn() -> None:
    here, there = multiprocessing.Pipe()
    channel = QueuedChannel(ConnectionChannel(here, MessageCodec()))
    received = ConnectionChannel[CancelRequest, CancelRequest](there, MessageCodec())

    async def whole() -> None:
        loop = asyncio.get_running_loop()
        channel.send_soon(CancelRequest("a"), loop)
        with pytest.raises(TypeError, match="no message"):
            channel.send_soon({1}, loop)
        channel.send_soon(CancelRequest("b"), loop)
        await asyncio.sleep(0)
        assert [received.receive() for _ in "ab"] == [CancelRequest("a"), CancelRequest("b")]
        there.close()
        # whoever receives finds the end; a send at once still tells it
        for _ in range(3):
            channel.send_soon(CancelRequest("c"), loop)
            await asyncio.sleep(0)
        with pytest.raises(OSError):
            channel.send(CancelRequest("d"))

    asyncio.run(whole())
    channel.close()


def test_a_stopped_worker(server: RunningServer, http: httpx.Client) -> None:
    """Its requests wait, all else is answered, and it goes on where it was."""
    body = {"prompt": [[5] * 480] * 128, "max_tokens": 1, "temperature": 0}

    def ask() -> str:
        try:
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=1.5)
        except httpx.TimeoutException:
            return "waits"
        return "answered"

    worker = server.wait_ready().worker
    worker.send_signal(signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(4) as pool:
            asking = [pool.submit(ask) for _ in range(4)]
            while not all(each.done() for each in asking):
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


class UnreadWorker:
    """A worker that reads only when the test says so, and is not watched."""

    pid, signs, exit_reason = 1, None, "signal SIGKILL"

    def __init__(self) -> None:
        self._here, self._there = multiprocessing.Pipe()
        self.channel = QueuedChannel(ConnectionChannel(self._here, MessageCodec()))
        self.commands: ConnectionChannel = ConnectionChannel(self._there, MessageCodec())
        self.commands.send(EngineReady(4, 128, 1000))

    def join(self, timeout: float | None = None) -> None: ...

    def kill(self) -> None:
        self._there.close()
        self.channel.end_sends()


def unread(name: str) -> GenerationRequest:
    return GenerationRequest(name, (70_000,) * 50_000, 9)  # 250 kB


def with_workers(
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    test: Callable[[EngineClient, list[UnreadWorker]], Awaitable[None]],
) -> None:
    """Runs a test with a client whose workers may leave 2 MiB unread."""
    monkeypatch.setattr(queued_channel, "MOST_UNREAD_BYTES", 2 << 20)

    async def whole() -> None:
        workers = [UnreadWorker() for _ in range(count)]
        client = EngineClient(UnreadWorker, workers[0])
        for worker in workers[1:]:
            client.add_replica(UnreadWorker, worker)
        client.start()
        await client.wait_ready()
        try:
            await test(client, workers)
        finally:
            for worker in workers:
                worker.kill()
            await client.close(finish=False)

    asyncio.run(whole())


def opened(client: EngineClient, name: str) -> None:
    """A client that asks, and goes away at once."""
    with client.open([unread(name)]):
        pass


def fill(client: EngineClient, number: int = 0) -> int:
    """Asks until a request is refused; the number of those that were taken."""
    for taken in range(1000):
        try:
            opened(client, f"{number}-{taken}")
        except EngineUnavailableError as error:
            assert "does not read its requests" in str(error)
            return taken
    raise AssertionError("no request is refused")


def left(worker: UnreadWorker) -> int:
    return worker.channel._sends.left_bytes


def test_requests_to_a_worker_that_does_not_read_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also those of clients that went away; once it has read, it gets all that was taken, in order."""

    async def test(client: EngineClient, workers: list[UnreadWorker]) -> None:
        (worker,) = workers
        taken = fill(client)
        assert 2 << 20 < left(worker) < (2 << 20) + 260_000 and 8 <= taken < 20
        for _ in range(3):
            with pytest.raises(EngineUnavailableError), client.open([unread("x")]):
                pass
            with (
                pytest.raises(EngineUnavailableError),
                client.open([unread("x")], on=client.replicas[0]),
            ):
                pass
        assert client.open_requests == 0
        names = [f"0-{number}" for number in range(taken)]
        commands = await asyncio.to_thread(lambda: [worker.commands.receive() for _ in names * 2])
        assert commands == [c for n in names for c in (unread(n), CancelRequest(n))]
        while left(worker):
            await asyncio.sleep(0.001)
        with client.open([unread("later")]):
            assert await asyncio.to_thread(worker.commands.receive) == unread("later")

    with_workers(monkeypatch, 1, test)


def test_other_workers_take_what_one_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(client: EngineClient, workers: list[UnreadWorker]) -> None:
        silent, other = workers
        while left(silent) <= 2 << 20:  # as other requests do, whichever the router chooses
            silent.channel.send(unread("of another"))
        for number in range(8):
            with client.open([unread(f"a{number}")]):
                assert await asyncio.to_thread(other.commands.receive) == unread(f"a{number}")
            assert await asyncio.to_thread(other.commands.receive) == CancelRequest(f"a{number}")
        before = left(silent)
        with client.open([unread("kept")]):
            assert fill(client, 1) and left(other) > 2 << 20 and left(silent) == before
            # one that was accepted goes on, whoever reads it
            await client.remove_replica(client.replicas[1], timeout=0)
            assert left(silent) > before
        sent: list[object] = []

        def read() -> None:
            while sent[-1:] != [CancelRequest("kept")]:
                sent.append(silent.commands.receive())

        await asyncio.to_thread(read)
        assert sent[-2] == unread("kept")
        assert all(command == unread("of another") for command in sent[:-2])

    with_workers(monkeypatch, 2, test)


def test_commands_that_are_not_answered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of clients that went away count until the worker answers a later one."""
    monkeypatch.setattr(answers, "MOST_UNANSWERED", 5)

    async def test(client: EngineClient, workers: list[UnreadWorker]) -> None:
        (worker,) = workers
        for _ in range(5):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.forget_prefixes(), 0.001)
        with pytest.raises(EngineUnavailableError, match="does not answer"):
            await client.forget_prefixes()
        sent = await asyncio.to_thread(lambda: [worker.commands.receive() for _ in range(5)])
        assert sent == [ForgetPrefixes(number) for number in range(1, 6)]
        worker.commands.send(PrefixesForgotten(5))
        asked = None
        while asked is None:  # until the answer has arrived
            asked = asyncio.ensure_future(client.forget_prefixes())
            await asyncio.sleep(0.01)
            if asked.done():
                assert isinstance(asked.exception(), EngineUnavailableError)
                asked = None
        assert await asyncio.to_thread(worker.commands.receive) == ForgetPrefixes(6)
        worker.commands.send(PrefixesForgotten(6))
        await asked

    with_workers(monkeypatch, 1, test)
