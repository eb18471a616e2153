"""Counts of a server; those of several processes are in `max.serve.routers.count_file`."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Protocol

Bucket = tuple[float, float]
"""The tokens of a key's bucket, which fills at a rate, and the time when they were counted."""


class Tally(Protocol):
    """A count of what is open."""

    @property
    def total(self) -> int:
        """The count."""
        ...

    def add(self, count: int, most: int | None = None) -> bool:
        """Adds to the count, unless it would be too great then.

        Args:
            count: What is added; it may be below 0.
            most: The greatest total; None: any.

        Returns:
            Whether it was added.
        """
        ...


class LocalTally:
    """A count of this process only."""

    def __init__(self) -> None:
        self.total = 0
        """The count."""

    def add(self, count: int, most: int | None = None) -> bool:
        """Adds to the count, as ``Tally.add``."""
        if most is not None and self.total + count > most:
            return False
        self.total += count
        return True


class KeyCounts(Protocol):
    """The open requests and the buckets of API keys, by the digests of the keys."""

    def hold_lock(self) -> AbstractContextManager[object]:
        """Keeps other processes from the counts for the length of a block."""
        ...

    def open(self, client: str) -> int:
        """The open requests of a key."""
        ...

    def add_open(self, client: str, count: int) -> None:
        """Adds to the open requests of a key."""
        ...

    def bucket(self, client: str) -> Bucket | None:
        """The bucket of a key; None: it had no request yet."""
        ...

    def set_bucket(self, client: str, bucket: Bucket) -> None:
        """Notes the bucket of a key."""
        ...


class LocalKeyCounts:
    """Those of this process only."""

    def __init__(self) -> None:
        self._open: dict[str, int] = {}
        self._buckets: dict[str, Bucket] = {}

    def hold_lock(self) -> AbstractContextManager[object]:
        """Does nothing: there is no other process."""
        return contextlib.nullcontext()

    def open(self, client: str) -> int:
        """The open requests of a key."""
        return self._open.get(client, 0)

    def add_open(self, client: str, count: int) -> None:
        """Adds to the open requests of a key."""
        self._open[client] = self.open(client) + count

    def bucket(self, client: str) -> Bucket | None:
        """The bucket of a key; None: it had no request yet."""
        return self._buckets.get(client)

    def set_bucket(self, client: str, bucket: Bucket) -> None:
        """Notes the bucket of a key."""
        self._buckets[client] = bucket
