"""The bytes of the bodies of all open requests have a limit."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from max.serve.errors import ApiError
from max.serve.http.bodies.open_bodies import OpenBodies
from max.serve.http.middleware import Gate
from max.serve.http.state import ServerState
from max.serve.limits import LARGE_BODY
from max.serve.metrics import ServerMetrics
from max.serve.process.settings import ServerSettings


def test_the_sum_of_large_bodies_never_exceeds_the_limit() -> None:
    draw = random.Random(2)
    limit = 20 * LARGE_BODY
    bodies, sizes, refused = OpenBodies(limit), dict[int, int](), 0
    for step in range(3000):
        number = draw.choice([*sizes, step])
        if number in sizes and draw.random() < 0.3:
            bodies.release(sizes.pop(number))
        else:
            before = sizes.get(number, 0)
            after = before + draw.choice([1, 1000, LARGE_BODY, 3 * LARGE_BODY])
            try:
                bodies.grow(before, after)
            except ApiError as error:
                refused += 1
                assert error.status == 503 and error.headers == {"Retry-After": "1"}
                assert after > LARGE_BODY
                bodies.release(sizes.pop(number, 0))
            else:
                sizes[number] = after
        assert bodies.bytes == sum(size for size in sizes.values() if size > LARGE_BODY) <= limit
    assert refused > 50
    for size in sizes.values():
        bodies.release(size)
    assert bodies.bytes == 0


@pytest.mark.parametrize("limit", [1, 1 << 20])
def test_one_body_of_the_longest_length_is_read(limit: int) -> None:
    settings = ServerSettings(max_open_request_bytes=limit, max_request_bytes=300_000)
    state = ServerState(settings, ServerMetrics(), None)  # type: ignore[arg-type]
    assert state.bodies.limit == max(limit, 300_000)
    state.bodies.grow(0, 300_000)


def test_a_body_beyond_the_limit_is_refused_and_small_ones_are_read() -> None:
    bodies, hold, statuses = OpenBodies(3 * LARGE_BODY), asyncio.Event(), list[int]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        await hold.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    gate = Gate(app, ServerSettings(), ServerMetrics(), bodies=bodies)

    async def post(size: int, part: int) -> tuple[int, dict[bytes, bytes]]:
        """A body without a length, in parts."""
        sent, start = 0, dict[str, Any]()

        async def receive() -> dict[str, Any]:
            nonlocal sent
            await asyncio.sleep(0)
            length = min(part, size - sent)
            sent += length
            return {"type": "http.request", "body": b" " * length, "more_body": sent < size}

        async def send(message: dict[str, Any]) -> None:
            start.update(message if message["type"] == "http.response.start" else {})

        scope = {
            "type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"",
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        }  # fmt: skip
        try:
            await gate(scope, receive, send)
        except ApiError as error:  # the application's handler makes a response of it
            return error.status, {}
        return start["status"], dict(start["headers"])

    async def whole() -> None:
        first = asyncio.create_task(post(2 * LARGE_BODY, 7000))
        while bodies.bytes < 2 * LARGE_BODY:
            await asyncio.sleep(0)
        statuses.append((await post(2 * LARGE_BODY, 50_000))[0])
        assert bodies.bytes == 2 * LARGE_BODY
        small = asyncio.create_task(post(LARGE_BODY, 9000))
        await asyncio.sleep(0.05)
        hold.set()
        statuses.extend([(await first)[0], (await small)[0]])
        assert bodies.bytes == 0
        statuses.append((await post(2 * LARGE_BODY, 50_000))[0])
        assert bodies.bytes == 0

    asyncio.run(asyncio.wait_for(whole(), 60))
    assert statuses == [503, 200, 200, 200]
