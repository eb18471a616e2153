"""The caches of other machines, as an engine that starts asks them before it compiles or packs itself."""

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
"""Seconds that all entries may take without any that comes, and all weights without a byte; one answer half of it."""
ENTRY_S = 0.02
"""Seconds that each entry which has come adds: compiling it takes longer."""
LEAST_RATE = 300e6
"""Bytes that add a second: packing is twice as fast (two cores of Zen 3, files that are in memory)."""
STREAMS = 4
"""The connections that packed weights come over at a time."""
_MOST_ABSENT = 1 << 16
"""The entries that are known to be nowhere."""


class _Peer:
    """A connection to the cache of another engine.

    Args:
        door: Where it is.
        seconds: The longest time to connect.

    Raises:
        OSError: It cannot be reached, or does not know the key.
    """

    def __init__(self, door: DoorAddress, seconds: float) -> None:
        self._key, self._end = door.key, 0.0
        with connect(door.host, door.port, door.key, PURPOSE, max(seconds, 0.01)) as connection:
            self._socket = socket.socket(fileno=os.dup(connection.fileno()))

    def close(self) -> None:
        """Ends the connection."""
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
        """Asks for an entry, or a range of packed weights.

        Args:
            kind: The kind.
            key: The key.
            start: The first byte.
            most: The most bytes; of weights, all that are asked for.
            left: Returns the seconds that are left.
            take: Called with each piece, before it is known whether all of them are right.

        Returns:
            The size; None if there is none.

        Raises:
            OSError: No right answer has come in time.
        """
        number = KINDS.index(kind)
        request = REQUEST.pack(secrets.token_bytes(16), number, key.encode(), start, most)
        # one that is slow leaves time for others
        self._end = time.monotonic() + GRACE_S / 2
        self._wait(left)
        self._socket.sendall(request)
        code = answer_code(self._key, request)
        piece = memoryview(bytearray(PIECE))
        header = self._receive(piece[: SIZE.size], left)
        code.update(header)
        (size,) = SIZE.unpack(header)
        if size not in (ABSENT, most) and (size > most or kind == WEIGHTS_FOLDER):
            raise ConnectionError(f"an answer of {size} bytes, where {most} were asked for")
        for at in range(0, 0 if size == ABSENT else size, PIECE):
            part = self._receive(piece[: min(PIECE, size - at)], left)
            code.update(part)
            self._end += len(part) / LEAST_RATE
            take(part)
        if not hmac.compare_digest(self._receive(piece[:CODE_BYTES], left), code.digest()):
            raise ConnectionError("an answer of somebody who does not know the key")
        return None if size == ABSENT else size

    def _wait(self, left: Callable[[], float]) -> None:
        """Sets the time of the next call of the socket."""
        seconds = min(left(), self._end - time.monotonic())
        if seconds <= 0:
            raise TimeoutError("it has taken too long")
        self._socket.settimeout(seconds)

    def _receive(self, into: memoryview, left: Callable[[], float]) -> memoryview:
        at = 0
        while at < len(into):
            self._wait(left)
            count = self._socket.recv_into(into[at:])
            if not count:
                raise ConnectionResetError("the connection has ended within an answer")
            at += count
        return into


class PeerCaches:
    """Implements `max._host.disk_cache.Elsewhere`: what is absent there, late or wrong counts as absent.

    The whole life of the process, entries take at most `GRACE_S`, and `ENTRY_S` and the time of `LEAST_RATE` for each
    that comes; so do the packed weights of a model, for each byte. A cache that has failed is not asked again.

    Args:
        doors: Where the caches are.
    """

    def __init__(self, doors: Sequence[DoorAddress]) -> None:
        self._doors = list(doors)
        self._peers: list[_Peer] = []
        self._left = GRACE_S
        self._absent: set[tuple[str, str]] = set()
        self._lock = threading.Lock()
        self._ends = threading.Lock()
        self._is_closed = False
        # while the engine imports its modules
        self._connecting = [
            threading.Thread(target=self._connect, args=(door,), name="peer cache", daemon=True)
            for door in doors
        ]
        for thread in self._connecting:
            thread.start()

    def close(self) -> None:
        """Asks nobody any more."""
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
            logger.info("the cache at %s:%d cannot be reached: %s", door.host, door.port, error)
            with self._ends:
                self._doors = [each for each in self._doors if each is not door]
            return
        with self._ends:
            if self._is_closed:
                peer.close()
            else:
                self._peers.append(peer)

    def entry(self, kind: str, key: str) -> bytes | None:
        """The file of an entry as another machine has it; None if none has it, or none tells in time.

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
                logger.info("the cache of another machine is not asked any more: %s", error)
                self._peers.remove(peer)
                peer.close()
                continue
            if found is not None:
                # first the one that had it: it has the others, too
                self._peers.remove(peer)
                self._peers.insert(0, peer)
                return bytes(data)
        return None

    def weights(self, key: str, num_bytes: int, file: int) -> bool:
        """Writes packed weights to a file; returns whether all of them have come, and in time.

        Args:
            key: Their key.
            num_bytes: Their size.
            file: The descriptor of the file.
        """
        for thread in self._connecting:
            thread.join(GRACE_S / 2)
        transfer = _Transfer(key, num_bytes, file)
        doors = list(self._doors)
        # again for what one has not brought
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
                # one that still connects then writes nothing any more
                thread.join(max(transfer.left(), 0.0))
            doors = [door for door in doors if door not in failed]
        transfer.close()
        return transfer.num_missing == 0


class _Transfer:
    """Packed weights that are on their way.

    Args:
        key: Their key.
        num_bytes: Their size.
        file: The descriptor of the file that they are written to.
    """

    def __init__(self, key: str, num_bytes: int, file: int) -> None:
        self._key, self._num_bytes = key, num_bytes
        # its own, as a thread may be late
        self._file = os.dup(file)
        self.ranges = deque(range(0, num_bytes, RANGE))
        """The begins of the ranges that no thread is at."""
        self.num_missing = len(self.ranges)
        """The ranges that have not come."""
        self._end = time.monotonic() + GRACE_S
        self._lock = threading.Lock()
        self._is_closed = False

    def left(self) -> float:
        """The seconds that are left."""
        return self._end - time.monotonic()

    def close(self) -> None:
        """Writes nothing any more."""
        with self._lock:
            self._is_closed = True
            os.close(self._file)

    def bring(self, door: DoorAddress, failed: list[DoorAddress]) -> None:
        """Brings ranges until none is left.

        Args:
            door: Where they come from.
            failed: Gets the door if they cannot come from there.
        """
        at = None
        try:
            with contextlib.closing(_Peer(door, min(self.left(), GRACE_S / 2))) as peer:
                while self.ranges:
                    at = self.ranges.popleft()
                    self._bring(peer, at)
                    at = None
        except IndexError:
            return  # another thread has taken the last one
        except OSError as error:
            if at is not None:
                self.ranges.append(at)
            failed.append(door)
            logger.info("packed weights of %s:%d: %s", door.host, door.port, error)

    def _bring(self, peer: _Peer, start: int) -> None:
        at, count = start, min(RANGE, self._num_bytes - start)

        def write(piece: memoryview) -> None:
            nonlocal at
            while piece:
                with self._lock:
                    if self._is_closed:
                        raise TimeoutError("it has taken too long")
                    written = os.pwrite(self._file, piece, at)
                at, piece = at + written, piece[written:]

        if peer.ask(WEIGHTS_FOLDER, self._key, start, count, self.left, write) is None:
            raise FileNotFoundError("it has none of them")
        with self._lock:
            self.num_missing -= 1
            self._end += count / LEAST_RATE
