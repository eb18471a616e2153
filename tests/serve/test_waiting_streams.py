"""Streams that wait: they are told from dead ones, and end when the engine does not come back."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Any

import pytest
from starlette.requests import Request

from max.pipelines.generation.process.commands import GenerationRequest
from max.pipelines.generation.process.events import TokensGenerated
from max.serve.errors import ApiError
from max.serve.http import streaming
from max.serve.http.streaming import ClientLeftError, event_stream
from max.serve.process.settings import WatchLimits
from max.serve.worker.client import (
    EngineClient,
    EngineState,
    EngineUnavailableError,
)
from tests.pipelines.counting_pipeline import expected
from tests.serve.hanging_worker import HangingWorker
from tests.serve.test_engine_client import Workers, until

SHORT_S = 0.1


def _error(error: ApiError) -> bytes:
    return f"data: {error.code}\n\n".encode()


class _Client:
    """A client that reads a stream, and disconnects when the test says so."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.leaves = asyncio.Event()
        self.closed = False

    async def receive(self) -> dict[str, Any]:
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message.get("body", b"start"))
        assert not self.closed
        self.closed = message["type"] == "http.response.body" and not message.get("more_body")

    async def read(self, events: AsyncGenerator[bytes, None], media_type: str) -> None:
        scope = {"type": "http", "method": "POST", "path": "/", "headers": [], "state": {}}
        response = await event_stream(Request(scope, self.receive), events, _error, media_type)
        await response(scope, self.receive, self.send)


def _run(test: Callable[[_Client], Any]) -> None:
    async def whole() -> None:
        async with asyncio.timeout(60):
            await test(_Client())
        assert len(asyncio.all_tasks()) == 1  # nothing is left behind

    asyncio.run(whole())


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "KEEP_ALIVE_S", SHORT_S)


@pytest.mark.parametrize("media_type", ["text/event-stream", "application/x-ndjson"])
@pytest.mark.parametrize("ends", ["whole", "error", "error first"])
def test_comments_while_a_stream_waits(media_type: str, ends: str) -> None:
    closed: list[bool] = []

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            await asyncio.sleep(3.5 * SHORT_S)
            if ends == "error first":
                raise TimeoutError("late")
            yield b"data: 1\n\n"
            await asyncio.sleep(3.5 * SHORT_S)
            yield b"data: 2\n\n"
            yield b"data: 3\n\n"
            if ends == "error":
                raise TimeoutError("late")
        finally:
            closed.append(True)

    async def test(client: _Client) -> None:
        if ends == "error first" and "json" in media_type:
            with pytest.raises(TimeoutError):
                await client.read(events(), media_type)
            return
        await client.read(events(), media_type)
        count = len(client.sent)
        await asyncio.sleep(2 * SHORT_S)
        assert client.closed and len(client.sent) == count
        plain = [part for part in client.sent if part != b": waiting\n\n"]
        numbers = [] if ends == "error first" else [b"data: %d\n\n" % i for i in (1, 2, 3)]
        last = [] if ends == "whole" else [b"data: timeout\n\n"]
        assert plain == [b"start", *numbers, *last, b""]
        if "json" in media_type:
            assert len(plain) == len(client.sent)
        else:
            assert client.sent[1] == b": waiting\n\n"
            assert len(client.sent) - len(plain) >= 2

    _run(test)
    assert closed == [True]


@pytest.mark.parametrize("after", [0.3, 0.9, 1.1, 2.5])
def test_a_client_that_leaves_while_it_waits(after: float) -> None:
    """Before the first comment, about it, or after it: the events are closed at once."""
    closed: list[bool] = []

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            await asyncio.sleep(3600)
            yield b""
        finally:
            closed.append(True)

    async def test(client: _Client) -> None:
        asyncio.get_running_loop().call_later(after * SHORT_S, client.leaves.set)
        with suppress(ClientLeftError):
            await client.read(events(), "text/event-stream")

    _run(test)
    assert closed == [True]


def test_requests_do_not_wait_for_ever_for_the_next_worker() -> None:
    """Neither those that wait already, nor later ones; all work again when it comes."""

    async def whole() -> None:
        workers, gate = Workers(), threading.Event()

        def start() -> Any:
            if workers.started:
                gate.wait(60)
            return workers.start()

        client = EngineClient(start, None, WatchLimits(wait_s=0.3))
        client.start()
        await client.wait_ready()
        workers.started[0].die()
        await until(lambda: client.state is EngineState.RESTARTING)
        late = r"starting again for more than 0\.3 s; try again later"
        with pytest.raises(EngineUnavailableError, match=late):
            with client.open([GenerationRequest("a", (1,), 4)]) as subscription:
                await subscription.next_events()
        with pytest.raises(EngineUnavailableError, match=late):
            with client.open([GenerationRequest("b", (1,), 4)]):
                raise AssertionError("it is open")
        gate.set()
        await until(lambda: client.state is EngineState.READY)
        with client.open([GenerationRequest("d", (1,), 4)]):
            assert workers.started[1].commands[-1].request_id == "d"
        await client.close()

    asyncio.run(whole())


def test_each_of_many_streams_ends_after_its_worker_was_killed() -> None:
    """With its whole answer, also if it had begun."""
    draw, workers = random.Random(5), list[HangingWorker]()

    def start() -> HangingWorker:
        workers.append(HangingWorker(5))
        return workers[-1]

    requests = [
        GenerationRequest(f"r{i}", (draw.randrange(90), i), 2 + draw.randrange(20, 200))
        for i in range(96)
    ]
    begun: set[str] = set()

    async def read(client: EngineClient, request: GenerationRequest) -> list[int]:
        tokens: list[int] = []
        with client.open([request]) as subscription:
            while True:
                for _, event in await subscription.next_events():
                    if isinstance(event, TokensGenerated):
                        begun.add(request.request_id)
                        tokens += event.tokens
                        if event.status.is_done:
                            return tokens

    async def whole() -> None:
        client = EngineClient(start)
        client.start()
        try:
            await client.wait_ready()
            async with asyncio.timeout(100):
                reading = [asyncio.ensure_future(read(client, each)) for each in requests]
                while len(begun) < 12:
                    await asyncio.sleep(0)
                workers[0]._process.kill()
                answers = await asyncio.gather(*reading)
        finally:
            await client.close(finish=False, timeout=0.1)
        assert len(workers) == 2
        for request, answer in zip(requests, answers, strict=True):
            assert answer == expected(request.tokens, request.max_length - 2)

    asyncio.run(whole())
