"""The way of a worker's events to the tasks of their requests: who takes which, in which order, with one wake."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Coroutine, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from max.interfaces import GenerationStatus
from max.pipelines.core import InputError
from max.pipelines.generation.process.commands import GenerationRequest
from max.pipelines.generation.process.encoder_messages import EncodeRequest
from max.pipelines.generation.process.events import (
    EngineStats,
    ErrorInfo,
    PredictionVerified,
    PromptStarted,
    RequestFailed,
    TokensGenerated,
)
from max.serve.worker.prefix_router import Route
from max.serve.worker.subscription import (
    EventReader,
    Mailbox,
    OpenRequest,
    Subscription,
    _join_tokens,
)

ACTIVE, FULL = GenerationStatus.ACTIVE, GenerationStatus.MAXIMUM_LENGTH
WAIT_S = 60.0


def tokens(name: str, *numbers: int, status: GenerationStatus = ACTIVE) -> TokensGenerated:
    return TokensGenerated(name, numbers, status)


def opened(name: str, number: int = 0, **more: Any) -> OpenRequest:
    return OpenRequest(GenerationRequest(name, (1, 2), 9), number, Mailbox(), **more)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, WAIT_S))


# Mailboxes and subscriptions ---------------------------------------------------------------------


def test_a_task_wakes_once_for_all_that_has_arrived() -> None:
    async def test() -> None:
        mailbox = Mailbox()
        waiting = asyncio.create_task(mailbox.take_all())
        await asyncio.sleep(0)
        mailbox.put(1, tokens("a", 5))
        mailbox.put(0, tokens("b", 6))  # the task has been woken already
        assert list(await waiting) == [(1, tokens("a", 5)), (0, tokens("b", 6))]
        mailbox.put(2, tokens("c", 7))
        assert list(await mailbox.take_all()) == [(2, tokens("c", 7))]
        stopped = asyncio.create_task(mailbox.take_all())
        await asyncio.sleep(0)
        stopped.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopped
        mailbox.put(3, tokens("d", 8))
        assert list(await mailbox.take_all()) == [(3, tokens("d", 8))]

    run(test())


def test_tokens_of_a_request_are_joined_up_to_another_event() -> None:
    async def test() -> None:
        mailbox = Mailbox()
        subscription = Subscription([], mailbox, lambda _: None)
        log: Any = object()
        items = [
            (0, PromptStarted("a", 1.0)), (0, tokens("a", 1)), (1, tokens("b", 2)),
            (0, TokensGenerated("a", (3,), FULL, (log,))), (1, PromptStarted("b", 2.0)),
            (1, tokens("b", 4)), (1, tokens("b", 5)),
        ]  # fmt: skip
        for item in items:
            mailbox.put(*item)
        assert await subscription.next_events() == [
            (0, PromptStarted("a", 1.0)), (0, TokensGenerated("a", (1, 3), FULL, (log,))),
            (1, tokens("b", 2)), (1, PromptStarted("b", 2.0)), (1, tokens("b", 4, 5)),
        ]  # fmt: skip

    run(test())


def test_verified_predictions_come_before_the_tokens_and_do_not_part_them() -> None:
    async def test() -> None:
        mailbox = Mailbox()
        subscription = Subscription([], mailbox, lambda _: None)
        first, second = PredictionVerified("a", 3, 1), PredictionVerified("a", 0, 2)
        last = tokens("a", 4, status=FULL)
        for item in (first, tokens("a", 1, 2), second, last):
            mailbox.put(0, item)
        joined = tokens("a", 1, 2, 4, status=FULL)
        assert await subscription.next_events() == [(0, first), (0, second), (0, joined)]

    run(test())


@pytest.mark.parametrize(
    ("item", "kind", "message"),
    [
        (RequestFailed("a", ErrorInfo("InputError", "too long", "cut it")), InputError, "too long"),
        (TimeoutError("it took too long"), TimeoutError, "it took too long"),
    ],
)
def test_an_error_comes_after_the_events_before_it(
    item: RequestFailed | Exception, kind: type[Exception], message: str
) -> None:
    async def test() -> None:
        mailbox = Mailbox()
        subscription = Subscription([], mailbox, lambda _: None)
        mailbox.put(0, tokens("a", 1))
        mailbox.put(0, item)
        mailbox.put(0, tokens("a", 2))
        assert await subscription.next_events() == [(0, tokens("a", 1))]
        for _ in range(2):
            with pytest.raises(kind, match=message):
                await subscription.next_events()
        first = Subscription([], mailbox, lambda _: None)
        mailbox.put(0, item)
        with pytest.raises(kind, match=message):
            await first.next_events()

    run(test())


def test_a_request_is_canceled_by_its_number() -> None:
    ended: list[str] = []
    subscription = Subscription([opened("a"), opened("b", 1)], Mailbox(), ended.append)
    subscription.cancel(1)
    assert ended == ["b"]


def test_what_is_known_of_a_request() -> None:
    entry = opened("a")
    assert not entry.has_begun and not entry.is_watched and not entry.is_sent
    assert entry.next_request().generated_tokens == ()  # type: ignore[union-attr]
    entry.generated += [7, 8]
    assert entry.has_begun
    assert entry.next_request().generated_tokens == (7, 8)  # type: ignore[union-attr]
    assert entry.generated == [] and entry.has_begun
    assert opened("a", is_suspect=True).is_watched
    assert [opened("a", route=Route(0, 0, n, [])).is_watched for n in (0, 1)] == [False, True]
    encode = OpenRequest(EncodeRequest("a", ("x",)), 0, Mailbox())
    assert encode.next_request() is encode.request and not encode.has_begun


# The reader of a worker's events -----------------------------------------------------------------


class Channel:
    """A worker's channel: a test gives it frames, and exceptions for `receive_all` to raise."""

    def __init__(self) -> None:
        self.frames: queue.SimpleQueue[Sequence[Any] | Exception] = queue.SimpleQueue()
        self.asked = threading.Semaphore(0)

    def receive_all(self) -> Sequence[Any]:
        self.asked.release()
        frame = self.frames.get(timeout=WAIT_S)
        if isinstance(frame, Exception):
            raise frame
        return frame


class Reading:
    """A reader of a worker, with its replica and what the replica has taken."""

    def __init__(self, take: Callable[[Any], None] = lambda _: None) -> None:
        self.worker: Any = SimpleNamespace(channel=Channel())
        self.replica: Any = SimpleNamespace(worker=self.worker)
        self.entries: dict[str, OpenRequest] = {}
        self.taken: list[Any] = []
        self.ended = asyncio.Event()
        self.also = take
        loop = asyncio.get_running_loop()
        self.reader = EventReader(self.worker, loop, self.replica, self.entries, self._take)

    def _take(self, worker: Any, event: Any) -> None:
        assert worker is self.worker
        self.taken.append(event)
        if event is None:
            self.ended.set()
        self.also(event)

    def add(self, name: str, **more: Any) -> OpenRequest:
        entry = self.entries[name] = opened(
            name, len(self.entries), **{"replica": self.replica, **more}
        )
        return entry

    async def read(self, *frames: Sequence[Any] | Exception) -> None:
        for frame in (*frames, EOFError()):
            self.worker.channel.frames.put(frame)
        await self.ended.wait()


def test_who_takes_an_event() -> None:
    """Tokens within an answer go to their task; what tells the replica something goes to the replica."""

    async def test() -> None:
        reading = Reading()
        plain = reading.add("plain")
        others = [
            reading.add("suspect", is_suspect=True), reading.add("unread", route=Route(0, 0, 1, [])),
            reading.add("elsewhere", replica=SimpleNamespace(worker=None)),
        ]  # fmt: skip
        events = [
            EngineStats(), PromptStarted("plain", 1.0),
            *(tokens(name, 5) for name in ("suspect", "unread", "elsewhere", "unknown")),
            tokens("plain", 9, status=FULL),
        ]  # fmt: skip
        await reading.read([tokens("plain", 3, 4)], [*events, tokens("plain", 6)])
        assert reading.taken == [*events, None]
        assert plain.generated == [3, 4, 6] and not any(each.generated for each in others)
        assert list(await plain.mailbox.take_all()) == [
            (0, tokens("plain", 3, 4)),
            (0, tokens("plain", 6)),
        ]

    run(test())


class Loop:
    """An event loop whose turns a test takes itself."""

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.is_closed = False

    def call_soon_threadsafe(self, call: Callable[[], None]) -> None:
        if self.is_closed:
            raise RuntimeError("Event loop is closed")
        self.calls.put(call)


def test_the_loop_wakes_once_for_frames_that_wait() -> None:
    channel, loop, taken = Channel(), Loop(), list[Any]()
    worker: Any = SimpleNamespace(channel=channel)
    replica: Any = SimpleNamespace(worker=worker)
    by_hand: Any = loop
    earlier = set(threading.enumerate())
    EventReader(worker, by_hand, replica, {}, lambda _, event: taken.append(event))
    for turn in range(2):
        events = [tokens("a", 3 * turn + number) for number in range(3)]
        for event in events:
            assert channel.asked.acquire(timeout=WAIT_S)
            channel.frames.put([event])
        # the reader takes the next frame after it has scheduled the events of the one before
        assert channel.asked.acquire(timeout=WAIT_S)
        channel.asked.release()
        assert not taken
        loop.calls.get(timeout=WAIT_S)()
        assert taken == events and loop.calls.empty()
        taken.clear()
    # after the loop is closed nothing is read any more
    loop.is_closed = True
    assert channel.asked.acquire(timeout=WAIT_S)
    own = set(threading.enumerate()) - earlier
    (thread,) = (one for one in own if one.name == "engine events")
    channel.frames.put([tokens("a", 9)])
    thread.join(WAIT_S)
    assert not thread.is_alive() and thread.daemon


def test_events_of_a_lost_worker_are_dropped() -> None:
    async def test() -> None:
        reading = Reading(lambda event: setattr(reading.replica, "worker", event and None))
        first, later = tokens("a", 1), tokens("a", 2)
        reading.worker.channel.frames.put([first, later])
        while not reading.taken:
            await asyncio.sleep(0.001)
        assert reading.taken == [first]
        reading.replica.worker = reading.worker
        await reading.read()
        assert reading.taken == [first, None]

    run(test())


def test_an_event_that_fails_is_logged_and_the_next_ones_are_taken(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(event: Any) -> None:
        if isinstance(event, PromptStarted):
            raise KeyError("lost")

    async def test() -> None:
        reading = Reading(fail)
        events = [PromptStarted("a", 1.0), tokens("a", 1)]
        await reading.read(events)
        assert reading.taken == [*events, None]

    caplog.set_level(logging.ERROR, "max.serve")
    run(test())
    assert [record.message for record in caplog.records] == [
        "an event of the worker process was lost"
    ]


def test_messages_that_cannot_be_read_end_a_worker(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        reading = Reading()
        await reading.read([tokens("a", 1)], ValueError("no message"))
        assert reading.taken == [tokens("a", 1), None]

    caplog.set_level(logging.ERROR, "max.serve")
    run(test())
    assert [record.message for record in caplog.records] == [
        "the messages of the worker process cannot be read"
    ]


def test_a_channel_that_is_closed_is_not_read_again() -> None:
    async def test() -> None:
        reading = Reading()
        asked = reading.worker.channel.asked
        await reading.read([EngineStats()])
        for _ in range(2):  # the frame and the end
            assert asked.acquire(timeout=WAIT_S)
        assert not asked.acquire(timeout=0.1)
        # if it were asked again, the thread would get this
        reading.worker.channel.frames.put([EngineStats()])
        await asyncio.sleep(0.05)
        assert reading.taken == [EngineStats(), None]

    asyncio.run(test())


@pytest.mark.parametrize("first", [None, ("a",), ("a", "b")])
@pytest.mark.parametrize("second", [None, ("c",)])
def test_log_probabilities_of_joined_events(first: Any, second: Any) -> None:
    """Those of either event are kept, in order."""
    status = GenerationStatus.ACTIVE
    events = [TokensGenerated("r", (1,), status, each) for each in (first, second)]
    joined = _join_tokens(*events)
    both = [*(first or ()), *(second or ())]
    assert joined.tokens == (1, 1)
    assert joined.log_probabilities == (tuple(both) if both else None)
