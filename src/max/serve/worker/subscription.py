"""The requests of a task that run on a worker, and the way of their events from its channel to the task."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from max.interfaces import GenerationStatus
from max.pipelines.generation.process.commands import GenerationRequest
from max.pipelines.generation.process.encoder_messages import (
    EncodeRequest,
    RankRequest,
    TextsEncoded,
)
from max.pipelines.generation.process.events import (
    Event,
    OthersLoad,
    PredictionVerified,
    PromptStarted,
    RequestFailed,
    TokensGenerated,
)
from max.pipelines.kv_cache.salts import NO_SALT, Salt
from max.serve.worker.prefix_router import Route
from max.serve.worker.started_worker import Worker

logger = logging.getLogger("max.serve")

WorkerMessage: TypeAlias = Event | TextsEncoded | OthersLoad | None
"""An event of a worker; None: its channel is closed."""
_Item: TypeAlias = "PromptStarted | PredictionVerified | TokensGenerated | TextsEncoded | RequestFailed | Exception"
WorkerRequest: TypeAlias = GenerationRequest | EncodeRequest | RankRequest
"""The requests that a worker runs."""


def prompt_of(request: WorkerRequest) -> tuple[Sequence[int], Salt, int]:
    """The tokens that a request reads, what its pages depend on besides, and its size where it has no tokens.

    Args:
        request: The request.
    """
    if isinstance(request, GenerationRequest):
        salt = Salt(request.adapter, request.adapter_scale, request.cache_salt)
        return (*request.tokens, *request.generated_tokens), salt, 0
    # characters, four of which are about one token
    return (), NO_SALT, sum(len(text) for text in request.texts) // 4


class Mailbox:
    """The queue of events of a task's requests; the task wakes once for all that have arrived."""

    def __init__(self) -> None:
        self._items: deque[tuple[int, _Item]] = deque()
        self._reader: asyncio.Future[None] | None = None

    def put(self, index: int, item: _Item) -> None:
        """Adds an event of a request, and wakes the task."""
        self._items.append((index, item))
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

    worker: Worker | None
    """Its worker; None: the next one is not started yet."""

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

    @property
    def is_watched(self) -> bool:
        """Whether its next tokens tell the replica something: the worker survives it, or has read its prompt."""
        return self.is_suspect or (self.route is not None and self.route.unread > 0)

    def next_request(self) -> WorkerRequest:
        """The request for the next worker: it goes on after the tokens that have arrived."""
        if isinstance(self.request, GenerationRequest):
            self.request = self.request.resumed_request(self.generated)
            self.generated.clear()
        return self.request

    def put(self, event: _Item) -> None:
        """Adds an event, and wakes the task."""
        self.mailbox.put(self.number, event)


class EventReader:
    """A thread that receives the events of a worker, and wakes an event loop once for several of them.

    Tokens within an answer go straight to the task of their request; all other events to the worker's replica.

    Args:
        worker: The worker.
        loop: The event loop.
        replica: The worker's replica.
        entries: The open requests of all replicas, by their identifiers.
        take: Called in the loop with the worker and each of the other events in order, None at their end.
    """

    def __init__(
        self,
        worker: Worker,
        loop: asyncio.AbstractEventLoop,
        replica: RequestRunner,
        entries: Mapping[str, OpenRequest],
        take: Callable[[Worker, WorkerMessage], None],
    ) -> None:
        self._worker, self._loop, self._take = worker, loop, take
        self._replica, self._entries = replica, entries
        self._incoming: deque[WorkerMessage] = deque()
        self._wakes = False
        self._lock = threading.Lock()  # guards the two before
        threading.Thread(target=self._read, name="engine events", daemon=True).start()

    def _read(self) -> None:
        """Receives events until the channel is closed, as many at once as have arrived."""
        while True:
            events: Sequence[WorkerMessage]
            try:
                events = self._worker.channel.receive_all()
            except EOFError:
                events = [None]
            except Exception:  # for a message that cannot be decoded the worker counts as lost
                logger.exception("the messages of the worker process cannot be read")
                events = [None]
            with self._lock:
                self._incoming.extend(events)
                # one wake for all events that come before the loop takes them
                wake, self._wakes = not self._wakes, True
            try:
                if wake:
                    self._loop.call_soon_threadsafe(self._drain)
            except RuntimeError:
                return  # the loop is closed
            if events and events[-1] is None:
                return

    def _drain(self) -> None:
        with self._lock:
            incoming, self._incoming = self._incoming, deque()
            self._wakes = False
        for event in incoming:
            if self._replica.worker is not self._worker:
                return  # the replica has lost it, and its requests may run elsewhere
            try:
                if not (isinstance(event, TokensGenerated) and self._hand_over(event)):
                    self._take(self._worker, event)
            except Exception:  # one failed event must not stop those of other requests
                logger.exception("an event of the worker process was lost")

    def _hand_over(self, event: TokensGenerated) -> bool:
        """Hands tokens to the task of their request; False: they concern the replica, too."""
        entry = self._entries.get(event.request_id)
        if entry is None or entry.replica is not self._replica:
            return False
        # an end is the replica's too, which forgets the request
        if entry.is_watched or event.status is not GenerationStatus.ACTIVE:
            return False
        entry.generated += event.tokens
        entry.put(event)
        return True


WorkerEvent: TypeAlias = "PromptStarted | PredictionVerified | TokensGenerated | TextsEncoded"
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
        verified: list[tuple[int, WorkerEvent]] = []
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
                    events[place] = (number, _join_tokens(earlier, item))
            elif isinstance(item, PredictionVerified):
                # before all tokens, whose last ones may end the request
                verified.append((number, item))
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
        return verified + events

    def cancel(self, index: int) -> None:
        """Ends a request, if it has not ended.

        Args:
            index: Its number.
        """
        self._cancel(self._requests[index].request.request_id)


def _join_tokens(event: TokensGenerated, later: TokensGenerated) -> TokensGenerated:
    """An event with the tokens of one that comes after it."""
    logs = None
    if event.log_probabilities is not None or later.log_probabilities is not None:
        logs = (event.log_probabilities or ()) + (later.log_probabilities or ())
    return TokensGenerated(event.request_id, event.tokens + later.tokens, later.status, logs)
