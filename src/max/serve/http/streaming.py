"""Responses that end when their client disconnects: event streams, and whole answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from max.serve.errors import ApiError
from max.serve.http.failures import as_api_error

logger = logging.getLogger("max.serve")
BODY_SEND = "body_send"
"""The key of a connection's state for the function that sends parts of a body past all middleware."""
T = TypeVar("T")


class ClientLeftError(Exception):
    """The client of a request has disconnected: nobody reads an answer."""


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine until its client disconnects.

    Args:
        request: The client's request; its body was read.
        work: The coroutine; cancelled if the client disconnects.

    Returns:
        Its result.

    Raises:
        ClientLeftError: The client has disconnected.
    """
    return await unless_left(request.receive, work)


async def unless_left(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """As :func:`unless_disconnected`.

    Args:
        receive: Returns the disconnect of the client; the whole body was read.
        work: The coroutine; cancelled if the client disconnects.

    Raises:
        ClientLeftError: The client has disconnected.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeftError
        return task.result()
    finally:
        for each in (task, watcher):
            each.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


class EventStream(Response):
    """A stream of events. The generator is closed when the stream ends or the client disconnects.

    Args:
        first: The first events.
        rest: The others.
        error_event: Makes the last event, of an error within the stream.
        media_type: The type of the stream.
    """

    def __init__(
        self,
        first: bytes,
        rest: AsyncGenerator[bytes, None],
        error_event: Callable[[ApiError], bytes],
        media_type: str = "text/event-stream",
    ) -> None:
        super().__init__(
            status_code=200,
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
            media_type=media_type,
        )
        # a stream has no length
        self.raw_headers = [header for header in self.raw_headers if header[0] != b"content-length"]
        self._first, self._rest, self._error_event = first, rest, error_event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the stream.

        Args:
            scope: The connection.
            receive: Returns the disconnect of the client.
            send: Sends a part.
        """
        producer = asyncio.ensure_future(self._produce(scope, send))
        watcher = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({producer, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if producer.done():
                producer.result()
        finally:
            for each in (producer, watcher):
                each.cancel()
            await asyncio.gather(producer, watcher, return_exceptions=True)
            await self._rest.aclose()

    async def _produce(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        # the middleware reads the start of a response only
        send = scope["state"].get(BODY_SEND, send)
        await _send_part(send, self._first)
        try:
            async for part in self._rest:
                await _send_part(send, part)
        except Exception as error:
            await _send_part(send, self._error_event(as_api_error(error)))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_part(send: Send, part: bytes) -> None:
    # first all streams of a step make their events, then all are written: a reader that wakes on the
    # first one would otherwise take the core from the other streams
    await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": part, "more_body": True})


async def event_stream(
    request: Request,
    events: AsyncGenerator[bytes, None],
    error_event: Callable[[ApiError], bytes],
    media_type: str = "text/event-stream",
) -> Response:
    """A stream whose first event was received, so that an earlier error has its own status.

    Args:
        request: The client's request.
        events: The events.
        error_event: Makes the last event, of an error within the stream.
        media_type: The type of the stream.

    Raises:
        ClientLeftError: The client disconnected before the first event.
        Exception: Raised by the generator before the first event.
    """
    try:
        first = await unless_disconnected(request, anext(events))
    except ClientLeftError:
        await events.aclose()
        raise
    return EventStream(first, events, error_event, media_type)
