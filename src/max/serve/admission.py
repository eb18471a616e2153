"""The limit on requests that wait, and when to come back."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from max.serve.errors import ApiError


class Admission:
    """Counts the requests of an engine, and refuses those beyond its queue.

    Args:
        running: Requests that the engine runs at once.
        max_queue: Requests that may wait beyond those.
    """

    def __init__(self, running: int, max_queue: int) -> None:
        self.running, self.max_queue = running, max_queue
        self.open = 0
        """The requests that run or wait."""
        self._seconds: float | None = None

    @property
    def waiting(self) -> int:
        """The requests beyond those that run at once."""
        return max(self.open - self.running, 0)

    def retry_after(self) -> int:
        """Seconds until a place in the queue is likely to be free, by the times of recent requests."""
        seconds = 1.0 if self._seconds is None else self._seconds
        # one of those that run ends on average after this time
        return max(1, math.ceil(seconds / self.running))

    @contextmanager
    def enter(self, count: int = 1) -> Iterator[None]:
        """Holds places for the length of a block.

        Args:
            count: The number of sequences.

        Raises:
            ApiError: Status 429: too many requests wait; with a ``Retry-After``.
        """
        if self.open + count > self.running + self.max_queue:
            seconds = self.retry_after()
            raise ApiError(
                f"{self.waiting} requests wait, and at most {self.max_queue} may; "
                f"try again in {seconds} s",
                status=429,
                code="queue_full",
                headers={"Retry-After": str(seconds)},
            )
        self.open += count
        begin = time.monotonic()
        try:
            yield
        finally:
            self.open -= count
            taken = time.monotonic() - begin
            self._seconds = taken if self._seconds is None else 0.8 * self._seconds + 0.2 * taken
