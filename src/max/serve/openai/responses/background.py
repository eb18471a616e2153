"""Responses that are made without a connection: clients ask for them again, read their events, and cancel them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from max.serve.errors import ApiError
from max.serve.http.error_responses import as_api_error
from max.serve.requests.request_context import CURRENT_REQUEST, RequestContext, current_request

MOST_RUNNING_OF_CLIENT = 32
MOST_RESPONSES = 1024
MOST_BYTES = 64 << 20
"""The size of the events of responses that have ended; beyond, those of the oldest are dropped."""


class BackgroundResponse:
    """A response that is made without a connection.

    Args:
        client: Who may read it.
        current_response: Returns the response with a status, as it is now.
    """

    def __init__(self, client: str, current_response: Callable[[str], dict[str, Any]]) -> None:
        self.client, self._shown = client, current_response
        self.status = "queued"
        self.task: asyncio.Task[None] | None = None
        self.is_deleted = False
        self.size = 0
        self.events: list[bytes] = []
        """The events so far; the place of each is its sequence number."""
        self._changed = asyncio.Event()

    @property
    def ended(self) -> bool:
        """Whether it goes on no more."""
        return self.status not in ("queued", "in_progress")

    def response(self) -> dict[str, Any]:
        """The response as it is now."""
        return self._shown(self.status)

    def add(self, data: bytes) -> None:
        """Adds events."""
        # comments have no number, so a reader that counts events would lose its place
        events = [event + b"\n\n" for event in data.split(b"\n\n") if b"data: " in event]
        self.events += events
        self.size += sum(map(len, events))
        self.notify()

    def notify(self) -> None:
        """Wakes those that read the events."""
        # a new event for later waits: those that wait hold the old one
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def read(self, after: int = -1) -> AsyncGenerator[bytes, None]:
        """Yields the events, also those that come later.

        Args:
            after: The sequence number before the first event.
        """
        sent = after + 1
        while True:
            # before the events are looked at, so that none is missed between look and wait
            changed = self._changed
            if sent < len(self.events):
                data, sent = b"".join(self.events[sent:]), len(self.events)
                yield data
            elif self.ended:
                return
            else:
                await changed.wait()


class BackgroundResponses:
    """The responses of a server that are made in the background, with the latest ones that have ended."""

    def __init__(self) -> None:
        self._responses: OrderedDict[str, BackgroundResponse] = OrderedDict()

    def find(self, identifier: str, client: str) -> BackgroundResponse | None:
        """A response of a client; None if it is not kept, was made otherwise, or is another client's.

        Args:
            identifier: Identifies it.
            client: The client.
        """
        found = self._responses.get(identifier)
        return None if found is None or found.client != client else found

    def check(self, client: str) -> None:
        """Checks that a client may begin another response.

        Raises:
            ApiError: Status 429: too many of its responses run.
        """
        running = [each for each in self._responses.values() if not each.ended]
        if sum(each.client == client for each in running) >= MOST_RUNNING_OF_CLIENT:
            raise ApiError(
                f"{MOST_RUNNING_OF_CLIENT} background responses of this client run; cancel one, or wait",
                status=429,
                code="too_many_background_responses",
            )

    def begin(
        self,
        identifier: str,
        response: BackgroundResponse,
        parts: AsyncGenerator[bytes, None],
        failure_event: Callable[[ApiError], bytes],
        keep: Callable[[dict[str, Any]], None],
    ) -> None:
        """Makes a response in the background, with what the running request holds.

        Args:
            identifier: Identifies it.
            response: The response.
            parts: Its events; they begin when the first token has come.
            failure_event: Makes the event of an error.
            keep: Keeps the response where it does not end well; the events' maker keeps others.
        """
        request = current_request()
        # the model stays loaded until the response has ended
        # its connection may close, so nothing watches it
        context = replace(request, cleanups=request.cleanups, receive=None, trace=None)
        request.cleanups = []
        self._responses[identifier] = response
        self._trim()
        response.task = asyncio.create_task(_make(context, response, parts, failure_event, keep))

    def delete(self, identifier: str, client: str) -> None:
        """Drops a response, and ends it if it runs."""
        found = self.find(identifier, client)
        if found is None:
            return
        del self._responses[identifier]
        found.is_deleted = True
        if found.task is not None:
            # after the flag, which keeps the cancelled response from being stored
            found.task.cancel()

    def _trim(self) -> None:
        size = sum(each.size for each in self._responses.values())
        for identifier, each in list(self._responses.items()):
            if len(self._responses) <= MOST_RESPONSES and size <= MOST_BYTES:
                return
            # one that runs stays, however many there are; `check` limits them
            if each.ended:
                size -= each.size
                del self._responses[identifier]


async def _make(
    context: RequestContext,
    response: BackgroundResponse,
    parts: AsyncGenerator[bytes, None],
    failure_event: Callable[[ApiError], bytes],
    keep: Callable[[dict[str, Any]], None],
) -> None:
    CURRENT_REQUEST.set(context)
    try:
        async with aclosing(parts) as stream:
            async for data in stream:
                response.status = "in_progress"
                response.add(data)
        # before the readers wake, which end with it
        response.status = "completed"
    except asyncio.CancelledError:
        response.status = "cancelled"
        if not response.is_deleted:
            keep(response.response())
    except Exception as error:
        response.add(failure_event(as_api_error(error)))
        response.status = "failed"
        keep(response.response())
    finally:
        context.close()
        response.notify()
