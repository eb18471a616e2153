"""What code below the routes reads of the request that it runs for: identifier, client, cleanups."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from max.serve.tracing import RequestTrace


@dataclass
class RequestContext:
    """One HTTP request.

    Args:
        request_id: Its identifier, as in the header ``X-Request-Id``.
        client: Whom fairness counts it for: a digest of its API key; without keys the address of its client.
        priority: Its priority in the engine; lower comes first.
        cleanups: Are called after the response was sent.
        trace: Its spans; None: it is not traced.
        arrived: When its headers arrived, by `time.perf_counter`.
        receive: Gives its body, and tells then that its client leaves; None: no client can.
    """

    request_id: str = ""
    client: str = ""
    priority: int = 0
    cleanups: list[Callable[[], None]] = field(default_factory=list)
    trace: RequestTrace | None = None
    arrived: float = field(default_factory=time.perf_counter)
    receive: Callable[[], Awaitable[Any]] | None = None

    def close(self) -> None:
        """Calls the cleanups, the newest first."""
        while self.cleanups:
            self.cleanups.pop()()


CURRENT_REQUEST: ContextVar[RequestContext | None] = ContextVar("request", default=None)
"""The request of the running task; tasks that it starts inherit it."""


def current_request() -> RequestContext:
    """The request of the running task; an anonymous one outside of requests."""
    return CURRENT_REQUEST.get() or RequestContext()


class RequestIdFilter(logging.Filter):
    """Puts the identifier of the running request before the messages of a log; for handlers."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Changes a record; all pass.

        Args:
            record: The record.
        """
        request_id = current_request().request_id
        # a record passes several handlers
        if request_id and getattr(record, "request_id", None) is None:
            record.request_id = request_id
            record.msg = f"[{request_id.replace('%', '%%')}] {record.msg}"
        return True


def name_requests_in_logs(logger: logging.Logger) -> None:
    """Puts identifiers of requests into the lines of a logger and of those above it.

    Args:
        logger: The logger.
    """
    current: logging.Logger | None = logger
    while current is not None:
        for handler in current.handlers:
            if not any(isinstance(each, RequestIdFilter) for each in handler.filters):
                handler.addFilter(RequestIdFilter())
        current = current.parent
