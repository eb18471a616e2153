"""Finds the request that ends workers: those whose worker was lost are sent to the next one after another."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from max.serve.worker.subscription import OpenRequest

MOST_LOSSES = 3
"""A request ends when as many workers have died that ran it: it may be the cause of their deaths."""
MOST_HANGS = 2
"""The same for workers that hang, each of which takes a while to be replaced."""


AGAIN_S = 0.02
"""Seconds after which a server process asks again for its turn to try a request."""


class Turn(Protocol):
    """The turn of a server process to try a request, where several processes share the engines."""

    def take(self) -> bool:
        """Takes it; whether no other process has it."""
        ...

    def leave(self, has_lost: bool = False) -> None:
        """Leaves it to others; after a loss a little later, as others have to see who had it."""
        ...

    @property
    def is_taken(self) -> bool:
        """Whether another process has it."""
        ...


class OwnTurn:
    """That of the only process: always its own."""

    is_taken = False

    def take(self) -> bool:
        """Takes it, which is always possible."""
        return True

    def leave(self, has_lost: bool = False) -> None:
        """Does nothing."""


class Suspects:
    """The requests of a replica whose worker was lost.

    One at a time is sent until its first event comes: if the worker is lost by then, no other one is blamed.

    Args:
        is_open: Whether a request is still open, and the replica's.
        submit: Sends a request.
        turn: Returns the turn to try a request.
    """

    def __init__(
        self,
        is_open: Callable[[OpenRequest], bool],
        submit: Callable[[OpenRequest], None],
        turn: Callable[[], Turn],
    ) -> None:
        self._is_open, self._submit, self._turn = is_open, submit, turn
        self._waiting: deque[OpenRequest] = deque()
        self._tried: OpenRequest | None = None

    def run(self, entry: OpenRequest) -> None:
        """Sends a request as soon as those before it have run a step."""
        self._waiting.append(entry)
        self._try_next()

    def clear(self, request_id: str) -> None:
        """Notes that the worker has run a step with a request, or that it is not needed any more."""
        if self._tried is not None and self._tried.request.request_id == request_id:
            self._tried = None
            self._turn().leave()
            self._try_next()

    def blame(self, sent_requests: Sequence[OpenRequest], hangs: bool) -> list[OpenRequest]:
        """Counts the loss of the worker for the requests that may be its cause.

        Args:
            sent_requests: The open requests that it had; they are suspects from now on.
            hangs: Whether it is ended because it does not go on.

        Returns:
            Those over which too many were lost.
        """
        tried = self._tried
        # the one that was tried ran alone on the worker, so it alone is blamed
        blamed = [tried] if tried is not None and tried in sent_requests else list(sent_requests)
        if tried is None and self._turn().is_taken:
            blamed = []  # another process has tried one
        elif tried is not None:
            self._turn().leave(has_lost=True)
        for entry in blamed:
            entry.losses += 1
        for entry in sent_requests:
            entry.is_suspect, entry.is_sent = True, False
        self._waiting.clear()
        self._tried = None
        most = MOST_HANGS if hangs else MOST_LOSSES
        return [entry for entry in blamed if entry.losses >= most]

    def _try_next(self) -> None:
        while self._waiting and self._tried is None:
            if not self._is_open(self._waiting[0]):
                self._waiting.popleft()
            elif self._turn().take():
                self._tried = entry = self._waiting.popleft()
                self._submit(entry)
            else:
                # another process tells nobody when it leaves its turn
                asyncio.get_running_loop().call_later(AGAIN_S, self._try_next)
                return
