"""Responses over a WebSocket: each message of a client is run as a request of ``POST /v1/responses``.

So keys, limits, tenants and errors are those of requests. The events of the stream are sent as messages, one each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from max.serve.errors import ApiError
from max.serve.http.connections.hosts import WEBSOCKET_PATH
from max.serve.openai.responses.store import ResponseStore
from max.serve.openai.responses.stored import CONNECTION_RESPONSES

IDLE_S = 3600.0
"""The seconds after which a connection without messages is closed."""
_OF_CONNECTION = frozenset(
    (b"connection", b"upgrade", b"content-length", b"content-type", b"transfer-encoding", b"accept-encoding")
)  # fmt: skip
_MOST_KEPT = 8 << 20


class ResponseSockets:
    """An application with WebSockets at ``/v1/responses`` before it.

    Args:
        app: The application, with its gate.
        refusal: Why a request is refused before its body is read: its host or its key; None: it is not.
        cors_origins: The origins of web pages of other hosts that may connect.
        is_served: Whether the server has the API of responses.
    """

    def __init__(
        self,
        app: ASGIApp,
        refusal: Callable[[Scope], ApiError | None],
        cors_origins: Iterable[str],
        is_served: bool,
    ) -> None:
        self._app, self._refusal = app, refusal
        self._origins, self._is_served = frozenset(cors_origins), is_served

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles a connection.

        Args:
            scope: The connection.
            receive: Its messages.
            send: Sends messages.
        """
        if scope["type"] != "websocket":
            await self._app(scope, receive, send)
            return
        await receive()  # the request to connect
        if (error := self._refused(scope)) is not None:
            await _refuse(send, error)
            return
        await send({"type": "websocket.accept"})
        await _Connection(self._app, scope, receive, send).run()

    def _refused(self, scope: Scope) -> ApiError | None:
        if scope["path"] != WEBSOCKET_PATH or not self._is_served:
            return ApiError(f"WebSockets are taken at {WEBSOCKET_PATH} only", status=404)
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        # a browser connects for any page, whatever CORS says
        if origin is not None and origin not in self._origins:
            if urlsplit(origin).netloc != headers.get("host"):
                return ApiError(f"web pages of {origin} may not connect", status=403)
        return self._refusal(scope)


async def _refuse(send: Send, error: ApiError) -> None:
    body = msgspec.json.encode(error.body())
    headers = [
        (b"content-type", b"application/json"),
        *((name.lower().encode(), value.encode()) for name, value in error.headers.items()),
    ]
    await send(
        {"type": "websocket.http.response.start", "status": error.status, "headers": headers}
    )
    await send({"type": "websocket.http.response.body", "body": body})


class _Connection:
    """An open WebSocket; its requests run one after the other."""

    def __init__(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        self._app, self._scope, self._receive, self._send = app, scope, receive, send
        # of a request with store false, so that the next one can go on with it
        self._kept = ResponseStore(_MOST_KEPT, 2)

    async def run(self) -> None:
        """Runs the messages until the client disconnects."""
        token = CONNECTION_RESPONSES.set(self._kept)
        awaited = asyncio.ensure_future(self._receive())
        try:
            while True:
                await asyncio.wait({awaited}, timeout=IDLE_S)
                if not awaited.done():
                    await self._send({"type": "websocket.close", "code": 1001, "reason": "idle"})
                    return
                message = awaited.result()
                if message["type"] == "websocket.disconnect":
                    return
                awaited = asyncio.ensure_future(self._receive())
                await self._answer(message.get("text") or message.get("bytes") or b"", awaited)
        finally:
            CONNECTION_RESPONSES.reset(token)
            awaited.cancel()
            await asyncio.gather(awaited, return_exceptions=True)

    async def _answer(self, text: str | bytes, next_message: asyncio.Future[Message]) -> None:
        """Runs one message, until the client disconnects."""
        try:
            body = _body_of(text)
        except ApiError as error:
            await self._send_error(error.status, error.body())
            return
        request = _Request(body, self._send_text, self._send_error)
        headers = [(n, v) for n, v in self._scope["headers"] if not _is_of_connection(n)]
        headers += [
            (b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()),
        ]  # fmt: skip
        kept = (
            "client",
            "server",
            "root_path",
            "asgi",
            "query_string",
            "headers",
            "path",
            "raw_path",
        )
        scope = {
            **{name: self._scope[name] for name in kept if name in self._scope},
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "scheme": "https" if self._scope.get("scheme") == "wss" else "http",
            "headers": headers,
            "state": dict(self._scope.get("state") or {}),
        }
        running = asyncio.ensure_future(self._app(scope, request.receive, request.send))
        try:
            await asyncio.wait({running, next_message}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done() and next_message.result()["type"] == "websocket.disconnect":
                request.left.set()
            await running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def _send_text(self, text: str) -> None:
        await self._send({"type": "websocket.send", "text": text})

    async def _send_error(self, status: int, body: Mapping[str, Any]) -> None:
        data = {"type": "error", "status": status, **body}
        await self._send_text(msgspec.json.encode(data).decode())


def _is_of_connection(name: bytes) -> bool:
    return name in _OF_CONNECTION or name.startswith(b"sec-websocket-")


def _body_of(text: str | bytes) -> bytes:
    """The body of the request that a message stands for; the values of its fields stay text."""
    try:
        fields = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        kind = msgspec.json.decode(fields.pop("type", msgspec.Raw(b"null")))
    except msgspec.DecodeError as error:
        raise ApiError(f"the message is no JSON object: {error}", code="invalid_json") from None
    if kind != "response.create":
        raise ApiError(
            "the message has another type than response.create, the only one that is taken",
            param="type",
        )
    if fields.pop("generate", msgspec.Raw(b"true")) == msgspec.Raw(b"false"):
        raise ApiError("generate is false: prompts are not read in advance", param="generate")
    fields.pop("background", None)
    fields["stream"] = msgspec.Raw(b"true")
    return msgspec.json.encode(fields)


class _Request:
    """A request of a message, as the application sees it.

    Args:
        body: Its body.
        send_text: Sends a message to the client.
        send_error: Sends an error with its status.
    """

    def __init__(
        self,
        body: bytes,
        send_text: Callable[[str], Awaitable[None]],
        send_error: Callable[[int, Mapping[str, Any]], Awaitable[None]],
    ) -> None:
        self._body: bytes | None = body
        self._send_text, self._send_error = send_text, send_error
        self.left = asyncio.Event()
        self._status, self._text = 0, b""

    async def receive(self) -> Message:
        """The body, then the disconnect of the client."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Passes on a part of the response.

        Args:
            message: The part.
        """
        if message["type"] == "http.response.start":
            self._status = message["status"]
            return
        self._text += message.get("body", b"")
        if self._status == 200:
            *events, self._text = self._text.split(b"\n\n")
            for event in events:
                _, mark, data = event.partition(b"data: ")
                if mark:  # not a comment
                    await self._send_text(data.decode())
        elif not message.get("more_body"):
            try:
                body = msgspec.json.decode(self._text)
            except msgspec.DecodeError:
                body = ApiError("the server failed", status=500).body()
            await self._send_error(self._status, body)
