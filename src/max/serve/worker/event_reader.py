"""Hands the events of a worker process to an event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from max.pipelines.generation.channel import Channel
from max.pipelines.generation.protocol import Event
from max.serve.worker.encoder_messages import TextsEncoded

logger = logging.getLogger("max.serve")

WorkerMessage: TypeAlias = Event | TextsEncoded | None
"""What a worker sends; None: its channel is closed."""


class Worker(Protocol):
    """A started worker process; ``WorkerProcess`` implements it."""

    @property
    def channel(self) -> Channel[Any, Any]:
        """The users' end of the channel."""
        ...

    @property
    def pid(self) -> int | None:
        """The number of the process."""
        ...

    @property
    def exit_reason(self) -> str:
        """How the process has ended, in words."""
        ...

    def join(self, timeout: float | None = None) -> None:
        """Waits for the end of the process.

        Args:
            timeout: The longest time in seconds; None: no limit.
        """
        ...

    def kill(self) -> None:
        """Ends the process at once, and waits for it."""
        ...


class EventReader:
    """A thread that receives the events of a worker, and wakes an event loop once for all that wait.

    Args:
        worker: The worker.
        loop: The event loop.
        take: Called in the loop with the worker and each of its events in order, None at their end.
    """

    def __init__(
        self,
        worker: Worker,
        loop: asyncio.AbstractEventLoop,
        take: Callable[[Worker, WorkerMessage], None],
    ) -> None:
        self._worker, self._loop, self._take = worker, loop, take
        self._incoming: deque[WorkerMessage] = deque()
        self._wakes = False
        self._lock = threading.Lock()  # guards the two before
        threading.Thread(target=self._read, name="engine events", daemon=True).start()

    def _read(self) -> None:
        """Receives events until the channel is closed, all that wait at once."""
        while True:
            events: Sequence[WorkerMessage]
            try:
                events = self._worker.channel.receive_all()
            except EOFError:
                events = [None]
            except Exception:  # a message that cannot be decoded: the worker is as good as lost
                logger.exception("the messages of the worker process cannot be read")
                events = [None]
            with self._lock:
                self._incoming.extend(events)
                wake, self._wakes = not self._wakes, True
            try:
                if wake:
                    self._loop.call_soon_threadsafe(self._drain)
            except RuntimeError:
                return  # the loop is closed
            if events[-1] is None:
                return

    def _drain(self) -> None:
        with self._lock:
            incoming, self._incoming = self._incoming, deque()
            self._wakes = False
        for event in incoming:
            self._take(self._worker, event)
