"""Limits of API keys: refused requests, and the accuracy of Retry-After."""

from __future__ import annotations

import asyncio
import random
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import uvicorn

from max.serve.batch import call
from max.serve.errors import ApiError
from max.serve.http.middleware import Gate
from max.serve.metrics import ServerMetrics
from max.serve.models.admission import KeyLimits
from max.serve.process.settings import ServerSettings
from max.serve.requests.request_context import current_request


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def refused(limits: KeyLimits, client: str) -> int | None:
    """The Retry-After of a request; None: it is accepted."""
    try:
        with limits.enter(client):
            return None
    except ApiError as error:
        assert error.status == 429
        return int(error.headers["Retry-After"])


@pytest.mark.parametrize("per_minute", [1, 7, 60, 250])
def test_a_rate_and_its_retry_after(per_minute: float) -> None:
    """A request is accepted after that time, and refused 1.5 seconds before."""
    clock, numbers = Clock(), random.Random(per_minute)
    limits = KeyLimits(per_minute=per_minute, clock=clock)
    accepted = 0
    for _ in range(300):
        seconds = refused(limits, "a")
        if seconds is None:
            accepted += 1
            continue
        assert refused(limits, "b") is None or accepted > per_minute
        early = max(seconds - 1.5, 0)
        clock.now += early
        if early:
            assert refused(limits, "a") is not None
        clock.now += seconds - early
        assert refused(limits, "a") is None
        accepted += 1
        clock.now += numbers.random()
    assert accepted <= per_minute + (clock.now - 100) * per_minute / 60 + 1


def test_open_requests_of_a_key() -> None:
    clock = Clock()
    limits = KeyLimits(max_open=2, clock=clock)
    with ExitStack() as stack:
        stack.enter_context(limits.enter("a"))
        stack.enter_context(limits.enter("a"))
        with pytest.raises(ApiError, match="has 2 open requests, and at most 2 may be") as error:
            stack.enter_context(limits.enter("a"))
        assert error.value.code == "key_concurrency_limit"
        assert refused(limits, "b") is None
        clock.now += 9
    # both took 9 s: one of two ends after half of it
    with ExitStack() as stack:
        stack.enter_context(limits.enter("a"))
        stack.enter_context(limits.enter("a"))
        assert refused(limits, "a") == 5
    assert refused(limits, "a") is None


def test_keys_have_limits_of_their_own() -> None:
    clients: list[str] = []

    async def app(scope, receive, send) -> None:
        clients.append(current_request().client)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    settings = ServerSettings(api_keys=("first", "second"), key_requests_per_minute=2)
    gate = Gate(app, settings, ServerMetrics())

    async def send(key: str) -> SimpleNamespace:
        async def keyed(scope, receive, send) -> None:
            header = (b"authorization", f"Bearer {key}".encode())
            await gate({**scope, "headers": [*scope["headers"], header]}, receive, send)

        status, _, body = await call(keyed, "/v1/completions", {})
        return SimpleNamespace(status=status, body=body)

    async def whole() -> None:
        assert [(await send("first")).status for _ in range(3)] == [200, 200, 429]
        answer = await send("first")
        assert answer.body["error"]["code"] == "key_rate_limit"
        assert answer.body["error"]["type"] == "rate_limit_error"
        assert (await send("second")).status == 200
        assert (await send("wrong")).status == 401

    asyncio.run(whole())
    first, _, second = clients
    assert first != second and "first" not in first and len(first) == 12


@pytest.mark.parametrize("keys", [(), ("first",)])
def test_clients_without_keys_are_told_apart_by_their_addresses(keys: tuple[str, ...]) -> None:
    """In the order of the engine; the limits are those of keys, and all share one where there are none."""
    clients: list[str] = []

    async def app(scope, receive, send) -> None:
        clients.append(current_request().client)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    settings = ServerSettings(api_keys=keys, key_requests_per_minute=3)
    gate = Gate(app, settings, ServerMetrics())

    async def status(client: tuple[str, int] | None) -> int:
        async def from_there(scope, receive, send) -> None:
            header = (b"authorization", b"Bearer first")
            headers = [*scope["headers"], header]
            await gate({**scope, "client": client, "headers": headers}, receive, send)

        return (await call(from_there, "/v1/completions", {}))[0]

    async def whole() -> None:
        addresses = [("10.0.0.1", 9), ("10.0.0.2", 9), None, ("10.0.0.3", 9)]
        assert [await status(each) for each in addresses] == [200, 200, 200, 429]

    asyncio.run(whole())
    if keys:
        assert len(set(clients)) == 1 and clients[0] not in ("", "10.0.0.1")
    else:
        assert clients == ["10.0.0.1", "10.0.0.2", ""]


def test_the_addresses_of_clients_behind_a_proxy_on_this_machine() -> None:
    """As the server's configuration has it."""
    clients: list[str] = []

    async def app(scope, receive, send) -> None:
        clients.append(current_request().client)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    config = uvicorn.Config(Gate(app, ServerSettings(), ServerMetrics()), log_config=None)
    config.load()

    async def from_there(address: str) -> None:
        async def proxied(scope, receive, send) -> None:
            headers = [*scope["headers"], (b"x-forwarded-for", b"10.0.0.7")]
            scope = {**scope, "client": (address, 9), "headers": headers}
            await config.loaded_app(scope, receive, send)

        await call(proxied, "/v1/completions", {})

    async def whole() -> None:
        await from_there("127.0.0.1")
        await from_there("10.0.0.1")

    asyncio.run(whole())
    assert clients == ["10.0.0.7", "10.0.0.1"]
