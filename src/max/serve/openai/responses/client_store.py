"""Keeps what clients let the server store, in bounded memory."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, Protocol, TypeVar

MOST_BYTES = 64 << 20
MOST_ENTRIES = 4096


class StoredEntry(Protocol):
    """What is stored: the client that may read it, and its bytes."""

    @property
    def client(self) -> str: ...

    @property
    def size(self) -> int: ...


Entry = TypeVar("Entry", bound=StoredEntry)


class ClientStore(Generic[Entry]):
    """The latest entries; the oldest ones are dropped where they take too much memory.

    Args:
        most_bytes: The maximum size of all.
        most_entries: The maximum number of them.
    """

    def __init__(self, most_bytes: int = MOST_BYTES, most_entries: int = MOST_ENTRIES) -> None:
        self._most_bytes, self._most_entries = most_bytes, most_entries
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._bytes = 0

    def put(self, identifier: str, entry: Entry) -> None:
        """Keeps an entry, in the place of one with its identifier, unless it alone is too large.

        Args:
            identifier: Identifies it.
            entry: The entry.
        """
        self._drop(identifier)
        # it would not stay, so there is no reason to drop all others for it
        if self._size_alone(entry) > self._most_bytes:
            return
        self._entries[identifier] = entry
        self._bytes += self._hold(entry)
        while self._bytes > self._most_bytes or len(self._entries) > self._most_entries:
            self._drop(next(iter(self._entries)))

    def find(self, identifier: str, client: str) -> Entry | None:
        """An entry of a client; None if it is not kept, or another client's.

        Args:
            identifier: Identifies it.
            client: The client.
        """
        found = self._entries.get(identifier)
        return None if found is None or found.client != client else found

    def delete(self, identifier: str, client: str) -> bool:
        """Drops an entry; whether it was there.

        Args:
            identifier: Identifies it.
            client: The client.
        """
        if self.find(identifier, client) is None:
            return False
        self._drop(identifier)
        return True

    def _drop(self, identifier: str) -> None:
        """Removes an entry from the table, if it is there."""
        dropped = self._entries.pop(identifier, None)
        if dropped is not None:
            self._bytes -= self._release(dropped)

    def _size_alone(self, entry: Entry) -> int:
        """The bytes that an entry would take if no other was kept."""
        return entry.size

    def _hold(self, entry: Entry) -> int:
        """Notes an entry that has come into the table; the bytes that it adds to those in memory."""
        return entry.size

    def _release(self, entry: Entry) -> int:
        """Notes an entry that has left the table; the bytes that leave memory with it."""
        return entry.size
