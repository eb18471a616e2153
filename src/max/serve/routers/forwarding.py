"""Requests whose state one process holds: routers hand them to the owner of the engines.

A router answers what needs no state but the engines'. Stored responses, kept streams, models, adapters, metrics and the
cluster are the owner's: it has the whole application too, at a socket file, and gets these requests with the address of
their client. WebSockets are handed over as they come.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable
from typing import Any

import h11
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from max.serve.errors import ApiError
from max.serve.http.connections.hosts import TARGET_HOST
from max.serve.http.error_responses import ErrorBody, openai_body, send_error
from max.serve.http.kept_streams import is_kept

logger = logging.getLogger("max.serve")

PEER = b"x-supremum-peer"
"""The header of a forwarded request with what its router knows of the connection; routers remove it from clients'."""
_STATELESS = frozenset(
    (
        "POST /v1/chat/completions", "POST /v1/completions", "POST /v1/messages", "POST /v1/messages/count_tokens",
        "POST /api/chat", "POST /api/generate", "POST /api/embed", "POST /api/embeddings", "POST /v1/embeddings",
        "POST /rerank", "POST /v1/rerank", "POST /v2/rerank", "POST /reranking", "POST /v1/reranking", "POST /score",
        "POST /v1/score", "POST /tokenize", "POST /v1/tokenize", "POST /detokenize", "POST /v1/detokenize",
        "POST /apply-template", "POST /v1/apply-template", "POST /infill", "POST /v1/decisions", "POST /invocations",
        "GET /health", "GET /v1/health", "GET /ping", "GET /version", "HEAD /health", "HEAD /ping",
    )
)  # fmt: skip
"""The routes that a router answers itself."""
# RFC 9110, 7.6.1: headers of one hop; h11 frames each hop's body anew
_OF_CONNECTION = frozenset((b"connection", b"keep-alive", b"transfer-encoding", b"expect", b"te"))
_READ_BYTES = 64 << 10
_HEAD_BYTES = 128 << 10


class Forwarder:
    """The application of a router: what it does not answer itself, the owner does.

    Args:
        app: The application, with all routes.
        owner: The path of the owner's socket file.
        is_ready: Whether this router answers requests; before, the owner answers all of them.
        error_body: Makes the bodies of errors.
    """

    def __init__(
        self,
        app: ASGIApp,
        owner: str,
        is_ready: Callable[[], bool],
        error_body: ErrorBody = openai_body,
    ) -> None:
        self._app, self._owner, self._is_ready = app, owner, is_ready
        self._error_body = error_body
        self.open = 0
        """The requests that are open, forwarded ones too."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles a connection.

        Args:
            scope: The connection.
            receive: Its body.
            send: Its response.
        """
        self.open += 1
        try:
            if self._is_own(scope):
                await self._app(scope, receive, send)
            else:
                await self._forward(scope, receive, send)
        finally:
            self.open -= 1

    def _is_own(self, scope: Scope) -> bool:
        if f"{scope['method']} {scope['path']}" not in _STATELESS or not self._is_ready():
            return False
        return not is_kept(scope)

    async def _refuse(self, scope: Scope, send: Send, error: ApiError) -> None:
        await send_error(send, error, self._error_body(scope["path"], error))

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEAD_BYTES)
        try:
            # checks the request anew, so that both sides see the same borders of requests
            head = connection.send(_head(scope)) or b""
        except h11.LocalProtocolError as error:
            refusal = ApiError(f"the request is no clear HTTP/1.1: {error}", status=400)
            await self._refuse(scope, send, refusal)
            return
        has_begun = False

        async def noted_send(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            reader, writer = await asyncio.open_unix_connection(self._owner)
            try:
                writer.write(head)
                await _exchange(connection, reader, writer, receive, noted_send)
            finally:
                writer.close()
        except (OSError, h11.RemoteProtocolError) as error:
            logger.error("a request cannot be forwarded: %s", error)
            # the client sees that its connection breaks, and takes no part for the whole
            if has_begun:
                raise
            lost = "the server cannot take the request now; send it again later"
            again = {"Retry-After": "1"}
            refusal = ApiError(lost, status=503, code="engine_unavailable", headers=again)
            await self._refuse(scope, send, refusal)


async def _exchange(
    connection: h11.Connection,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    receive: Receive,
    send: Send,
) -> None:
    """Sends the body of a request, and hands its answer to the client, until one of both sides has left."""
    left = asyncio.ensure_future(_send_body(connection, receive, writer))
    answering = asyncio.ensure_future(_send_answer(connection, reader, send))
    try:
        await asyncio.wait({left, answering}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done() and not left.result():
            await answering  # the body was refused, and the answer says why
        if answering.done():
            answering.result()
    finally:
        for each in (left, answering):
            each.cancel()
        await asyncio.gather(left, answering, return_exceptions=True)


def _head(scope: Scope) -> h11.Request:
    headers = forwarded_headers(scope)
    if any(name == b"transfer-encoding" for name, _ in scope["headers"]):
        # h11 writes the chunks anew
        headers.append((b"transfer-encoding", b"chunked"))
    target = scope.get("raw_path") or scope["path"].encode()
    if query := scope.get("query_string", b""):
        target += b"?" + query
    return h11.Request(method=scope["method"], target=target, headers=headers)


async def _send_body(
    connection: h11.Connection, receive: Receive, writer: asyncio.StreamWriter
) -> bool:
    """Sends the body of a request to the owner, and waits for the disconnect of its client.

    Returns:
        Whether the client has disconnected; False: the owner reads no more.
    """
    ended = False
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return True
        # after the body only the disconnect can come
        if ended:
            continue
        try:
            if body := message.get("body", b""):
                writer.write(connection.send(h11.Data(data=body)) or b"")
            if not message.get("more_body", False):
                writer.write(connection.send(h11.EndOfMessage()) or b"")
                ended = True
            await writer.drain()
        except (OSError, h11.LocalProtocolError):
            return False


async def _send_answer(
    connection: h11.Connection, reader: asyncio.StreamReader, send: Send
) -> None:
    """Hands the owner's answer to the client.

    Raises:
        ConnectionError: The owner has ended the connection before the end of the answer.
    """
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            try:
                connection.receive_data(await reader.read(_READ_BYTES))
            except OSError as error:
                raise ConnectionError(f"the owner of the engines is lost: {error}") from error
        elif isinstance(event, h11.Response):
            headers = [(name, value) for name, value in event.headers if name not in _OF_CONNECTION]
            start: Message = {"type": "http.response.start", "status": event.status_code}
            await send({**start, "headers": headers})
        elif isinstance(event, h11.Data):
            body = bytes(event.data)
            await send({"type": "http.response.body", "body": body, "more_body": True})
        elif isinstance(event, h11.EndOfMessage):
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        elif isinstance(event, h11.ConnectionClosed):
            raise ConnectionError("the owner of the engines has ended the connection")


def forwarded_headers(scope: Scope) -> list[tuple[bytes, bytes]]:
    """The headers of a request to the owner, with what a router knows of its connection.

    Args:
        scope: The connection.
    """
    known = {
        "client": scope.get("client"),
        "server": scope.get("server"),
        "scheme": scope.get("scheme"),
        "http_version": scope.get("http_version"),
        TARGET_HOST: scope.get("state", {}).get(TARGET_HOST),
    }
    headers = [
        (name, value)
        for name, value in scope["headers"]
        if name not in _OF_CONNECTION and name != PEER
    ]
    # not `connection: close`: an owner that has not read the whole body would reset the connection after its answer
    if scope["type"] == "http" and not any(name == b"host" for name, _ in headers):
        headers.append((b"host", b""))
    return [*headers, (PEER, json.dumps(known).encode())]


class BehindRouters:
    """The owner's application: connections are those that its routers tell of.

    Args:
        app: The application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles a connection.

        Args:
            scope: The connection.
            receive: Its body.
            send: Its response.
        """
        known: dict[str, Any] = {}
        headers: list[tuple[bytes, bytes]] = []
        for name, value in scope["headers"]:
            if name == PEER:
                known = json.loads(value)
            else:
                headers.append((name, value))
        target = known.pop(TARGET_HOST, None)
        scope = {**scope, "headers": headers, "state": dict(scope.get("state", {}))}
        if target is not None:
            scope["state"][TARGET_HOST] = target
        for name, value in known.items():
            if name in ("client", "server") and value is not None:
                value = tuple(value)
            # a tunnel does not know the scheme of a WebSocket
            if name != "scheme" or scope["type"] == "http":
                scope[name] = value
        await self._app(scope, receive, send)


def tunnel(owner: str) -> type[asyncio.Protocol]:
    """The protocol of WebSockets of a router: bytes go to the owner and back as they come.

    Args:
        owner: The path of the owner's socket file.
    """

    class Tunnel(asyncio.Protocol):
        """A connection, which uvicorn makes when a client offers a WebSocket."""

        def __init__(self, config: Any, server_state: Any, app_state: Any) -> None:
            self._connections: set[Any] = server_state.connections
            self._waiting: list[bytes] | None = []
            self._writer: asyncio.StreamWriter | None = None
            self._task: asyncio.Task[None] | None = None
            self._writable = asyncio.Event()
            self._writable.set()

        def connection_made(self, transport: Any) -> None:
            self.transport = transport
            self._connections.add(self)
            self._task = asyncio.ensure_future(self._run())

        def data_received(self, data: bytes) -> None:
            # until the owner is connected
            if self._waiting is not None:
                self._waiting.append(data)
            elif self._writer is not None:
                self._writer.write(data)
                if self._writer.transport.get_write_buffer_size() > _READ_BYTES:
                    # the owner does not keep up, so the client waits
                    self.transport.pause_reading()
                    asyncio.ensure_future(self._drain(self._writer))

        def connection_lost(self, exc: Exception | None) -> None:
            self._connections.discard(self)
            if self._task is not None:
                self._task.cancel()

        def shutdown(self) -> None:
            """The server stops: the owner ends its side."""

        def pause_writing(self) -> None:
            """The client does not read: nothing more is read for it."""
            self._writable.clear()

        def resume_writing(self) -> None:
            """The client reads again."""
            self._writable.set()

        async def _drain(self, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                await writer.drain()
                self.transport.resume_reading()

        async def _run(self) -> None:
            writer = None
            try:
                reader, writer = await asyncio.open_unix_connection(owner)
                writer.write(self._head())
                self._writer, self._waiting = writer, None
                while data := await reader.read(_READ_BYTES):
                    self.transport.write(data)
                    await self._writable.wait()
            except OSError as error:
                logger.error("a connection cannot be forwarded: %s", error)
            finally:
                if writer is not None:
                    writer.close()
                self.transport.close()

        def _head(self) -> bytes:
            """The head of the request, with what this router knows of the connection."""
            first, _, rest = b"".join(self._waiting or ()).partition(b"\r\n")
            lines, end, body = rest.partition(b"\r\n\r\n")
            kept = [line for line in lines.split(b"\r\n") if not line.lower().startswith(PEER)]
            client = self.transport.get_extra_info("peername")
            server = self.transport.get_extra_info("sockname")
            scope: dict[str, Any] = {"type": "websocket", "headers": [], "http_version": "1.1"}
            scope |= {"client": client and client[:2], "server": server and server[:2]}
            ((name, value),) = forwarded_headers(scope)
            return b"\r\n".join([first, *kept, name + b": " + value]) + end + body

    return Tunnel
