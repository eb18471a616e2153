"""The requests of a task that run on a worker, and their events."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from max.pipelines.generation.process.commands import GenerationRequest
from max.pipelines.generation.process.events import PromptStarted, RequestFailed, TokensGenerated
from max.serve.worker.encoder_messages import EncodeRequest, RankRequest, TextsEncoded
from max.serve.worker.prefix_router import Route

_Item: TypeAlias = "PromptStarted | TokensGenerated | TextsEncoded | RequestFailed | Exception"
WorkerRequest: TypeAlias = GenerationRequest | EncodeRequest | RankRequest
"""The requests that a worker runs."""


class Mailbox:
    """The queue of events of a task's requests; the task wakes once for all that have arrived."""

    def __init__(self) -> None:
        self._items: deque[tuple[int, _Item]] = deque()
        self._reader: asyncio.Future[None] | None = None

    def put(self, number: int, item: _Item) -> None:
        """Adds an event of a request, and wakes the task."""
        self._items.append((number, item))
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def take_all(self) -> deque[tuple[int, _Item]]:
        """Waits for an event, and takes all that have arrived."""
        if not self._items:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        items, self._items = self._items, deque()
        return items


class RequestRunner(Protocol):
    """What runs requests: a replica."""

    def cancel(self, request_id: str) -> None:
        """Ends a request."""
        ...


@dataclass
class OpenRequest:
    """A request that a task waits for.

    Args:
        request: The request.
        number: Its number among the requests of the task.
        mailbox: Receives its events.
        is_sent: Whether a worker has it.
        is_suspect: Whether a worker that had it was lost.
        losses: How many workers were lost perhaps by it.
        generated: The tokens that have arrived from the last worker.
        route: What the router knows of it; None: it was not asked.
        replica: The replica that runs it, or that it waits for.
    """

    request: WorkerRequest
    number: int
    mailbox: Mailbox
    is_sent: bool = False
    is_suspect: bool = False
    losses: int = 0
    generated: list[int] = field(default_factory=list)
    route: Route | None = None
    replica: RequestRunner | None = None

    @property
    def has_begun(self) -> bool:
        """Whether tokens have arrived."""
        return bool(self.generated) or bool(getattr(self.request, "generated_tokens", ()))

    def proceed(self) -> WorkerRequest:
        """The request for the next worker: it goes on after the tokens that have arrived."""
        if isinstance(self.request, GenerationRequest):
            self.request = self.request.resumed_request(self.generated)
            self.generated.clear()
        return self.request

    def put(self, event: _Item) -> None:
        """Adds an event, and wakes the task."""
        self.mailbox.put(self.number, event)


WorkerEvent: TypeAlias = "PromptStarted | TokensGenerated | TextsEncoded"
"""An event as a task receives it."""


class Subscription:
    """The requests that one task has opened together, and their events.

    Args:
        requests: The open requests, numbered from 0.
        mailbox: Receives their events.
        cancel: Ends a request, given its id.
    """

    def __init__(
        self, requests: Sequence[OpenRequest], mailbox: Mailbox, cancel: Callable[[str], None]
    ) -> None:
        self._requests, self._mailbox, self._cancel = requests, mailbox, cancel
        self._error: Exception | None = None

    async def next_events(self) -> list[tuple[int, WorkerEvent]]:
        """Waits for events, and returns all that have arrived, with the tokens of each request joined.

        Returns:
            The events with the numbers of their requests.

        Raises:
            UserError: A request can never run.
            RuntimeError: A step failed.
            EngineLostError: Several workers died over a request.
            EngineUnavailableError: No worker runs, and none will be started.
            TimeoutError: It took too long.
        """
        if self._error is not None:
            raise self._error
        events: list[tuple[int, WorkerEvent]] = []
        places: dict[int, int] = {}
        for number, item in await self._mailbox.take_all():
            if isinstance(item, TokensGenerated):
                place = places.get(number)
                if place is None:
                    places[number] = len(events)
                    events.append((number, item))
                else:
                    earlier = events[place][1]
                    assert isinstance(earlier, TokensGenerated)
                    events[place] = (number, _joined(earlier, item))
            elif isinstance(item, (RequestFailed, Exception)):
                # earlier events are returned first
                self._error = item if isinstance(item, Exception) else item.error.to_exception()
                break
            else:
                # tokens after this event are not joined with those before it
                places.pop(number, None)
                events.append((number, item))
        if self._error is not None and not events:
            raise self._error
        return events

    def cancel(self, number: int) -> None:
        """Ends a request, if it has not ended.

        Args:
            number: Its number.
        """
        self._cancel(self._requests[number].request.request_id)


def _joined(event: TokensGenerated, later: TokensGenerated) -> TokensGenerated:
    """An event with the tokens of one that comes after it."""
    logs = None
    if event.log_probabilities is not None or later.log_probabilities is not None:
        logs = (event.log_probabilities or ()) + (later.log_probabilities or ())
    return TokensGenerated(event.request_id, event.tokens + later.tokens, later.status, logs)
