"""The client of a worker: which requests it repeats or fails, and when it gives up. Workers are threads here."""

from __future__ import annotations

import asyncio
import queue
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType

import pytest

from max.interfaces import GenerationStatus
from max.pipelines.core.exceptions import ConfigError
from max.pipelines.generation.process.commands import CancelRequest, GenerationRequest, Shutdown
from max.pipelines.generation.process.events import (
    EngineReady,
    EngineStopped,
    ErrorInfo,
    PromptStarted,
    RequestFailed,
    TokensGenerated,
)
from max.serve.worker.client import (
    EngineClient,
    EngineLostError,
    EngineState,
    EngineUnavailableError,
)
from max.serve.worker.suspects import MOST_LOSSES

ACTIVE, END = GenerationStatus.ACTIVE, GenerationStatus.END_OF_SEQUENCE


class FakeWorker:
    """A worker whose events the test sends and whose commands the test reads."""

    exit_reason = "signal SIGKILL"
    pid = 1
    signs = None
    is_full = False

    def __init__(self) -> None:
        self.channel = self
        self.events: queue.SimpleQueue = queue.SimpleQueue()
        self.commands: list = []
        self.dead = False

    def send(self, message) -> None:
        if self.dead:
            raise BrokenPipeError
        self.commands.append(message)
        if isinstance(message, Shutdown):
            self.die()

    def send_soon(self, message, loop) -> None:
        with suppress(OSError):
            self.send(message)

    def receive(self):
        event = self.events.get()
        if event is None:
            raise EOFError
        return event

    def receive_all(self) -> list:
        return [self.receive()]

    def die(self) -> None:
        self.dead = True
        self.events.put(None)

    def join(self, timeout=None) -> None: ...

    def kill(self) -> None:
        self.die()

    def close(self) -> None: ...


class Workers:
    """The workers that a client has started."""

    def __init__(self, ready: bool = True) -> None:
        self.started: list[FakeWorker] = []
        self.ready = ready

    def start(self) -> FakeWorker:
        worker = FakeWorker()
        self.started.append(worker)
        if self.ready:
            worker.events.put(EngineReady(4, 128, 10))
        else:
            worker.die()
        return worker


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.005)


def tokens(*numbers: int, name: str = "a", status: GenerationStatus = ACTIVE) -> TokensGenerated:
    return TokensGenerated(name, numbers, status)


def request(name: str = "a") -> GenerationRequest:
    return GenerationRequest(name, (1, 2), 9)


def run(test) -> None:
    """Runs a test with a client that is ready."""

    async def whole() -> None:
        workers = Workers()
        client = EngineClient(workers.start)
        client.start()
        await client.wait_ready()
        await test(client, workers)
        await client.close(finish=False)
        assert client.open_requests == 0

    asyncio.run(whole())


def test_tokens_on_their_way_to_a_task_pass_one_file() -> None:
    """`docs/pipelines.md` counts the files that a chunk passes."""
    files: set[str] = set()

    def record(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and "max" in Path(frame.f_code.co_filename).parts:
            files.add(Path(frame.f_code.co_filename).name)

    async def test(client: EngineClient, workers: Workers) -> None:
        with client.open([request()]) as subscription:
            await until(lambda: workers.started[0].commands)
            workers.started[0].events.put(tokens(1))
            await subscription.next_events()
            sent, received = [tokens(number) for number in range(2, 6)], []
            sys.setprofile(record)
            try:
                for event in sent:
                    workers.started[0].events.put(event)
                    received += await subscription.next_events()
            finally:
                sys.setprofile(None)
            assert received == [(0, event) for event in sent]

    run(test)
    assert files == {"subscription.py"}


def test_tokens_come_in_order_and_those_that_wait_are_joined() -> None:
    async def test(client: EngineClient, workers: Workers) -> None:
        (worker,) = workers.started
        with client.open([request()]) as subscription:
            assert worker.commands == [request()]
            worker.events.put(tokens(5))
            assert await subscription.next_events() == [(0, tokens(5))]
            for event in (tokens(6), tokens(7), tokens(8, status=END)):
                worker.events.put(event)
            await until(lambda: client.open_requests == 0)
            assert await subscription.next_events() == [(0, tokens(6, 7, 8, status=END))]
        assert CancelRequest("a") not in worker.commands

    run(test)


def test_a_stream_that_is_closed_cancels_its_request() -> None:
    async def test(client: EngineClient, workers: Workers) -> None:
        (worker,) = workers.started
        with client.open([request()]) as subscription:
            worker.events.put(tokens(5))
            await subscription.next_events()
        assert worker.commands == [request(), CancelRequest("a")]

    run(test)


def test_one_task_reads_several_requests() -> None:
    """Waiting events of a stream are returned together; streams are cancelled singly; an error is the last event."""

    async def test(client: EngineClient, workers: Workers) -> None:
        (worker,) = workers.started
        names = ("a", "b", "c")
        with client.open([request(name) for name in names]) as subscription:
            assert worker.commands == [request(name) for name in names]
            with pytest.raises(ValueError, match="request b is open already"):
                with client.open([request("d"), request("b")]):
                    pass
            with pytest.raises(ValueError, match="request d is open already"):
                with client.open([request("d"), request("d")]):
                    pass
            waiting = asyncio.ensure_future(subscription.next_events())
            await asyncio.sleep(0)
            client.replicas[0]._take(worker, tokens(1, name="b"))
            client.replicas[0]._take(worker, tokens(2, name="a"))
            client.replicas[0]._take(worker, tokens(3, name="b"))
            assert await waiting == [(1, tokens(1, 3, name="b")), (0, tokens(2, name="a"))]
            subscription.cancel(0)
            subscription.cancel(0)
            assert worker.commands[3:] == [CancelRequest("a")]
            client.replicas[0]._take(worker, tokens(4, name="a"))
            client.replicas[0]._take(worker, tokens(5, name="c", status=END))
            client.replicas[0]._take(worker, RequestFailed("b", ErrorInfo("ValueError", "no")))
            assert await subscription.next_events() == [(2, tokens(5, name="c", status=END))]
            with pytest.raises(RuntimeError, match="generation failed: no"):
                await subscription.next_events()
        assert worker.commands[4:] == []

    run(test)


def test_a_dead_worker_is_replaced() -> None:
    """Requests without tokens run again, the others go on after the tokens that have arrived."""

    async def test(client: EngineClient, workers: Workers) -> None:
        first = workers.started[0]
        silent = asyncio.ensure_future(_all(client, request("silent")))
        begun = asyncio.ensure_future(_all(client, request("begun")))
        echo = replace(request("echo"), log_probabilities=1, log_probabilities_echo=True)
        echoed = asyncio.ensure_future(_all(client, echo))
        await until(lambda: len(first.commands) == 3)
        first.events.put(PromptStarted("begun", 1.0))
        first.events.put(tokens(5, 6, name="begun"))
        first.events.put(tokens(6, name="echo"))
        first.die()
        await until(lambda: client.state is EngineState.READY and len(workers.started) == 2)
        second = workers.started[1]
        rest = replace(request("begun"), generated_tokens=(5, 6))
        rest_of_echo = replace(echo, generated_tokens=(6,), log_probabilities_echo=False)
        # one after another, so that it is known which one ends a worker
        assert second.commands == [request("silent")]
        second.events.put(tokens(7, name="silent", status=END))
        await until(lambda: second.commands[1:] == [rest])
        second.events.put(PromptStarted("begun", 2.0))
        await until(lambda: second.commands[2:] == [rest_of_echo])
        second.events.put(tokens(8, name="begun"))
        await until(lambda: client.entries["begun"].generated)
        second.events.put(tokens(9, name="echo", status=END))
        second.die()
        await until(lambda: client.state is EngineState.READY and len(workers.started) == 3)
        third = workers.started[2]
        assert third.commands == [replace(rest, generated_tokens=(5, 6, 8))]
        third.events.put(tokens(9, name="begun", status=END))
        assert await silent == [tokens(7, name="silent", status=END)]
        assert await echoed == [tokens(6, name="echo"), tokens(9, name="echo", status=END)]
        # that the prompt is read again is not told
        assert await begun == [
            PromptStarted("begun", 1.0),
            tokens(5, 6, name="begun"),
            tokens(8, name="begun"),
            tokens(9, name="begun", status=END),
        ]
        assert client.restarts == 2

    run(test)


def test_a_request_that_kills_workers_fails() -> None:
    async def test(client: EngineClient, workers: Workers) -> None:
        deadly = asyncio.ensure_future(_all(client, request()))
        for number in range(MOST_LOSSES):
            await until(lambda n=number: len(workers.started) == n + 1)
            await until(lambda n=number: workers.started[n].commands)
            workers.started[number].die()
        with pytest.raises(EngineLostError, match="3 worker processes died over this"):
            await deadly
        await until(lambda: client.state is EngineState.READY)

    run(test)


def test_it_gives_up_where_no_worker_starts() -> None:
    async def test(client: EngineClient, workers: Workers) -> None:
        waiting = asyncio.ensure_future(_all(client, request()))
        await until(lambda: workers.started[0].commands)
        workers.ready = False
        workers.started[0].die()
        with pytest.raises(EngineUnavailableError, match="no worker can be started"):
            await waiting
        assert client.state is EngineState.STOPPED
        with pytest.raises(EngineUnavailableError):
            await _all(client, request())

    run(test)


def test_an_error_of_loading_is_raised() -> None:
    async def whole() -> None:
        worker = FakeWorker()
        client = EngineClient(lambda: worker)
        client.start()
        worker.events.put(EngineStopped(ErrorInfo("ConfigError", "no such model", "Give another.")))
        worker.die()
        with pytest.raises(ConfigError, match="no such model"):
            await client.wait_ready()
        await client.close()

    asyncio.run(whole())


def test_a_request_that_takes_too_long_is_cancelled() -> None:
    async def test(client: EngineClient, workers: Workers) -> None:
        with pytest.raises(TimeoutError, match=r"more than 0.05 s"):
            await _all(client, request(), timeout=0.05)
        assert workers.started[0].commands == [request(), CancelRequest("a")]

    run(test)


async def _all(client: EngineClient, message: GenerationRequest, **options) -> list:
    """The events of a request."""
    events: list = []
    with client.open([message], **options) as subscription:
        while not events or not getattr(events[-1], "status", ACTIVE).is_done:
            events += [event for _, event in await subscription.next_events()]
    return events
