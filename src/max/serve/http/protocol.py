"""HTTP on a connection: uvicorn's protocol with bounds on heads and on time."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from max.serve.errors import ApiError

MAX_HEAD_BYTES = 64 << 10
"""The longest request line with its headers, where they come in several parts."""
HEAD_S = 30.0
"""The longest time in which a head comes, of a new connection too."""
BODY_S = 60.0
"""The longest time between two parts of a body."""


class BoundedProtocol(HttpToolsProtocol):
    """A connection.

    A request that offers HTTP/2 (``Upgrade: h2c``, as Java's client does) is read as HTTP/1.1 with its body, which
    httptools would skip.
    """

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._in_head = self._in_body = self._offers_upgrade = False
        self._head_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begins a connection.

        Args:
            transport: Its other side.
        """
        super().connection_made(transport)
        self._arm(HEAD_S)

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends a connection.

        Args:
            exc: Why; None: one of both sides has closed it.
        """
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Reads a part of a request, or of several.

        Args:
            data: The part.
        """
        self._unset_keepalive_if_required()
        if not self._in_head:  # a head has one time for all of its parts
            self._disarm()
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self._refuse(400, "the request is no HTTP/1.1, or not a clear one")
            return
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(431, f"the headers are longer than {MAX_HEAD_BYTES} bytes")
        elif self._in_body:
            self._arm(BODY_S)
        if self._in_head and self._timer is None:
            self._arm(HEAD_S)

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as pause:
            if self.parser.get_method() == b"CONNECT":
                raise httptools.HttpParserError("this is no proxy") from None
            rest = data[pause.args[0] :]
            head = self._head_without_upgrade()
            self.parser = httptools.HttpRequestParser(self)
            self._feed(head + rest)

    def _head_without_upgrade(self) -> bytes:
        """The head of the request that was read, without what offers another protocol."""
        version = self.parser.get_http_version().encode()
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + version]
        for name, value in self.headers:
            if name == b"connection":
                tokens = [token.strip().lower() for token in value.split(b",")]
                value = b", ".join(t for t in tokens if t not in (b"upgrade", b"http2-settings"))
            if name not in (b"upgrade", b"http2-settings") and (value or name != b"connection"):
                lines.append(name + b": " + value)
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def on_message_begin(self) -> None:
        """Begins a request."""
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0

    def on_headers_complete(self) -> None:
        """Starts a request, unless it is read again without what it offers."""
        self._in_head = False
        self._offers_upgrade = self.parser.should_upgrade()
        if not self._offers_upgrade:
            self._in_body = True
            self._disarm()
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Ends the body of a request."""
        if not self._offers_upgrade:
            self._in_body = False
            super().on_message_complete()

    def _arm(self, seconds: float) -> None:
        self._disarm()
        self._timer = self.loop.call_later(seconds, self._late)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        """Ends a connection on which nothing comes."""
        self._timer = None
        answering = self.cycle is not None and not self.cycle.response_complete
        if self.transport.is_closing():
            return
        # earlier requests have their answers first
        if self.pipeline or (self._in_head and answering):
            self._arm(HEAD_S)
        elif self._in_head or self._in_body:
            self._refuse(408, "the request did not come in time")
        else:
            self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        """Closes the connection, with an error where no answer has begun."""
        cycle = self.cycle
        if self._in_body:
            writes = not cycle.response_started and not self.pipeline
        else:
            writes = cycle is None or cycle.response_complete
        if writes and not self.transport.is_closing():
            body = msgspec.json.encode(ApiError(message, status=status).body())
            lines = (
                f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
                "content-type: application/json",
                f"content-length: {len(body)}",
                "connection: close",
            )
            self.transport.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        self._in_head = self._in_body = False
        self._disarm()
        self.transport.close()
