"""Responses that end when their client disconnects: event streams, and whole answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from max.serve.errors import ApiError
from max.serve.http.error_responses import as_api_error

logger = logging.getLogger("max.serve")
BODY_SEND = "body_send"
"""The key of a connection's state for the function that sends parts of a body past all middleware."""
EVENTS_TYPE = "text/event-stream"
KEEP_ALIVE_S = 15.0
"""The maximum time in which a stream of server-sent events sends nothing: proxies close silent connections."""
_COMMENT = b": waiting\n\n"
"""A line that clients of server-sent events skip."""


def _comment() -> bytes:
    return _COMMENT


T = TypeVar("T")


class _Parts(Protocol):
    """The parts of a stream."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...

    def aclose(self) -> Coroutine[Any, Any, None]: ...


class ClientLeftError(Exception):
    """The client of a request has disconnected: nobody reads an answer."""


async def _wait_disconnected(receive: Receive) -> None:
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
    watcher = asyncio.ensure_future(_wait_disconnected(receive))
    try:
        await first_done(task, watcher)
        if not task.done():
            raise ClientLeftError
        return task.result()
    finally:
        await _end(task, watcher)


async def _end(work: asyncio.Future[Any], watcher: asyncio.Future[None]) -> None:
    """Ends work, and what watches its client; the work has ended then."""
    # a cancelled watcher takes nothing more from the connection, so nothing waits for its end
    watcher.cancel()
    if not work.done():
        work.cancel()
        await asyncio.wait({work})


async def first_done(*futures: asyncio.Future[Any], timeout: float | None = None) -> None:
    """Waits until one of several futures is done, with less around it than `asyncio.wait` has.

    Args:
        futures: The futures.
        timeout: The longest time in seconds; None: no limit.
    """
    loop = asyncio.get_running_loop()
    done = loop.create_future()

    def end(future: asyncio.Future[Any] | None) -> None:
        if not done.done():
            done.set_result(None)

    for each in futures:
        each.add_done_callback(end)
    timer = None if timeout is None else loop.call_later(timeout, end, None)
    try:
        await done
    finally:
        if timer is not None:
            timer.cancel()
        for each in futures:
            each.remove_done_callback(end)


class EventStream(Response):
    """A stream of events. The generator is closed when the stream ends or the client disconnects.

    Args:
        first: The first events.
        rest: The others.
        error_event: Makes the last event, of an error within the stream.
        media_type: The type of the stream.
        waiting: Makes what is sent where nothing else is sent for some time.
    """

    def __init__(
        self,
        first: bytes,
        rest: _Parts,
        error_event: Callable[[ApiError], bytes],
        media_type: str = EVENTS_TYPE,
        waiting: Callable[[], bytes] = _comment,
    ) -> None:
        super().__init__(
            status_code=200,
            # nginx would collect events before it passes them on
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
            media_type=media_type,
        )
        # a stream has no length
        self.raw_headers = [header for header in self.raw_headers if header[0] != b"content-length"]
        self._first, self._rest, self._error_event = first, rest, error_event
        self._waiting = waiting
        self._sent_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._comment: asyncio.Future[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the stream.

        Args:
            scope: The connection.
            receive: Returns the disconnect of the client.
            send: Sends a part.
        """
        producer = asyncio.ensure_future(self._produce(scope, send))
        watcher = asyncio.ensure_future(_wait_disconnected(receive))
        try:
            await first_done(producer, watcher)
            if producer.done():
                producer.result()
        finally:
            await _end(producer, watcher)
            await self._rest.aclose()

    async def _produce(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        # the middleware reads the start of a response only
        send = scope["state"].get(BODY_SEND, send)
        try:
            await self._send_part(send, self._first)
            if self.media_type == EVENTS_TYPE:
                self._look(send)
            try:
                async for part in self._rest:
                    await self._send_part(send, part)
            except Exception as error:
                await self._send_part(send, self._error_event(as_api_error(error)))
        finally:
            if self._timer is not None:
                self._timer.cancel()
            if self._comment is not None:
                self._comment.cancel()
                # no comment may follow the end of the body
                await asyncio.gather(self._comment, return_exceptions=True)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_part(self, send: Send, part: bytes) -> None:
        # first all streams of a step make their events, then all are written: a reader that wakes on the
        # first one would otherwise take the core from the other streams
        await asyncio.sleep(0)
        self._sent_at = asyncio.get_running_loop().time()
        await send({"type": "http.response.body", "body": part, "more_body": True})

    def _look(self, send: Send) -> None:
        """Sends a comment if nothing was sent for some time, and looks again later."""
        loop = asyncio.get_running_loop()
        silence = loop.time() - self._sent_at
        if silence >= KEEP_ALIVE_S:
            silence = 0.0
            if self._comment is None or self._comment.done():
                self._comment = asyncio.ensure_future(self._send_part(send, self._waiting()))
        self._timer = loop.call_later(KEEP_ALIVE_S - silence, self._look, send)


class _LateParts:
    """The parts of a stream whose first part is still awaited.

    Args:
        first: The first part.
        rest: The others.
    """

    def __init__(self, first: asyncio.Future[bytes], rest: AsyncGenerator[bytes, None]) -> None:
        self._first: asyncio.Future[bytes] | None = first
        self._rest = rest

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if self._first is None:
            return await anext(self._rest)
        part = await self._first
        self._first = None
        return part

    async def aclose(self) -> None:
        if self._first is not None:
            # `aclose` of a generator raises while a step of it runs
            self._first.cancel()
            await asyncio.gather(self._first, return_exceptions=True)
        await self._rest.aclose()


async def _result_within(
    receive: Receive, task: asyncio.Future[T], seconds: float | None
) -> T | None:
    """The result of a task, which goes on if that takes longer; None then.

    Raises:
        ClientLeftError: The client has disconnected before.
    """
    watcher = asyncio.ensure_future(_wait_disconnected(receive))
    try:
        await first_done(task, watcher, timeout=seconds)
        if task.done():
            return task.result()
        if watcher.done():
            raise ClientLeftError
        return None
    finally:
        watcher.cancel()


async def event_stream(
    request: Request,
    events: AsyncGenerator[bytes, None],
    error_event: Callable[[ApiError], bytes],
    media_type: str = EVENTS_TYPE,
    waiting: Callable[[], bytes] = _comment,
) -> Response:
    """A stream whose first event was received, so that an earlier error has its own status; but a stream of server-sent
    events begins without it if that takes long, as in a full queue or for a long prompt.

    Args:
        request: The client's request.
        events: The events.
        error_event: Makes the last event, of an error within the stream.
        media_type: The type of the stream.
        waiting: Makes what a stream of server-sent events sends where nothing else is sent for some time; a comment by
            default.

    Raises:
        ClientLeftError: The client disconnected before the first event.
        Exception: Raised by the generator before the first event.
    """
    awaited = asyncio.ensure_future(anext(events))
    parts = _LateParts(awaited, events)
    try:
        # only such streams have comments, which keep a silent connection open
        patience = KEEP_ALIVE_S if media_type == EVENTS_TYPE else None
        first = await _result_within(request.receive, awaited, patience)
    except BaseException:
        await parts.aclose()
        raise
    if first is None:
        return EventStream(waiting(), parts, error_event, media_type, waiting)
    return EventStream(first, events, error_event, media_type, waiting)
