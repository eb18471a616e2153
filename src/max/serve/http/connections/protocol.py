"""HTTP on a connection: uvicorn's protocol with limits on the size of heads and on waiting times."""

from __future__ import annotations

import asyncio
import socket
import sys
from http import HTTPStatus
from typing import Any

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from max.serve.errors import ApiError
from max.serve.http.connections.hosts import TARGET_HOST, WEBSOCKET_PATH

MAX_HEAD_BYTES = 64 << 10
"""The maximum size of a request line with its headers, if they come in several parts."""
HEAD_S = 30.0
"""The maximum time for a head to arrive, on a new connection too."""
BODY_S = 60.0
"""The maximum time between two parts of a body."""
PROBES_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
"""The seconds between checks whether a client that has closed its half of a connection has closed the other one too."""
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class BoundedProtocol(HttpToolsProtocol):
    """A connection.

    A request that offers HTTP/2 (``Upgrade: h2c``, as Java's client does) is read as HTTP/1.1 with its body, which
    httptools would skip. An answer of unknown length to a client of HTTP/1.0 ends with the connection.
    """

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._in_head = self._in_body = self._offers_upgrade = False
        self._head_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._running: RequestResponseCycle | None = None  # the request that is answered next
        # sent after the answers to earlier requests; ends the connection
        self._last: bytes | None = None

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
        super().connection_lost(exc)  # notifies the newest request only
        if self._running is not None:
            self._running.disconnected = True
            self._running.message_event.set()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Ends the connection of a client that sends nothing more, after the answers to its requests.

        A client that disconnects closes both halves, which looks the same until it refuses what is sent to it: an
        answer that has begun, else a 100 (Continue), which clients of HTTP/1.1 skip. Clients of HTTP/1.0 count as
        disconnected, as proxies of HTTP/1.0 close a connection in this way.

        Returns:
            Whether the connection stays open meanwhile.
        """
        # nothing is left to answer, or the request that runs will never have its whole body
        if not self._answers or (self._in_body and not self.pipeline):
            return False
        # asyncio cannot close one half of TLS, and does not report refused data on Windows
        if self.scheme == "https" or sys.platform == "win32":
            return False
        assert self._running is not None
        if not self._running.response_started:
            if self._running.scope["http_version"] != "1.1":
                return False
            self.transport.write(_CONTINUE)
        self._drop_unread()
        self._end(self._last or b"")
        self._look(*PROBES_S)
        return True

    def _look(self, seconds: float, *later: float) -> None:
        """Checks after some time whether the client has refused what was sent to it."""

        def look() -> None:
            if self.transport.is_closing():
                return
            connection = self.transport.get_extra_info("socket")
            # a client that has closed both halves resets the connection when data arrives
            if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self.transport.abort()
            elif later:
                self._look(*later)

        self._timer = self.loop.call_later(seconds, look)

    def data_received(self, data: bytes) -> None:
        """Reads a part of a request, or of several.

        Args:
            data: The part.
        """
        if self._last is not None:
            return
        self._unset_keepalive_if_required()
        if not self._in_head:  # the parts of a head share one time limit
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
        # set once for a head: a client that sends byte by byte does not renew it
        if self._in_head and self._timer is None:
            self._arm(HEAD_S)

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as pause:
            # httptools pauses after the head of CONNECT, too
            if self.parser.get_method() == b"CONNECT":
                raise httptools.HttpParserError("this is no proxy") from None
            if self._takes_websocket():
                self._disarm()
                # uvicorn writes the head anew from the scope, whose method only its `on_headers_complete` sets
                self.scope["method"] = "GET"
                self.handle_websocket_upgrade()
                return
            # RFC 9110, 7.8: an offer may be ignored; a paused parser reads no body, so another one starts anew
            body = data[pause.args[0] :]
            head = self._head_without_upgrade()
            self.parser = httptools.HttpRequestParser(self)
            self._feed(head + body)

    def _takes_websocket(self) -> bool:
        """Whether the connection becomes a WebSocket: no earlier answer is under way, and the server takes them."""
        if self.ws_protocol_class is None or self._answers or self._last is not None:
            return False
        offered = [value.strip().lower() for name, value in self.headers if name == b"upgrade"]
        has_key = any(name == b"sec-websocket-key" for name, _ in self.headers)
        path = self.url.partition(b"?")[0].decode("latin-1")
        is_offered = self.parser.get_method() == b"GET" and offered == [b"websocket"] and has_key
        return is_offered and path == WEBSOCKET_PATH

    def _head_without_upgrade(self) -> bytes:
        """The head of the request that was read, without the headers that offer another protocol."""
        version = self.parser.get_http_version().encode()
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + version]
        for name, value in self.headers:
            # RFC 9110, 7.6.1: Connection names the headers of one hop, so their names go with them
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
        """Starts a request, unless it is read again without its offer of another protocol."""
        self._in_head = False
        self._offers_upgrade = self.parser.should_upgrade()
        if not self._offers_upgrade:
            self._in_body = True
            self._disarm()
            if not self.url.startswith((b"/", b"*")):  # a whole URL, whose host counts as well
                host = httptools.parse_url(self.url).host or b""
                self.scope.setdefault("state", {})[TARGET_HOST] = _bracket_address(
                    host.decode("latin-1")
                )
            super().on_headers_complete()
            self.cycle.transport = _HeadJoiner(self.cycle, self.loop)  # type: ignore[assignment]
            if self.parser.get_http_version() == "1.0":
                self.cycle.send = _ended_by_close(self.cycle)

    def on_message_complete(self) -> None:
        """Ends the body of a request."""
        if not self._offers_upgrade:
            self._in_body = False
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Starts the next request, or ends a connection without one."""
        super().on_response_complete()
        if self._last is not None:
            self._end(self._last)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    @property
    def _answers(self) -> bool:
        """Whether an answer is being sent; answers to pipelined requests come after it."""
        return self._running is not None and not self._running.response_complete

    def _drop_unread(self) -> None:
        """Drops a pipelined request whose body is not complete."""
        if self._in_body and self.pipeline:
            self.pipeline.popleft()
        self._in_head = self._in_body = False

    def _end(self, last: bytes) -> None:
        """Closes the connection after the answers to earlier requests; nothing more is read.

        Args:
            last: Sent after them.
        """
        self._disarm()
        if self._answers:
            self._last = last
            return
        if not self.transport.is_closing():
            self.transport.write(last)
        self.transport.close()

    def _arm(self, seconds: float) -> None:
        self._disarm()
        self._timer = self.loop.call_later(seconds, self._late)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        """Ends a connection on which nothing arrives in time."""
        self._timer = None
        if self.transport.is_closing():
            return
        # earlier requests are answered first
        if self.pipeline or (self._in_head and self._answers):
            self._arm(HEAD_S)
        elif self._in_head or self._in_body:
            self._refuse(408, "the request did not come in time")
        else:
            self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        """Closes the connection after the answers to earlier requests, with an error if no answer has begun."""
        body = msgspec.json.encode(ApiError(message, status=status).body())
        lines = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            "connection: close",
        )
        error = "\r\n".join(lines).encode() + b"\r\n\r\n" + body
        if self._in_body and not self.pipeline:  # the refused request runs already
            if self.cycle.response_started:
                error = b""
            # its cycle never completes: `_end` would wait for it
            self._running = None
        self._drop_unread()
        self._end(error)


class _HeadJoiner:
    """Stands for the transport of a request until its answer has begun: the head is sent together with what follows it
    at once, as one packet in place of two.

    Args:
        cycle: The request.
        loop: The event loop.
    """

    def __init__(self, cycle: RequestResponseCycle, loop: asyncio.AbstractEventLoop) -> None:
        self._cycle, self._loop, self._transport = cycle, loop, cycle.transport
        self._head = b""
        self.is_closing = cycle.transport.is_closing
        """Whether it closes."""

    def write(self, data: bytes) -> None:
        """Sends data; a head with the next data, or after what runs now.

        Args:
            data: The data.
        """
        if self._head:
            self._cycle.transport = self._transport
            self._transport.write(self._head + data)
            self._head = b""
        # the client sends its body only after it
        elif data == _CONTINUE:
            self._transport.write(data)
        else:
            self._head = data
            # the head of a stream does not wait for the first event
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Sends the head, if nothing has followed it."""
        if self._head:
            self.write(b"")

    def close(self) -> None:
        """Closes it."""
        self._flush()
        self._transport.close()


def _bracket_address(host: str) -> str:
    """A host as the header ``Host`` has it; parsed URLs have IPv6 addresses without brackets."""
    return f"[{host}]" if ":" in host else host


def _ended_by_close(cycle: RequestResponseCycle) -> Any:
    """Sends an answer without chunks, as HTTP/1.0 has none, and ends it with the connection.

    Args:
        cycle: The request.
    """
    send = cycle.send

    async def send_plain(message: Any) -> None:
        cycle.chunked_encoding = False
        cycle.expected_content_length = len(message.get("body", b""))  # uvicorn compares this field
        await send(message)

    return send_plain
