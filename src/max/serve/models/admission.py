"""The limits on waiting requests and on requests of one key, and the time after which a client may retry."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from max.serve.errors import ApiError
from max.serve.models.tallies import KeyCounts, LocalKeyCounts, LocalTally, Tally

_NOTHING = nullcontext()


class Held:
    """What a request holds for the length of a block: without a generator, as each request has several.

    Args:
        leave: Called at the end with the seconds of the block.
        clock: Returns monotonic time in seconds.
    """

    def __init__(self, leave: Callable[[float], None], clock: Callable[[], float]) -> None:
        self._leave, self._clock, self._begin = leave, clock, clock()

    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        self._leave(self._clock() - self._begin)


class Admission:
    """Counts the requests of an engine, and refuses those beyond its queue.

    Args:
        running: Requests that the engine runs at once.
        max_queue: Requests that may wait beyond those.
    """

    def __init__(self, running: int, max_queue: int) -> None:
        self.running, self.max_queue = running, max_queue
        self.tally: Tally = LocalTally()
        """Counts the requests that run or wait, those of other processes of the server too."""
        self._seconds: float | None = None

    @property
    def open(self) -> int:
        """The requests that run or wait."""
        return self.tally.total

    @property
    def waiting(self) -> int:
        """The requests beyond those that run at once."""
        return max(self.open - self.running, 0)

    def retry_after(self) -> int:
        """Seconds until a place in the queue is likely to be free, estimated from the times of recent requests."""
        seconds = 1.0 if self._seconds is None else self._seconds
        # of the running requests one ends after this time, on average
        return max(1, math.ceil(seconds / self.running))

    def enter(self, count: int = 1) -> Held:
        """Holds places for the length of a block.

        Args:
            count: The number of sequences.

        Raises:
            ApiError: Status 429: too many requests wait; with a ``Retry-After``.
        """
        # all choices of a request at once: half of them would wait for places that it holds itself
        if not self.tally.add(count, self.running + self.max_queue):
            raise _limit_error(
                f"{self.waiting} requests wait, and at most {self.max_queue} may",
                self.retry_after(),
                "queue_full",
            )

        def leave(seconds: float) -> None:
            self.tally.add(-count)
            # a mean in which earlier requests count less and less
            self._seconds = (
                seconds if self._seconds is None else 0.8 * self._seconds + 0.2 * seconds
            )

        return Held(leave, time.monotonic)


class KeyLimits:
    """Limits the requests of each API key: those that are open, and those a minute.

    Without keys, all clients share one limit.

    Args:
        max_open: The maximum number of open requests of a key; None: no limit.
        per_minute: The maximum number of requests a minute of a key, on average; None: no limit. As many may come
            at once.
        clock: Returns monotonic time in seconds.
        counts: Where they are counted; None: in this process only.
    """

    def __init__(
        self,
        max_open: int | None = None,
        per_minute: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        counts: KeyCounts | None = None,
    ) -> None:
        self._max_open, self._per_minute, self._clock = max_open, per_minute, clock
        self._counts = counts or LocalKeyCounts()
        self._seconds: dict[str, float] = {}

    def enter(self, client: str) -> AbstractContextManager[None]:
        """Counts a request for the length of a block.

        Args:
            client: The digest of its key.

        Raises:
            ApiError: Status 429: the key has too many; with the time after which one is accepted.
        """
        if self._max_open is None and self._per_minute is None:
            return _NOTHING
        # check and count are one step for all processes of the server
        with self._counts.hold_lock():
            held = self._counts.open(client)
            if self._max_open is not None and held >= self._max_open:
                # the mean time of its requests, shared by those that are open
                seconds = math.ceil(self._seconds.get(client, 1.0) / held)
                raise _limit_error(
                    f"this key has {held} open requests, and at most {self._max_open} may be",
                    max(seconds, 1),
                    "key_concurrency_limit",
                )
            # first, as a request that the rate refuses holds no place
            self._take_token(client)
            self._counts.add_open(client, 1)

        def leave(seconds: float) -> None:
            mean = self._seconds.get(client, seconds)
            self._seconds[client] = 0.8 * mean + 0.2 * seconds
            self._counts.add_open(client, -1)

        return Held(leave, self._clock)

    def _take_token(self, client: str) -> None:
        if self._per_minute is None:
            return
        rate, now = self._per_minute / 60.0, self._clock()
        # a bucket of less than one token would never let a request pass
        most = max(self._per_minute, 1.0)
        # a new key has a full bucket
        tokens, counted = self._counts.bucket(client) or (most, now)
        tokens = min(tokens + (now - counted) * rate, most)
        if tokens < 1.0:
            self._counts.set_bucket(client, (tokens, now))
            raise _limit_error(
                f"this key may send {self._per_minute:g} requests a minute",
                math.ceil((1.0 - tokens) / rate),
                "key_rate_limit",
            )
        self._counts.set_bucket(client, (tokens - 1.0, now))


def _limit_error(message: str, seconds: int, code: str) -> ApiError:
    return ApiError(
        f"{message}; try again in {seconds} s",
        status=429,
        code=code,
        headers={"Retry-After": str(seconds)},
    )
