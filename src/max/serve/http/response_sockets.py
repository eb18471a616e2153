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

from max.serve.errors import ApiError, short_text
from max.serve.http.connections.hosts import WEBSOCKET_PATH
from max.serve.openai.responses.store import ResponseStore
from max.serve.openai.responses.stored import CONNECTION_RESPONSES

IDLE_S = 3600.0
"""The seconds after which a connection without messages is closed."""
_OF_CONNECTION = frozenset(
    (b"connection", b"upgrade", b"content-length", b"content-type", b"transfer-encoding", b"accept-encoding")
)  # fmt: skip
_MOST_KEPT = 8 << 20
_MOST_REQUESTS = 64
"""The requests of a connection that run or wait."""
_LONGEST_STREAM = 256


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
        if (error := self._check_connection(scope)) is not None:
            await _refuse(send, error)
            return
        await send({"type": "websocket.accept"})
        await _Connection(self._app, scope, receive, send).run()

    def _check_connection(self, scope: Scope) -> ApiError | None:
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
    """An open WebSocket; its requests of one stream run one after the other, those of several at the same time."""

    def __init__(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        self._app, self._scope, self._receive, self._send = app, scope, receive, send
        # of requests with store false, so that later ones can go on with them
        self._kept = ResponseStore(_MOST_KEPT, _MOST_REQUESTS)
        self._requests: set[asyncio.Task[None]] = set()
        self._last: dict[str | None, asyncio.Task[None]] = {}  # of each stream
        self._left = asyncio.Event()

    async def run(self) -> None:
        """Runs the messages until the client disconnects."""
        token = CONNECTION_RESPONSES.set(self._kept)
        awaited = asyncio.ensure_future(self._receive())
        try:
            while True:
                # not `wait_for`: a receive that is cancelled could lose a message
                await asyncio.wait({awaited}, timeout=IDLE_S)
                if not awaited.done():
                    if self._requests:
                        continue
                    await self._send({"type": "websocket.close", "code": 1001, "reason": "idle"})
                    return
                message = awaited.result()
                if message["type"] == "websocket.disconnect":
                    return
                awaited = asyncio.ensure_future(self._receive())
                await self._begin(message.get("text") or message.get("bytes") or b"")
        finally:
            CONNECTION_RESPONSES.reset(token)
            self._left.set()
            # requests end as after a disconnect; those that wait for another one do not begin
            running = [awaited, *self._requests]
            awaited.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _begin(self, text: str | bytes) -> None:
        """Begins the request of a message, once the one before it in its stream has ended."""
        stream: str | None = None
        try:
            body, stream = _body_of(text)
            if len(self._requests) >= _MOST_REQUESTS:
                raise ApiError(
                    f"{_MOST_REQUESTS} requests of this connection run or wait; wait for the end of one",
                    status=429,
                    code="too_many_requests",
                )
        except ApiError as error:
            await self._send_error(error.status, error.body(), stream)
            return
        task = asyncio.create_task(self._answer(body, stream, self._last.get(stream)))
        self._last[stream] = task
        self._requests.add(task)
        task.add_done_callback(lambda done: self._drop_request(done, stream))

    def _drop_request(self, task: asyncio.Task[None], stream: str | None) -> None:
        self._requests.discard(task)
        if self._last.get(stream) is task:
            del self._last[stream]

    async def _answer(
        self, body: bytes, stream: str | None, before: asyncio.Task[None] | None
    ) -> None:
        """Runs one request after another one, until the client disconnects."""
        if before is not None:
            await asyncio.wait({before})
        if self._left.is_set():
            return

        async def send_text(text: str) -> None:
            await self._send_text(text, stream)

        async def send_error(status: int, body: Mapping[str, Any]) -> None:
            await self._send_error(status, body, stream)

        request = _Request(body, send_text, send_error, self._left)
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
        await self._app(scope, request.receive, request.send)

    async def _send_text(self, text: str, stream: str | None) -> None:
        if stream is not None:
            name = msgspec.json.encode(stream).decode()
            # an event is an object with fields: the name goes before the first one
            text = f'{{"stream_id":{name},{text[1:]}'
        await self._send({"type": "websocket.send", "text": text})

    async def _send_error(self, status: int, body: Mapping[str, Any], stream: str | None) -> None:
        data = {"type": "error", "status": status, **body}
        await self._send_text(msgspec.json.encode(data).decode(), stream)


def _is_of_connection(name: bytes) -> bool:
    return name in _OF_CONNECTION or name.startswith(b"sec-websocket-")


def _body_of(text: str | bytes) -> tuple[bytes, str | None]:
    """The body of the request that a message stands for, whose values stay text, and its stream."""
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
    stream = msgspec.json.decode(fields.pop("stream_id", msgspec.Raw(b"null")))
    if stream is not None and not (isinstance(stream, str) and 1 <= len(stream) <= _LONGEST_STREAM):
        raise ApiError(
            f"stream_id is {short_text(stream)}; it is a text of 1 to {_LONGEST_STREAM} characters",
            param="stream_id",
        )
    fields["stream"] = msgspec.Raw(b"true")
    return msgspec.json.encode(fields), stream


class _Request:
    """A request of a message, as the application sees it.

    Args:
        body: Its body.
        send_text: Sends a message to the client.
        send_error: Sends an error with its status.
        left: Set when the client has disconnected.
    """

    def __init__(
        self,
        body: bytes,
        send_text: Callable[[str], Awaitable[None]],
        send_error: Callable[[int, Mapping[str, Any]], Awaitable[None]],
        left: asyncio.Event,
    ) -> None:
        self._body: bytes | None = body
        self._send_text, self._send_error = send_text, send_error
        self._left = left
        self._status, self._text = 0, b""

    async def receive(self) -> Message:
        """The body, then the disconnect of the client."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._left.wait()
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
            # a part may hold several events and the begin of another one
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
