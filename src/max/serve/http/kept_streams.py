"""Answers that outlive their connection: a client that lost it, as a page that was reloaded, reads them again."""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from max.serve.errors import ApiError, short_text
from max.serve.http.error_responses import ErrorBody, openai_body, send_error
from max.serve.http.streaming import BODY_SEND
from max.serve.requests.request_context import current_request

HEADER = "x-stream-id"
"""The header of a POST request whose answer is kept; the client chooses the identifier."""
_HEADER = HEADER.encode()
ABANDONED_S = 120.0
"""The time after which an answer that nobody reads is ended."""
KEPT_S = 600.0
"""The time for which an answer is kept after its end."""
MOST_BYTES = 64 << 20
MOST_BYTES_OF_ONE = 16 << 20
MOST_STREAMS = 1024
MOST_RUNNING_OF_CLIENT = 32

_IDENTIFIER = re.compile(r"[A-Za-z0-9_-]{16,64}")
_AGAIN = frozenset((429, 503))
"""The statuses of answers whose request may come again with the same identifier."""
_DISCONNECT: Message = {"type": "http.disconnect"}


@dataclass(eq=False)
class KeptStream:
    """An answer, as far as it was made.

    Args:
        client: Who may read it.
        identifier: Identifies it among the client's.

    Attributes:
        start: The message with its status and headers; None: it has not begun.
        parts: The parts of its body.
        num_parts: Their number, with those that were dropped.
        size: Their bytes.
        readers: The connections that receive it.
        dropped: Whether its parts were dropped because they took too much memory.
        ended: Whether it is complete, or was stopped.
        stop_event: Set when it must end.
        change_event: Set, and replaced, at each change.
        timer: Ends or removes it later.
    """

    client: str
    identifier: str
    start: Message | None = None
    parts: list[bytes] = field(default_factory=list)
    num_parts: int = 0
    size: int = 0
    readers: int = 0
    dropped: bool = False
    ended: bool = False
    stop_event: asyncio.Event = field(default_factory=asyncio.Event)
    change_event: asyncio.Event = field(default_factory=asyncio.Event)
    timer: asyncio.TimerHandle | None = None

    def notify(self) -> None:
        """Wakes those that wait for a change."""
        # a new event for the next change, as one that is set stays set
        changed, self.change_event = self.change_event, asyncio.Event()
        changed.set()

    async def body(self) -> AsyncGenerator[bytes, None]:
        """Yields the parts of the body from the first one, until it ends.

        Raises:
            ApiError: Parts were dropped before they were read: what was read is not the whole.
        """
        sent = 0
        while True:
            # taken before the parts are read, so that a part that comes meanwhile is not missed
            changed = self.change_event
            while sent < len(self.parts):
                sent += 1
                yield self.parts[sent - 1]
            if self.dropped and sent < self.num_parts:
                raise ApiError(
                    f"the rest of the stream {short_text(self.identifier)} is not kept: it took too much memory, "
                    f"was deleted, or ended more than {KEPT_S:.0f} s ago",
                    status=410,
                    code="stream_not_found",
                )
            if self.ended:
                return
            await changed.wait()


class KeptStreams:
    """The answers that are kept, by client and identifier."""

    def __init__(self) -> None:
        self._streams: OrderedDict[tuple[str, str], KeptStream] = OrderedDict()
        self._bytes = 0

    def begin(self, identifier: str, client: str) -> KeptStream:
        """Begins an answer.

        Args:
            identifier: Identifies it.
            client: Who may read it.

        Raises:
            ApiError: The identifier is not valid or in use, or the client has too many answers that run.
        """
        if not _IDENTIFIER.fullmatch(identifier):
            raise ApiError(
                f"the header X-Stream-Id is {short_text(identifier)}; it has 16 to 64 letters, digits, - and _",
                param="X-Stream-Id",
            )
        used = self._streams.get((client, identifier))
        # a request that came too early, or at a time of too many others, may come again
        if used is not None and used.ended and used.start and used.start["status"] in _AGAIN:
            self._remove(used)
        elif used is not None:
            raise ApiError(f"there is a stream {short_text(identifier)} already", status=409)
        running = [key for key, each in self._streams.items() if not each.ended]
        if sum(key[0] == client for key in running) >= MOST_RUNNING_OF_CLIENT:
            raise ApiError(
                f"{MOST_RUNNING_OF_CLIENT} kept streams of this client run; stop one, or leave out X-Stream-Id",
                status=429,
                code="too_many_kept_streams",
            )
        if len(running) >= MOST_STREAMS:
            raise ApiError("too many kept streams run", status=503, code="too_many_kept_streams")
        stream = self._streams[client, identifier] = KeptStream(client, identifier)
        return stream

    def find(self, identifier: str, client: str) -> KeptStream:
        """An answer.

        Args:
            identifier: Identifies it.
            client: Who asks for it.

        Raises:
            ApiError: Status 404: it is not kept, or is another client's.
        """
        found = self._streams.get((client, identifier))
        if found is None or found.dropped:
            raise ApiError(
                f"there is no stream {short_text(identifier)}: it never began, ended more than {KEPT_S:.0f} s ago, "
                "or took too much memory",
                status=404,
                code="stream_not_found",
            )
        return found

    def attach(self, stream: KeptStream) -> None:
        """Adds a reader.

        Args:
            stream: The answer.
        """
        stream.readers += 1
        if not stream.ended:
            self._disarm(stream)

    def detach(self, stream: KeptStream) -> None:
        """Removes a reader; an answer without one ends after some time.

        Args:
            stream: The answer.
        """
        stream.readers -= 1
        if not stream.readers and not stream.ended:
            self._arm(stream, ABANDONED_S, stream.stop_event.set)

    def add(self, stream: KeptStream, message: Message) -> None:
        """Keeps a message of an answer.

        Args:
            stream: The answer.
            message: The start, or a part of the body.
        """
        if message["type"] == "http.response.start":
            stream.start = message
        elif part := message.get("body", b""):
            stream.num_parts += 1
            if not stream.dropped:
                self._keep(stream, part)
        stream.notify()

    def end(self, stream: KeptStream) -> None:
        """Ends an answer, which stays for some time.

        Args:
            stream: The answer.
        """
        stream.ended = True
        stream.notify()
        self._arm(stream, KEPT_S, lambda: self._remove(stream))
        self._trim()

    def stop(self, stream: KeptStream) -> None:
        """Stops an answer; one that has ended is removed.

        Args:
            stream: The answer.
        """
        stream.stop_event.set()
        if stream.ended:
            self._remove(stream)

    def _arm(self, stream: KeptStream, seconds: float, action: Callable[[], None]) -> None:
        self._disarm(stream)
        stream.timer = asyncio.get_running_loop().call_later(seconds, action)

    def _disarm(self, stream: KeptStream) -> None:
        if stream.timer is not None:
            stream.timer.cancel()
            stream.timer = None

    def _keep(self, stream: KeptStream, part: bytes) -> None:
        stream.parts.append(part)
        stream.size += len(part)
        self._bytes += len(part)
        if stream.size > MOST_BYTES_OF_ONE:
            self._drop(stream)
        self._trim()

    def _drop(self, stream: KeptStream) -> None:
        self._bytes -= stream.size
        stream.parts, stream.size, stream.dropped = [], 0, True

    def _remove(self, stream: KeptStream) -> None:
        if self._streams.pop((stream.client, stream.identifier), None) is not None:
            self._disarm(stream)
            self._drop(stream)
            stream.notify()

    def _trim(self) -> None:
        """Removes the oldest complete answers, then drops the parts of the largest ones, where there are too many."""
        if len(self._streams) <= MOST_STREAMS and self._bytes <= MOST_BYTES:
            return
        # a list, as `_remove` changes the map
        for stream in [each for each in self._streams.values() if each.ended]:
            self._remove(stream)
            if len(self._streams) <= MOST_STREAMS and self._bytes <= MOST_BYTES:
                return
        # only answers that run are left
        while self._bytes > MOST_BYTES:
            self._drop(max(self._streams.values(), key=lambda each: each.size))


def is_kept(scope: Scope) -> bool:
    """Whether a request asks for an answer that is kept.

    Args:
        scope: The connection.
    """
    for name, _ in scope["headers"]:
        if name == _HEADER:
            return True
    return False


class StreamKeeper:
    """An application whose answers to requests with the header ``X-Stream-Id`` are kept.

    The application is not told that the client of such a request has disconnected, until the answer is stopped.

    Args:
        app: The application.
        streams: Keeps the answers.
        error_body: Makes the bodies of errors.
    """

    def __init__(
        self, app: ASGIApp, streams: KeptStreams, error_body: ErrorBody = openai_body
    ) -> None:
        self._app, self._streams, self._error_body = app, streams, error_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles a connection.

        Args:
            scope: The connection.
            receive: Its body, then the disconnect of its client.
            send: Sends its answer.
        """
        identifier = None
        if scope["type"] == "http" and scope["method"] == "POST":
            identifier = Headers(scope=scope).get(HEADER)
        if identifier is None:
            await self._app(scope, receive, send)
            return
        try:
            stream = self._streams.begin(identifier, current_request().client)
        except ApiError as error:
            await send_error(send, error, self._error_body(scope["path"], error))
            return
        await _Connection(self._streams, stream, scope, receive, send).run(self._app)


class _Connection:
    """The connection on which a kept answer was asked for."""

    def __init__(
        self, streams: KeptStreams, stream: KeptStream, scope: Scope, receive: Receive, send: Send
    ) -> None:
        self._streams, self._stream, self._scope = streams, stream, scope
        self._source, self._target = receive, send
        # as `EventStream` sends parts of a body: past all middleware
        self._body_target: Send = scope.get("state", {}).get(BODY_SEND, send)
        self._connected = self._has_body = self._whole = False

    async def run(self, app: ASGIApp) -> None:
        streams, stream = self._streams, self._stream
        streams.attach(stream)
        self._connected = True
        if BODY_SEND in self._scope.get("state", {}):
            self._scope["state"][BODY_SEND] = self._send_body
        current = current_request()
        # the wait for a model's load looks for a disconnect as well
        if current.receive is not None:
            current.receive = self._receive
        try:
            await app(self._scope, self._receive, self._send)
            if stream.start is not None and not self._whole:  # stopped: the connection ends well
                await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            streams.end(stream)
            self._leave()

    def _leave(self) -> None:
        if self._connected:
            self._connected = False
            self._streams.detach(self._stream)

    async def _receive(self) -> Message:
        """A part of the request's body; a disconnect only when the answer is stopped."""
        stopped = asyncio.ensure_future(self._stream.stop_event.wait())
        try:
            if self._connected:
                source = asyncio.ensure_future(self._source())  # type: ignore[arg-type]
                try:
                    await asyncio.wait({source, stopped}, return_when=asyncio.FIRST_COMPLETED)
                    if not source.done():
                        return _DISCONNECT
                    message = source.result()
                finally:
                    source.cancel()
                    await asyncio.gather(source, return_exceptions=True)
                if message["type"] != "http.disconnect":
                    self._has_body = not message.get("more_body", False)
                    return message
                # the client has left, and the answer is made for its return
                self._leave()
                if not self._has_body:  # there is nothing to answer
                    return message
            await stopped
            return _DISCONNECT
        finally:
            stopped.cancel()
            await asyncio.gather(stopped, return_exceptions=True)

    async def _send(self, message: Message) -> None:
        is_body = message["type"] == "http.response.body"
        await self._keep(message, self._body_target if is_body else self._target)

    async def _send_body(self, message: Message) -> None:
        await self._keep(message, self._body_target)

    async def _keep(self, message: Message, target: Send) -> None:
        self._streams.add(self._stream, message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            self._whole = True
        if self._connected:
            await target(message)
