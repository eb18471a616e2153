"""The steps before every route: identifier, host, key, type and limit of the body, count."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import secrets
import time
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from max._host.process_caches import cached_results
from max.serve.errors import ApiError
from max.serve.http.bodies.content_types import ContentTypes
from max.serve.http.bodies.open_bodies import OpenBodies
from max.serve.http.connections.hosts import HostRule
from max.serve.http.error_responses import ErrorBody, openai_body, send_error
from max.serve.http.prefix_epochs import PrefixEpochs
from max.serve.http.streaming import BODY_SEND
from max.serve.metrics import ServerMetrics
from max.serve.models.admission import KeyLimits
from max.serve.models.tallies import KeyCounts
from max.serve.process.settings import ServerSettings
from max.serve.requests.request_context import CURRENT_REQUEST, RequestContext, current_request
from max.serve.tracing import Tracing

logger = logging.getLogger("max.serve.requests")

OPEN_PATHS = frozenset(
    {"/health", "/v1/health", "/ping", "/", "/docs", "/signed-in", "/favicon.ico"}
)
"""Paths that need no key: they tell nothing about the model, and the requests of the pages need the key."""
_PAGE_FILES = "/ui/"
"""What the paths of the pages' scripts and styles begin with."""
UNTRACED_PATHS = OPEN_PATHS | {"/metrics"}
"""Paths that programs poll."""


_FILES = "/api/blobs/"
_MAX_FILE = 1 << 42
_CLIENT_DIGITS = 12
"""The digits of a key's digest that name its client."""


def is_open(path: str) -> bool:
    """Whether a path needs no key.

    Args:
        path: The path of a request.
    """
    return path in OPEN_PATHS or path.startswith(_PAGE_FILES)


def key_digest(key: str) -> str:
    """The digest of an API key, by which its client is known.

    Args:
        key: The key.
    """
    return hashlib.sha256(key.encode()).hexdigest()


class _IndexedHeaders(Headers):
    """Headers that are looked up several times, by names in lower case."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope=scope)
        # the first value of a name comes last, and stays
        self._values = dict(reversed(scope["headers"]))

    def get(self, key: str, default: Any = None) -> Any:
        """The first value of a header.

        Args:
            key: Its name.
            default: What is returned if it is absent.
        """
        value = self._values.get(key.encode("latin-1"))
        return default if value is None else value.decode("latin-1")

    def getlist(self, key: str) -> list[str]:
        """All values of a header.

        Args:
            key: Its name.
        """
        # most that are asked for are absent
        return super().getlist(key) if key.lower() in self else []

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and key.encode("latin-1") in self._values


class Gate:
    """Checks the host and the key of requests, and the type and the length of their bodies; names, counts, logs them.

    Args:
        app: The application behind it.
        settings: The server's settings.
        metrics: Counts the requests.
        tracing: Traces the requests; None: nothing does.
        epochs: How often each tenant's cached prefixes were dropped.
        bodies: The bytes of the bodies of open requests; None: there is no limit.
        hosts: The hosts that are answered; None: every host, as no socket listens.
        content_types: The types of bodies that are read.
        error_body: Makes the bodies of errors.
        counts: Where the requests of keys are counted; None: in this process only.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: ServerSettings,
        metrics: ServerMetrics,
        tracing: Tracing | None = None,
        *,
        epochs: PrefixEpochs | None = None,
        bodies: OpenBodies | None = None,
        hosts: HostRule | None = None,
        content_types: ContentTypes | None = None,
        error_body: ErrorBody = openai_body,
        counts: KeyCounts | None = None,
    ) -> None:
        self._app, self._settings, self._metrics, self._tracing = app, settings, metrics, tracing
        self._epochs, self._bodies = epochs or PrefixEpochs(), bodies
        self._hosts, self._content_types = hosts, content_types or ContentTypes()
        self._error_body = error_body
        # clients are identified by digests of keys, which may appear in logs
        self._keys = {key.encode(): key_digest(key) for key in settings.api_keys}
        self._limits = KeyLimits(
            settings.max_key_requests, settings.key_requests_per_minute, counts=counts
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles a connection.

        Args:
            scope: The connection.
            receive: Its body.
            send: Its response.
        """
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # HEAD as GET, of which the layer below sends no body; Ollama's client starts with HEAD /
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        headers = _IndexedHeaders(scope=scope)
        if given_id := headers.get("x-request-id"):
            safe = "".join(c for c in given_id if (c.isascii() and c.isalnum()) or c in "-_.")
            request_id = safe[:128]
        else:
            request_id = secrets.token_hex(12)
        scope.setdefault("state", {}).update({"request_id": request_id, BODY_SEND: send})
        context = RequestContext(request_id, receive=receive)
        token = CURRENT_REQUEST.set(context)
        begin, status = time.monotonic(), 0
        path = scope["path"]
        if self._tracing is not None and not (path in UNTRACED_PATHS or is_open(path)):
            context.trace = self._tracing.begin(
                scope["method"], scope["path"], headers, request_id, time.time()
            )

        async def named_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                named = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
                if context.variant is not None:
                    named.append((b"x-model-variant", context.variant[1].encode()))
                # an error says itself what of a request does not fit
                unknown = scope["state"].get("unknown_fields") if status < 400 else None
                if warning := context.warning(unknown):
                    named.append((b"warning", warning.encode()))
                message["headers"] = named
            await send(message)

        try:
            await self._pass(scope, headers, receive, named_send)
        finally:
            context.close()
            route = scope.get("route")
            path = getattr(route, "path", "other")
            self._metrics.requests_of(path, str(status or "closed")).inc()
            if context.variant is not None:
                self._metrics.variants.labels(*context.variant, str(status or "closed")).inc()
            if context.trace is not None:
                context.trace.end(time.time(), path, status)
            if self._settings.log_requests:
                logger.info(
                    "%s %s %d %.1f ms",
                    scope["method"],
                    scope["path"],
                    status,
                    (time.monotonic() - begin) * 1e3,
                )
            CURRENT_REQUEST.reset(token)

    def refusal(self, scope: Scope) -> ApiError | None:
        """Why the host or the key of a connection is refused; None if it is not.

        Args:
            scope: The connection.
        """
        if self._hosts is not None and (foreign := self._hosts.refusal(scope)) is not None:
            return foreign
        if self._keys and self._client(Headers(scope=scope)) is None:
            return _wrong_key()
        return None

    async def _pass(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        async def refuse(error: ApiError) -> None:
            await send_error(send, error, self._error_body(scope["path"], error))

        if self._hosts is not None and (foreign := self._hosts.refusal(scope)) is not None:
            await refuse(foreign)
            return
        # files are written as they come, within what the disk has
        is_file = scope["path"].startswith(_FILES)
        limit = _MAX_FILE if is_file else self._settings.max_request_bytes
        key = ""
        # the preflight request of a browser (CORS) has no key
        if self._keys and not is_open(scope["path"]) and scope["method"] != "OPTIONS":
            key = self._client(headers)
            if key is None:
                await refuse(_wrong_key())
                return
        # without keys, the engine is shared by address
        context = current_request()
        context.client = key[:_CLIENT_DIGITS] or (scope.get("client") or ("",))[0]
        if not self._settings.share_prefixes:
            names = headers.getlist(self._settings.tenant_header)
            context.tenant = _tenant(key, tuple(names))
            context.prefix_epoch = self._epochs.of(context.tenant)
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > limit:
            await refuse(_too_long(limit))
            return
        if (unread := self._content_types.refusal(scope, headers)) is not None:
            await refuse(unread)
            return
        received = 0

        async def limited_receive() -> Message:
            nonlocal received
            message = await receive()
            size = received + len(message.get("body", b""))
            if size > limit:
                raise _too_long(limit)
            if self._bodies is not None and not is_file:
                self._bodies.grow(received, size)
            received = size
            return message

        if self._bodies is not None and not is_file:
            bodies = self._bodies
            context.cleanups.append(lambda: bodies.release(received))

        # the limits of keys count what runs a model
        if scope["method"] != "POST":
            await self._app(scope, limited_receive, send)
            return
        try:
            with self._limits.enter(key):
                await self._app(scope, limited_receive, send)
        # errors of the limits; the application's own are responses already
        except ApiError as error:
            await refuse(error)

    def _client(self, headers: Headers) -> str | None:
        """The digest of a request's key; None if it is none of the server's keys."""
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        # Anthropic's clients send the second header
        client_key = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        # compares all keys, so that the time tells nothing about them
        digests = [
            digest
            for key, digest in self._keys.items()
            if hmac.compare_digest(client_key.encode(), key)
        ]
        return digests[0] if digests else None


def _too_long(limit: int) -> ApiError:
    return ApiError(f"the body is longer than {limit} bytes", status=413, code="request_too_large")


@cached_results(1024)
def _tenant(key: str, names: tuple[str, ...]) -> str:
    """The text that tells a tenant from others."""
    return json.dumps([key, *names]) if key or names else ""


def _wrong_key() -> ApiError:
    return ApiError(
        "the API key is missing or wrong; give it as Authorization: Bearer KEY",
        status=401,
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )
