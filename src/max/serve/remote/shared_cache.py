"""Serves the disk cache of an engine to engines on other machines, so that they need not compile or pack again."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import socket
import threading
from collections.abc import Iterable, Iterator

from max._host.cache_folders import cache_dir
from max._host.disk_cache import WEIGHTS_FOLDER, default_cache
from max.engine.load.packed_weights import open_copy
from max.serve.remote.cache_messages import (
    ABSENT,
    KINDS,
    MOST_BYTES,
    PIECE,
    PURPOSE,
    REQUEST,
    SIZE,
    answer_code,
)
from max.serve.remote.connections import KEY_BYTES, Acceptor, close_listener, listen

logger = logging.getLogger("max.serve")

MOST_READERS = 32
"""The maximum number of open connections; further ones are closed."""
IDLE_S = 60
"""Seconds without a request, or without progress of a send, after which a connection is closed."""
_KEY = re.compile(rb"[0-9a-f]{40}")


class SharedCache:
    """A server of cache entries, read-only, for clients that authenticate with a random key.

    Args:
        host: The address to listen on.
    """

    def __init__(self, host: str = "0.0.0.0") -> None:
        self.key = secrets.token_bytes(KEY_BYTES)
        """The key that clients need."""
        self._listener = listen(host)
        self.port: int = self._listener.getsockname()[1]
        """The port."""
        self._acceptor = Acceptor(self._listener, self.key)
        self._free = threading.BoundedSemaphore(MOST_READERS)
        threading.Thread(target=self._take, name="shared cache", daemon=True).start()

    def close(self) -> None:
        """Stops accepting connections."""
        close_listener(self._listener)

    def _take(self) -> None:
        while True:
            try:
                purpose, connection = self._acceptor.next()
            except OSError:
                return
            reader = socket.socket(fileno=os.dup(connection.fileno()))
            connection.close()
            if purpose != PURPOSE or not self._free.acquire(blocking=False):
                reader.close()
                continue
            threading.Thread(
                target=self._serve, args=(reader,), name="cache reader", daemon=True
            ).start()

    def _serve(self, reader: socket.socket) -> None:
        try:
            with reader, contextlib.suppress(OSError, ValueError):
                reader.settimeout(IDLE_S)
                while request := _receive(reader, REQUEST.size):
                    self._answer(reader, request)
        finally:
            self._free.release()

    def _answer(self, reader: socket.socket, request: bytes) -> None:
        """Answers a request.

        Raises:
            ValueError: The request is malformed.
            OSError: The client has disconnected, or does not read.
        """
        _, kind, key, start, most = REQUEST.unpack(request)
        if kind >= len(KINDS) or not _KEY.fullmatch(key) or most > MOST_BYTES:
            raise ValueError("the request is malformed")
        name = key.decode()
        if KINDS[kind] == WEIGHTS_FOLDER:
            self._send_weights(reader, request, name, start, most)
            return
        data = default_cache().file(KINDS[kind], name)
        if data is None or len(data) > most:
            self._send(reader, request, ABSENT, [])
        else:
            view = memoryview(data)
            pieces = (view[i : i + PIECE] for i in range(0, len(data), PIECE))
            self._send(reader, request, len(data), pieces)

    def _send_weights(
        self, reader: socket.socket, request: bytes, name: str, start: int, count: int
    ) -> None:
        if (found := open_copy(cache_dir() / WEIGHTS_FOLDER / name)) is None:
            self._send(reader, request, ABSENT, [])
            return
        file, num_bytes = found
        with file:
            if start + count > num_bytes:
                self._send(reader, request, ABSENT, [])
                return
            buffer = memoryview(bytearray(min(PIECE, count)))

            def pieces() -> Iterator[memoryview]:
                file.seek(start)
                for at in range(0, count, PIECE):
                    piece = buffer[: min(PIECE, count - at)]
                    if file.readinto(piece) != len(piece):
                        raise OSError("the file is too short")
                    yield piece

            self._send(reader, request, count, pieces())

    def _send(
        self, reader: socket.socket, request: bytes, size: int, pieces: Iterable[memoryview]
    ) -> None:
        header = SIZE.pack(size)
        code = answer_code(self.key, request)
        code.update(header)
        reader.sendall(header)
        for piece in pieces:
            code.update(piece)
            reader.sendall(piece)
        reader.sendall(code.digest())


def _receive(reader: socket.socket, count: int) -> bytes:
    """Receives exactly `count` bytes; empty at the end of the stream.

    Raises:
        OSError: The stream ends within a request, or times out.
    """
    data = b""
    while len(data) < count:
        part = reader.recv(count - len(data))
        if not part:
            if data:
                raise ConnectionResetError("the connection has ended within a request")
            return b""
        data += part
    return data
