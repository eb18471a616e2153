"""The context of the running request for code below the routes: identifier, client, cleanups."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from max._host.process_caches import cached_results
from max.serve.tracing import RequestTrace

_MOST_WARNING = 2000


@dataclass
class RequestContext:
    """One HTTP request.

    Args:
        request_id: Its identifier, as in the header ``X-Request-Id``.
        client: The client, for fair shares of the engine: a digest of the API key, or the address if there are no keys.
        priority: Its priority in the engine; lower comes first.
        cleanups: Called after the response was sent.
        trace: Its spans; None: it is not traced.
        arrival_time: When its headers arrived, by `time.perf_counter`.
        receive: Returns its body, then the disconnect of its client; None: it has no client.
        body_bytes: The size of its body.
        tenant: Those with whom it may share cached prefixes, as a text that tells them apart; empty: everyone.
        prefix_epoch: How often the cached prefixes of the tenant were dropped.
        cache_salt: Its own salt of cached prefixes; None: none.
        hints: What the grammar of its answer does not hold, for a header of the response.
        schemas: Schemas that the grammar does not hold as a whole, by tools; that of the answer's text has no name.
        misfits: What in its answer does not fit these schemas.
        left_out: Types of tools that this server does not run, and that the model was not told of.
        unread: Fields that are hints, and that its model cannot follow.
        adapter: The name of its adapter (LoRA); empty: none.
        adapter_scale: The factor of the adapter's weights.
        named_adapter: The adapter that it names in place of a model; empty: it names a model.
        variant: The model that it asks for and ``stable`` or ``canary``; None: its model has no canary.
        cached_by_request: For each of its sequences a number of the prompt, and the tokens of it that the cache had.
        accepted_predictions: The tokens of its prediction that were drafted and right.
        rejected_predictions: Those that were drafted and never right.
    """

    request_id: str = ""
    client: str = ""
    priority: int = 0
    cleanups: list[Callable[[], None]] = field(default_factory=list)
    trace: RequestTrace | None = None
    arrival_time: float = field(default_factory=time.perf_counter)
    receive: Callable[[], Awaitable[Any]] | None = None
    body_bytes: int = 0
    tenant: str = ""
    prefix_epoch: int = 0
    cache_salt: str | None = None
    hints: list[str] = field(default_factory=list)
    schemas: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    misfits: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    adapter: str = ""
    adapter_scale: float = 1.0
    named_adapter: str = ""
    variant: tuple[str, str] | None = None
    cached_by_request: dict[str, tuple[int, int]] = field(default_factory=dict)
    accepted_predictions: int = 0
    rejected_predictions: int = 0

    @property
    def prefix_salt(self) -> str:
        """What tells its cached prefixes from those of other tenants and salts; empty: everyone shares them."""
        if not self.tenant and self.cache_salt is None:
            return ""
        return _salt(self.tenant, self.cache_salt, self.prefix_epoch)

    @property
    def cached_tokens(self) -> int:
        """The tokens of its prompts that were in the prefix cache; a prompt of several sequences counts once."""
        of_prompts: dict[int, int] = {}
        for prompt, tokens in self.cached_by_request.values():
            # the sequence that came first has read the prompt, and later ones find it cached
            of_prompts[prompt] = min(tokens, of_prompts.get(prompt, tokens))
        return sum(of_prompts.values())

    def note_prediction(self, num_accepted: int, num_rejected: int) -> None:
        """Notes drafted tokens of its prediction.

        Args:
            num_accepted: The number of right ones.
            num_rejected: The number of the others.
        """
        self.accepted_predictions += num_accepted
        self.rejected_predictions += num_rejected

    def warning(self, unknown_fields: str | None) -> str | None:
        """The header ``Warning`` of the response; None: there is nothing to warn of.

        Args:
            unknown_fields: The unknown fields of the body.
        """
        texts = [f"unknown fields are ignored: {unknown_fields}"] if unknown_fields else []
        if self.unread:
            texts.append(f"fields have no effect on this model: {', '.join(self.unread)}")
        if self.left_out:
            kinds = ", ".join(dict.fromkeys(self.left_out))
            texts.append(
                f"tools that this server does not run are left out: {kinds}"[:_MOST_WARNING]
            )
        if self.hints:
            text = f"the grammar of the answer does not hold: {'; '.join(self.hints)}"
            text += f"; what does not fit in it: {'; '.join(self.misfits)}" if self.misfits else ""
            texts.append(text if len(text) <= _MOST_WARNING else f"{text[:_MOST_WARNING]}...")
        plain = (
            "".join(c if " " <= c <= "~" and c not in '"\\' else "?" for c in text)
            for text in texts
        )
        # RFC 7234, 5.5: code (299 stays with a cached response), agent, text in quotes
        return ", ".join(f'299 - "{text}"' for text in plain) or None

    def close(self) -> None:
        """Calls the cleanups, the newest first."""
        while self.cleanups:
            self.cleanups.pop()()


@cached_results(1024)
def _salt(tenant: str, cache_salt: str | None, epoch: int) -> str:
    # JSON keeps tenant and salt apart: no two pairs have the same text
    parts: list[str | int | None] = [tenant, cache_salt]
    if epoch:
        parts.append(epoch)
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


CURRENT_REQUEST: ContextVar[RequestContext | None] = ContextVar("request", default=None)
"""The request of the running task; tasks that it starts inherit it."""


def current_request() -> RequestContext:
    """The request of the running task; an anonymous one outside of requests."""
    return CURRENT_REQUEST.get() or RequestContext()


class RequestIdFilter(logging.Filter):
    """A filter of log handlers that puts the identifier of the running request before each message."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Adds the identifier to a record; keeps all records."""
        request_id = current_request().request_id
        # several handlers filter the same record
        if request_id and getattr(record, "request_id", None) is None:
            record.request_id = request_id
            record.msg = f"[{request_id.replace('%', '%%')}] {record.msg}"
        return True


def name_requests_in_logs(logger: logging.Logger) -> None:
    """Puts identifiers of requests into the lines of a logger and of those above it."""
    current: logging.Logger | None = logger
    while current is not None:
        for handler in current.handlers:
            if not any(isinstance(each, RequestIdFilter) for each in handler.filters):
                handler.addFilter(RequestIdFilter())
        current = current.parent
