"""The client of a worker amid its steps: a stop during a start, threads that run out, events that fail."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from max.pipelines.generation.process.channel import ConnectionChannel, MessageCodec
from max.pipelines.generation.process.commands import Shutdown
from max.pipelines.generation.process.events import EngineReady
from max.serve.process.settings import WorkerSettings
from max.serve.worker import process, started_worker
from max.serve.worker import replica as worker_replica
from max.serve.worker.client import EngineClient, EngineState, EngineUnavailableError
from max.serve.worker.engine_state import NoMachineError
from max.serve.worker.process import WorkerProcess
from max.serve.worker.queued_channel import QueuedChannel
from tests.serve.test_engine_client import END, FakeWorker, Workers, request, tokens, until

WAIT_S = 30


async def one(client: EngineClient, name: str = "a") -> list:
    """The events of a request."""
    events: list = []
    with client.open([request(name)]) as subscription:
        while not events or not events[-1].status.is_done:
            events += [event for _, event in await subscription.next_events()]
    return events


class GatedWorkers(Workers):
    """The first worker starts at once, the others when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.goes_on = threading.Event(), threading.Event()

    def start(self) -> FakeWorker:
        if self.started:
            self.begun.set()
            assert self.goes_on.wait(WAIT_S)
        return super().start()


@pytest.mark.parametrize("finish", [False, True])
def test_a_stop_while_a_worker_is_started_again(finish: bool) -> None:
    """Those who wait for it get an error at once, and the worker that comes is ended before the stop has."""

    async def whole() -> None:
        workers = GatedWorkers()
        client = EngineClient(workers.start)
        client.start()
        await client.wait_ready()
        waiting = asyncio.ensure_future(one(client))
        await until(lambda: client.open_requests)
        workers.started[0].die()
        assert await asyncio.to_thread(workers.begun.wait, WAIT_S)
        closing = asyncio.ensure_future(client.close(finish=finish))
        with pytest.raises(EngineUnavailableError, match="shuts down"):
            await waiting
        assert not closing.done(), "a worker that starts holds memory"
        workers.goes_on.set()
        await closing
        assert workers.started[1].dead and client.state is EngineState.STOPPED
        with pytest.raises(EngineUnavailableError):
            await one(client)

    asyncio.run(whole())


def test_a_stop_while_a_dead_worker_is_awaited() -> None:
    """Its end is awaited in a thread, which kills it after the time also where nobody waits any more."""
    joins, goes_on, killed = threading.Event(), threading.Event(), threading.Event()

    class Hangs(FakeWorker):
        def join(self, timeout=None) -> None:
            joins.set()
            assert goes_on.wait(WAIT_S)

        def kill(self) -> None:
            killed.set()

    async def whole() -> None:
        worker = Hangs()
        client = EngineClient(lambda: worker)
        client.start()
        worker.events.put(EngineReady(4, 128, 10))
        await client.wait_ready()
        worker.die()
        assert await asyncio.to_thread(joins.wait, WAIT_S)
        await client.close()
        goes_on.set()
        assert await asyncio.to_thread(killed.wait, WAIT_S)

    asyncio.run(whole())


def test_ends_leave_the_threads_of_the_loop_to_others() -> None:
    joins, goes_on = threading.Semaphore(0), threading.Event()

    class Slow(FakeWorker):
        def join(self, timeout=None) -> None:
            joins.release()
            assert goes_on.wait(WAIT_S)

    async def whole() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        clients: list[EngineClient] = []
        for _ in range(3):
            worker = Slow()
            clients.append(EngineClient(lambda worker=worker: worker))
            clients[-1].start()
            worker.events.put(EngineReady(4, 128, 10))
            await clients[-1].wait_ready()
        closing = [asyncio.ensure_future(client.close()) for client in clients]
        while not all(client.state is EngineState.STOPPED for client in clients):
            await asyncio.sleep(0)
        async with asyncio.timeout(WAIT_S):
            for _ in range(3):
                await asyncio.to_thread(joins.acquire, timeout=WAIT_S)
        goes_on.set()
        await asyncio.gather(*closing)

    asyncio.run(whole())


def test_a_client_that_was_closed_holds_no_worker() -> None:
    """Tracebacks may hold the client for long, and so the files of the worker."""

    async def whole() -> None:
        workers = Workers()
        client = EngineClient(workers.start)
        client.start()
        await client.wait_ready()
        forgetting = asyncio.ensure_future(client.forget_prefixes())
        await until(lambda: client.replicas[0]._answers.are_awaited)
        await client.close()
        async with asyncio.timeout(WAIT_S):
            await forgetting
        del workers.started[0].channel  # which is the worker itself
        worker = weakref.ref(workers.started.pop())
        await until(lambda: worker() is None)  # as soon as the thread that reads it has ended
        await client.close()
        assert client.state is EngineState.STOPPED and client.worker_pid is None

    gc.disable()
    try:
        asyncio.run(whole())
    finally:
        gc.enable()


@pytest.mark.parametrize("error", [OSError(11, "no process"), RuntimeError("can't start new thread")])  # fmt: skip
def test_whatever_keeps_workers_from_starting(error, monkeypatch, caplog) -> None:
    """It is tried again; then the requests get the reason, and none waits for ever."""
    monkeypatch.setattr(worker_replica, "_FIRST_DELAY_S", 1e-3)

    async def whole() -> None:
        workers, attempts = Workers(), 0

        def start() -> FakeWorker:
            nonlocal attempts
            attempts += 1
            if attempts > 1:
                raise error
            return workers.start()

        client = EngineClient(start)
        client.start()
        await client.wait_ready()
        waiting = asyncio.ensure_future(one(client))
        await until(lambda: client.open_requests)
        workers.started[0].die()
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(EngineUnavailableError, match="no worker can be started: "):
                await waiting
        assert client.state is EngineState.STOPPED
        assert attempts == 1 + worker_replica.MOST_FAILED_STARTS
        await client.close()

    asyncio.run(whole())
    assert f"a worker process cannot be started: {error}" in caplog.text


def test_a_cluster_without_room_is_asked_until_it_has_some(monkeypatch) -> None:
    """Of two replicas one waits for a machine, longer than starts that fail are tried, and comes back."""
    monkeypatch.setattr(started_worker, "NO_MACHINE_S", 1e-3)

    async def whole() -> None:
        workers, refusals = Workers(), 3 * worker_replica.MOST_FAILED_STARTS

        def start() -> FakeWorker:
            nonlocal refusals
            if len(workers.started) > 1 and refusals:
                refusals -= 1
                raise NoMachineError("no machine")
            return workers.start()

        client = EngineClient(start)
        client.add_replica(start)
        client.start()
        async with asyncio.timeout(WAIT_S):
            await client.wait_ready()
            workers.started[1].die()
            await until(lambda: client.replicas[1].state is EngineState.RESTARTING)
            await until(lambda: client.replicas[1].state is EngineState.READY)
        assert not refusals and len(workers.started) == 3
        await client.close(finish=False)

    asyncio.run(whole())


def test_a_stop_does_not_wait_for_a_machine(monkeypatch) -> None:
    """A start that takes long keeps no server, and the worker that comes after all is ended."""
    monkeypatch.setattr(started_worker, "_LAST_START_S", 0.1)
    workers = GatedWorkers()

    async def whole() -> None:
        client = EngineClient(workers.start)
        client.start()
        await client.wait_ready()
        workers.started[0].die()
        await asyncio.to_thread(workers.begun.wait, WAIT_S)
        async with asyncio.timeout(WAIT_S):
            await client.close(finish=False)
        assert len(workers.started) == 1 and client.state is EngineState.STOPPED

    asyncio.run(whole())
    workers.goes_on.set()
    end = time.monotonic() + WAIT_S
    while len(workers.started) < 2 or not workers.started[1].dead:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_worker_without_a_thread_that_reads_it_is_ended(monkeypatch) -> None:
    """The next one is read."""
    monkeypatch.setattr(worker_replica, "_FIRST_DELAY_S", 1e-3)
    start_thread, refused = threading.Thread.start, 0

    def start(thread: threading.Thread) -> None:
        nonlocal refused
        if thread.name == "engine events" and len(workers.started) == 2 and not refused:
            refused += 1
            raise RuntimeError("can't start new thread")
        start_thread(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    workers = Workers()

    async def whole() -> None:
        client = EngineClient(workers.start)
        client.start()
        await client.wait_ready()
        workers.started[0].die()
        await until(lambda: len(workers.started) == 3 and client.state is EngineState.READY)
        assert refused == 1 and workers.started[1].dead and not workers.started[2].dead
        await client.close(finish=False)

    asyncio.run(whole())


def test_the_end_of_a_worker_that_cannot_be_awaited(caplog) -> None:
    """The next one starts nevertheless."""

    class Endless(FakeWorker):
        def join(self, timeout=None) -> None:
            raise RuntimeError("no thread")

    async def whole() -> None:
        first, workers = Endless(), Workers()
        client = EngineClient(workers.start, first)
        client.start()
        first.events.put(EngineReady(4, 128, 10))
        await client.wait_ready()
        first.die()
        await until(lambda: client.restarts == 1 and client.state is EngineState.READY)
        await client.close(finish=False)

    asyncio.run(whole())
    assert "the end of a worker process cannot be awaited" in caplog.text


def test_an_event_that_cannot_be_handled_loses_no_other(caplog) -> None:
    class Frames(FakeWorker):
        def receive_all(self) -> list:
            event = self.receive()
            return event if isinstance(event, list) else [event]

    async def whole() -> None:
        worker = Frames()
        client = EngineClient(lambda: worker)
        client.start()
        worker.events.put(EngineReady(4, 128, 10))
        await client.wait_ready()
        waiting = asyncio.ensure_future(one(client))
        await until(lambda: worker.commands)
        broken: Any = None
        worker.events.put([replace(tokens(1), tokens=broken), tokens(2, status=END)])
        async with asyncio.timeout(WAIT_S):
            assert await waiting == [tokens(2, status=END)]
        await client.close(finish=False)

    asyncio.run(whole())
    assert "an event of the worker process was lost" in caplog.text


class Refuses(FakeWorker):
    """A worker whose channel cannot encode the requests of one name."""

    def send(self, message) -> None:
        if getattr(message, "request_id", "") == "wrong":
            raise TypeError("a message has a set, which msgpack cannot hold")
        super().send(message)


def test_a_request_that_cannot_be_encoded_leaves_nothing_open() -> None:
    async def whole() -> None:
        worker = Refuses()
        client = EngineClient(lambda: worker)
        client.start()
        worker.events.put(EngineReady(4, 128, 10))
        await client.wait_ready()
        with pytest.raises(TypeError, match="a message has a set"):
            with client.open([request("right"), request("wrong")], timeout=1000.0):
                raise AssertionError("it is open")
        assert client.open_requests == 0
        await client.close(finish=False)

    asyncio.run(whole())


def test_a_request_that_cannot_be_encoded_when_the_next_worker_is_ready() -> None:
    """It fails alone."""

    async def whole() -> None:
        workers = GatedWorkers()
        client = EngineClient(lambda: refusing(workers.start()))
        client.start()
        await client.wait_ready()
        workers.started[0].die()
        await until(lambda: client.state is EngineState.RESTARTING)
        wrong, right = (asyncio.ensure_future(one(client, name)) for name in ("wrong", "right"))
        await until(lambda: client.open_requests == 2)
        workers.goes_on.set()
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(TypeError, match="a message has a set"):
                await wrong
        await until(lambda: workers.started[1].commands)
        workers.started[1].events.put(tokens(3, name="right", status=END))
        assert await right == [tokens(3, name="right", status=END)]
        await client.close(finish=False)

    def refusing(worker: FakeWorker) -> FakeWorker:
        worker.__class__ = Refuses
        return worker

    asyncio.run(whole())


def channels() -> tuple[QueuedChannel, ConnectionChannel]:
    here, there = multiprocessing.Pipe()
    return (
        QueuedChannel(ConnectionChannel(here, MessageCodec())),
        ConnectionChannel(there, MessageCodec()),
    )


def test_a_message_that_cannot_be_encoded_is_its_senders_error() -> None:
    """The channel goes on."""
    here, there = channels()
    with pytest.raises(TypeError, match="set is no message"):
        here.send({1})
    here.send(Shutdown(True))
    assert there.receive() == Shutdown(True)
    here.end_sends()
    here._sends._thread.join(WAIT_S)
    assert not here._sends._thread.is_alive()


def test_a_channel_without_a_thread_is_no_channel(monkeypatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(OSError, match="can't start new thread"):
        channels()


def test_a_process_that_cannot_be_started_leaves_no_thread(monkeypatch) -> None:
    made: list[QueuedChannel] = []
    monkeypatch.setattr(
        process, "QueuedChannel", lambda of: made.append(QueuedChannel(of)) or made[-1]
    )
    monkeypatch.setattr(
        "multiprocessing.context.SpawnProcess.start",
        lambda self: (_ for _ in ()).throw(OSError(11, "no process")),
    )
    settings = WorkerSettings({})
    with pytest.raises(OSError, match="no process"):
        WorkerProcess(settings)
    (channel,) = made
    channel._sends._thread.join(WAIT_S)
    assert not channel._sends._thread.is_alive()
