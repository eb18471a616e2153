"""Counts in a file that the processes of a server share.

Each process has a row of counts of its own, and what is counted is the sum of the rows, so that nothing of a process
that was killed stays counted after its row was cleared. What depends on the counts of others is decided under a lock of
the file, which the system frees if its holder dies.
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

from max.serve.http.middleware import key_digest
from max.serve.models.tallies import Bucket
from max.serve.process.settings import ServerSettings


class FileLock:
    """The lock of the counts of a file, for the length of a block.

    Args:
        file: The file, open in this process.
    """

    def __init__(self, file: int) -> None:
        self._file = file

    def __enter__(self) -> None:
        # such locks are of a process, not of a thread: only its event loop takes them
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1)

    def __exit__(self, *error: object) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1)


class CountFile:
    """Counts in a file that processes share, of 8 bytes each: rows of whole numbers, then the buckets of keys.

    Args:
        path: The file; its first process makes it.
        rows: The processes at the most.
        row: The row of this process.
        models: The number of models.
        keys: The digests of the keys.
    """

    def __init__(self, path: Path, rows: int, row: int, models: int, keys: Sequence[str]) -> None:
        # one column for the bytes of bodies, one for each model, one for each key
        self.row, self._rows, self._columns = row, rows, 1 + models + len(keys)
        self._keys = {key: number for number, key in enumerate(keys)}
        self._models = models
        # [rows, columns] counts, then [keys, 2]: tokens and time of each bucket
        size = 8 * (rows * self._columns + 2 * len(keys))
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        # bytes that were not there are 0: nothing is counted
        os.ftruncate(self._file, size)
        self._lock = FileLock(self._file)
        memory = mmap.mmap(self._file, size)
        self._counts = memoryview(memory).cast("q")
        self._buckets = memoryview(memory).cast("d")[rows * self._columns :]

    def hold_lock(self) -> FileLock:
        """Keeps other processes from changes for the length of a block, which must not wait for anything."""
        return self._lock

    def turn(self, model_index: int) -> FileTurn:
        """The turn to try a request of a model that may end engines.

        Args:
            model_index: The number of the model, from 0.
        """
        # the first byte is the lock of the counts
        return FileTurn(self._file, 1 + model_index)

    def total(self, column: int) -> int:
        """The sum of a column.

        Args:
            column: The column.
        """
        # no lock: each process changes its own row, and 8 aligned bytes are read at once
        return sum(self._counts[column : self._rows * self._columns : self._columns])

    def add(self, column: int, count: int) -> None:
        """Adds to a count of this process.

        Args:
            column: The column.
            count: What is added.
        """
        self._counts[self.row * self._columns + column] += count

    def clear(self, row: int) -> None:
        """Forgets the counts of a process that has ended.

        Args:
            row: Its row.
        """
        for column in range(self._columns):
            self._counts[row * self._columns + column] = 0

    @property
    def bodies(self) -> SharedTally:
        """The bytes of the bodies of open requests."""
        return SharedTally(self, 0)

    def model(self, model_index: int) -> SharedTally:
        """The open requests of a model.

        Args:
            model_index: Its number, from 0.
        """
        return SharedTally(self, 1 + model_index)

    def open(self, client: str) -> int:
        """The open requests of a key."""
        return self.total(1 + self._models + self._keys[client])

    def add_open(self, client: str, count: int) -> None:
        """Adds to the open requests of a key."""
        self.add(1 + self._models + self._keys[client], count)

    def bucket(self, client: str) -> Bucket | None:
        """The bucket of a key; None: it had no request yet."""
        place = 2 * self._keys[client]
        tokens, counted = self._buckets[place], self._buckets[place + 1]
        # 0: no time was noted yet
        return (tokens, counted) if counted else None

    def set_bucket(self, client: str, bucket: Bucket) -> None:
        """Notes the bucket of a key."""
        place = 2 * self._keys[client]
        self._buckets[place], self._buckets[place + 1] = bucket


class SharedTally:
    """A count of a file, as a :class:`Tally`.

    Args:
        file: The file.
        column: The column.
    """

    def __init__(self, file: CountFile, column: int) -> None:
        self._file, self._column = file, column

    @property
    def total(self) -> int:
        """The count of all processes."""
        return self._file.total(self._column)

    def add(self, count: int, most: int | None = None) -> bool:
        """Adds to the count, as ``Tally.add``."""
        # no lock: a row is changed by its process only
        if most is None or count <= 0:
            self._file.add(self._column, count)
            return True
        with self._file.hold_lock():
            if self.total + count > most:
                return False
            self._file.add(self._column, count)
        return True


HELD_S = 1.0
"""Seconds for which a turn stays taken after the loss of an engine, so that all processes see whose it was."""


class FileTurn:
    """The turn of one of several processes to try a request, as a ``Turn``: a lock of a byte of a file.

    Args:
        file: The file, open in this process.
        place: The byte.
    """

    def __init__(self, file: int, place: int) -> None:
        self._file, self._place = file, place
        self._holders = 0

    def take(self) -> bool:
        """Takes it; whether no other process has it."""
        try:
            # the system frees it if this process dies
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._place)
        except OSError:
            return False
        self._holders += 1
        return True

    def leave(self, has_lost: bool = False) -> None:
        """Leaves it to others; after a loss a little later."""
        if has_lost:
            asyncio.get_running_loop().call_later(HELD_S, self._leave)
        else:
            self._leave()

    @property
    def is_taken(self) -> bool:
        """Whether another process has it."""
        # a process can take a lock that it has, so that says nothing about others
        if self._holders or not self.take():
            return not self._holders
        self._leave()
        return False

    def _leave(self) -> None:
        # several replicas of this process may try requests at the same time
        self._holders -= 1
        if not self._holders:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, self._place)


def counts_of(settings: ServerSettings, folder: str, rows: int, row: int, models: int) -> CountFile:
    """The counts of a server, for one of its processes.

    Args:
        settings: The settings of the server.
        folder: Its folder.
        rows: The rows of the file.
        row: That of the process.
        models: The number of models.
    """
    # without keys, and on paths that need none, all clients share one limit
    keys = ["", *map(key_digest, dict.fromkeys(settings.api_keys))]
    return CountFile(Path(folder) / "counts", rows, row, models, keys)
