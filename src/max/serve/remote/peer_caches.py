"""The client of other machines' caches, which a starting engine queries before it compiles or packs."""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from max._host.disk_cache import WEIGHTS_FOLDER
from max.serve.remote.cache_messages import (
    ABSENT,
    CODE_BYTES,
    KINDS,
    MOST_BYTES,
    PIECE,
    PURPOSE,
    RANGE,
    REQUEST,
    SIZE,
    answer_code,
)
from max.serve.remote.connections import connect
from max.serve.routers.address import DoorAddress

logger = logging.getLogger("max.serve")

GRACE_S = 2.0
"""The initial time budget in seconds of all entries, and of a model's packed weights; one response may take half."""
ENTRY_S = 0.02
"""Seconds that each fetched entry adds to the budget: compiling it takes longer."""
LEAST_RATE = 300e6
"""Fetched bytes that add a second to the budget: packing is twice as fast (two cores of Zen 3, cached files)."""
STREAMS = 4
"""The number of parallel connections for packed weights."""
_MOST_ABSENT = 1 << 16
"""The maximum number of entries that are remembered as missing."""


class _Peer:
    """A connection to the cache of another engine.

    Args:
        door: Its address.
        seconds: The connection timeout.

    Raises:
        OSError: It is unreachable, or does not have the key.
    """

    def __init__(self, door: DoorAddress, seconds: float) -> None:
        self._key, self._end = door.key, 0.0
        with connect(door.host, door.port, door.key, PURPOSE, max(seconds, 0.01)) as connection:
            self._socket = socket.socket(fileno=os.dup(connection.fileno()))

    def close(self) -> None:
        """Closes the connection."""
        self._socket.close()

    def ask(
        self,
        kind: str,
        key: str,
        start: int,
        most: int,
        left: Callable[[], float],
        take: Callable[[memoryview], None],
    ) -> int | None:
        """Requests an entry, or a range of packed weights.

        Args:
            kind: The kind.
            key: The key.
            start: The first byte.
            most: The maximum payload size; for packed weights the exact size.
            left: Returns the seconds left of the caller's budget.
            take: Called with each piece of the payload, before the HMAC is verified.

        Returns:
            The payload size; None if the entry is missing.

        Raises:
            OSError: No valid response arrived in time.
        """
        number = KINDS.index(kind)
        request = REQUEST.pack(secrets.token_bytes(16), number, key.encode(), start, most)
        # a slow peer must leave time for the others
        self._end = time.monotonic() + GRACE_S / 2
        self._wait(left)
        self._socket.sendall(request)
        code = answer_code(self._key, request)
        piece = memoryview(bytearray(PIECE))
        header = self._receive(piece[: SIZE.size], left)
        code.update(header)
        (size,) = SIZE.unpack(header)
        if size not in (ABSENT, most) and (size > most or kind == WEIGHTS_FOLDER):
            raise ConnectionError(f"a response of {size} bytes to a request for {most}")
        for at in range(0, 0 if size == ABSENT else size, PIECE):
            part = self._receive(piece[: min(PIECE, size - at)], left)
            code.update(part)
            self._end += len(part) / LEAST_RATE
            take(part)
        if not hmac.compare_digest(self._receive(piece[:CODE_BYTES], left), code.digest()):
            raise ConnectionError("the response has a wrong HMAC")
        return None if size == ABSENT else size

    def _wait(self, left: Callable[[], float]) -> None:
        """Sets the timeout of the next socket operation."""
        seconds = min(left(), self._end - time.monotonic())
        if seconds <= 0:
            raise TimeoutError("the time budget is used up")
        self._socket.settimeout(seconds)

    def _receive(self, into: memoryview, left: Callable[[], float]) -> memoryview:
        at = 0
        while at < len(into):
            self._wait(left)
            count = self._socket.recv_into(into[at:])
            if not count:
                raise ConnectionResetError("the connection was closed within a response")
            at += count
        return into


class PeerCaches:
    """Implements `max._host.disk_cache.RemoteCache`; a late or invalid response counts as a missing entry.

    Over the life of the process, requests for entries take at most `GRACE_S`, plus `ENTRY_S` and the time of its bytes
    at `LEAST_RATE` for each fetched entry. The packed weights of a model have a budget of their own. A peer that has
    failed is not queried again.

    Args:
        doors: The addresses of the caches.
    """

    def __init__(self, doors: Sequence[DoorAddress]) -> None:
        self._doors = list(doors)
        self._peers: list[_Peer] = []
        self._left = GRACE_S
        self._absent: set[tuple[str, str]] = set()
        self._lock = threading.Lock()
        self._ends = threading.Lock()
        self._is_closed = False
        # in parallel with the engine's imports
        self._connecting = [
            threading.Thread(target=self._connect, args=(door,), name="peer cache", daemon=True)
            for door in doors
        ]
        for thread in self._connecting:
            thread.start()

    def close(self) -> None:
        """Closes all connections; later calls find nothing."""
        with self._lock, self._ends:
            self._is_closed = True
            for peer in self._peers:
                peer.close()
            self._peers.clear()
            self._doors.clear()

    def _connect(self, door: DoorAddress) -> None:
        try:
            peer = _Peer(door, GRACE_S / 2)
        except OSError as error:
            logger.info("the cache at %s:%d is unreachable: %s", door.host, door.port, error)
            with self._ends:
                self._doors = [each for each in self._doors if each is not door]
            return
        with self._ends:
            if self._is_closed:
                peer.close()
            else:
                self._peers.append(peer)

    def entry(self, kind: str, key: str) -> bytes | None:
        """Fetches the file of an entry; None if no peer has it or responds in time.

        Args:
            kind: One of `SHARED_KINDS`.
            key: The key.
        """
        with self._lock:
            if (kind, key) in self._absent:
                return None
            begin = time.monotonic()
            data = self._entry(kind, key, lambda: begin + self._left - time.monotonic())
            self._left -= time.monotonic() - begin
            if data is not None:
                self._left += ENTRY_S + len(data) / LEAST_RATE
            elif len(self._absent) < _MOST_ABSENT:
                self._absent.add((kind, key))
            return data

    def _entry(self, kind: str, key: str, left: Callable[[], float]) -> bytes | None:
        for thread in self._connecting:
            thread.join(max(left(), 0))
        for peer in list(self._peers):
            data = bytearray()
            try:
                found = peer.ask(kind, key, 0, MOST_BYTES, left, data.extend)
            except OSError as error:
                logger.info("a peer cache failed and is not queried again: %s", error)
                self._peers.remove(peer)
                peer.close()
                continue
            if found is not None:
                # query this peer first from now on: it probably has the other entries too
                self._peers.remove(peer)
                self._peers.insert(0, peer)
                return bytes(data)
        return None

    def weights(self, key: str, num_bytes: int, file: int) -> bool:
        """Fetches packed weights into a file; returns whether they arrived completely and in time.

        Args:
            key: Their key.
            num_bytes: Their size.
            file: The descriptor of the file.
        """
        for thread in self._connecting:
            thread.join(GRACE_S / 2)
        transfer = _Transfer(key, num_bytes, file)
        doors = list(self._doors)
        # a further round for ranges that a failed peer did not deliver
        while doors and transfer.ranges and transfer.left() > 0:
            failed: list[DoorAddress] = []
            threads = [
                threading.Thread(
                    target=transfer.bring, args=(door, failed), name="peer weights", daemon=True
                )
                for door in (doors * STREAMS)[:STREAMS]
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                # a thread that is still connecting then writes nothing: the transfer is closed
                thread.join(max(transfer.left(), 0.0))
            doors = [door for door in doors if door not in failed]
        transfer.close()
        return transfer.num_missing == 0


class _Transfer:
    """A transfer of packed weights, in ranges over several connections.

    Args:
        key: Their key.
        num_bytes: Their size.
        file: The descriptor of the destination file.
    """

    def __init__(self, key: str, num_bytes: int, file: int) -> None:
        self._key, self._num_bytes = key, num_bytes
        # a duplicate: a late thread may outlive the caller's descriptor
        self._file = os.dup(file)
        self.ranges = deque(range(0, num_bytes, RANGE))
        """The offsets of the ranges that no thread has taken."""
        self.num_missing = len(self.ranges)
        """The number of ranges that have not arrived."""
        self._end = time.monotonic() + GRACE_S
        self._lock = threading.Lock()
        self._is_closed = False

    def left(self) -> float:
        """The seconds left of the budget."""
        return self._end - time.monotonic()

    def close(self) -> None:
        """Stops all writes to the file."""
        with self._lock:
            self._is_closed = True
            os.close(self._file)

    def bring(self, door: DoorAddress, failed: list[DoorAddress]) -> None:
        """Fetches ranges from a peer until none is left.

        Args:
            door: The peer's address.
            failed: Receives the address if the peer fails.
        """
        at = None
        try:
            with contextlib.closing(_Peer(door, min(self.left(), GRACE_S / 2))) as peer:
                while self.ranges:
                    at = self.ranges.popleft()
                    self._bring(peer, at)
                    at = None
        except IndexError:
            return  # another thread took the last range
        except OSError as error:
            if at is not None:
                self.ranges.append(at)
            failed.append(door)
            logger.info("packed weights from %s:%d: %s", door.host, door.port, error)

    def _bring(self, peer: _Peer, start: int) -> None:
        at, count = start, min(RANGE, self._num_bytes - start)

        def write(piece: memoryview) -> None:
            nonlocal at
            while piece:
                with self._lock:
                    if self._is_closed:
                        raise TimeoutError("the time budget is used up")
                    written = os.pwrite(self._file, piece, at)
                at, piece = at + written, piece[written:]

        if peer.ask(WEIGHTS_FOLDER, self._key, start, count, self.left, write) is None:
            raise FileNotFoundError("the peer has no such weights")
        with self._lock:
            self.num_missing -= 1
            self._end += count / LEAST_RATE
