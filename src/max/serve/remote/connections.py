"""Connections between a server and an engine, over TCP or a socket file: both sides prove that they know a key.

The frames are those of the pipe to a local worker (`MessageCodec`), and nothing that arrives is unpickled. They are not
encrypted: the network between the machines of a cluster is trusted with prompts and answers, as Ray trusts it too.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
from collections.abc import Iterable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

KEY_BYTES = 32
"""The size of a key."""
CONNECT_S = 20.0
"""The longest time in seconds to connect and to prove the key."""
_MOST_STRANGERS = 16
"""The clients that prove the key at the same time."""
_SILENCE_MS = 20_000
"""Milliseconds after which unacknowledged data ends a connection."""


def listen(host: str) -> socket.socket:
    """A socket that listens on a free port.

    Args:
        host: The address to bind; one that begins with ``/`` is the path of a socket file.
    """
    listener = socket.socket(_family(host), socket.SOCK_STREAM)
    try:
        listener.bind(host if host.startswith("/") else (host, 0))
        listener.listen(8)
    except BaseException:
        listener.close()
        raise
    return listener


def _family(host: str) -> socket.AddressFamily:
    if host.startswith("/"):
        return socket.AF_UNIX
    return socket.AF_INET6 if ":" in host else socket.AF_INET


class Acceptor:
    """Takes the connections of clients that know a key; those of others are closed.

    Clients that are silent hold up nobody: each has a thread, and the next ones wait in the system's queue. When the
    socket is closed, so are the connections that nobody has asked for.

    Args:
        listener: The socket.
        key: The key.
    """

    def __init__(self, listener: socket.socket, key: bytes) -> None:
        self._listener, self._key = listener, key
        self._found: queue.SimpleQueue[tuple[str, Connection] | None] = queue.SimpleQueue()
        """What nobody has asked for yet; None: the socket was closed."""
        # no exception is kept: its traceback would keep this object, and so the connections, open
        self._reason: tuple[Any, ...] | None = None
        self._lock = threading.Lock()
        self._free = threading.BoundedSemaphore(_MOST_STRANGERS)
        threading.Thread(target=self._take, name="clients", daemon=True).start()

    def next(self) -> tuple[str, Connection]:
        """Waits for the next connection, and returns what it is for, and the connection.

        Raises:
            OSError: The socket was closed.
        """
        item = self._found.get()
        if item is None:
            self._found.put(None)  # for later calls
            raise OSError(*(self._reason or ()))
        return item

    def _take(self) -> None:
        while True:
            try:
                accepted, _ = self._listener.accept()
                # waits for a free place, which the new thread takes itself
                with self._free:
                    pass
                threading.Thread(
                    target=self._prove, args=(accepted,), name="client", daemon=True
                ).start()
            except (OSError, RuntimeError) as error:  # closed, or no thread can be started
                self._end(error.args)
                return

    def _end(self, reason: tuple[Any, ...]) -> None:
        with self._lock:
            self._reason = reason
            with contextlib.suppress(queue.Empty):
                while (item := self._found.get_nowait()) is not None:
                    item[1].close()
            self._found.put(None)

    def _prove(self, client: socket.socket) -> None:
        with self._free, contextlib.suppress(OSError, EOFError, ValueError, AuthenticationError):
            connection = _proven(client, self._key, False, CONNECT_S)
            purpose = _purpose(connection)
            with self._lock:
                if self._reason is None:
                    self._found.put((purpose, connection))
                else:
                    connection.close()


def accept(acceptor: Acceptor, purposes: Iterable[str]) -> list[Connection]:
    """Waits for a connection of each purpose; others are closed.

    Args:
        acceptor: Takes them.
        purposes: What the connections are for.

    Raises:
        OSError: The socket was closed.
    """
    expected = list(purposes)
    connections: dict[str, Connection] = {}
    try:
        while len(connections) < len(expected):
            purpose, connection = acceptor.next()
            if purpose in expected and purpose not in connections:
                connections[purpose] = connection
            else:
                connection.close()
    except BaseException:
        for connection in connections.values():
            connection.close()
        raise
    return [connections[purpose] for purpose in expected]


def close_listener(listener: socket.socket) -> None:
    """Stops listening, which also ends an `accept` that waits.

    Args:
        listener: The socket.
    """
    # a close alone does not wake a thread that accepts
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def shut_down(connection: Connection, how: int = socket.SHUT_RDWR) -> None:
    """Ends a connection, and with it the calls of other threads that wait for it; its file stays open.

    Args:
        connection: The connection.
        how: Which of its directions end, as for `socket.socket.shutdown`.
    """
    # a close alone does not wake them where the other side is silent
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.shutdown(how)


def connect(
    host: str, port: int, key: bytes, purpose: str, seconds: float | None = None
) -> Connection:
    """Connects to a listener that knows the key.

    Args:
        host: Its address, or the path of its socket file.
        port: Its port; a socket file has none.
        key: The key.
        purpose: What the connection is for.
        seconds: The longest time to connect, and that it may be silent while it proves the key; None: `CONNECT_S`.

    Raises:
        OSError: It cannot be reached, or does not know the key.
    """
    seconds = CONNECT_S if seconds is None else seconds
    try:
        if host.startswith("/"):
            connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connected.settimeout(seconds)
            try:
                connected.connect(host)
            except BaseException:
                connected.close()
                raise
        else:
            connected = socket.create_connection((host, port), seconds)
        connection = _proven(connected, key, True, seconds)
        connection.send_bytes(purpose.encode())
    except (EOFError, ValueError, AuthenticationError) as error:
        raise ConnectionRefusedError(f"{host}:{port} does not know the key") from error
    return connection


def _purpose(connection: Connection) -> str:
    return connection.recv_bytes(64).decode("utf-8", "replace")


def _proven(
    connected: socket.socket, key: bytes, is_client: bool, most_seconds: float
) -> Connection:
    """The connection of a socket after both sides have proven the key."""
    # a timeout of the system, as `Connection` reads the descriptor without Python's
    seconds, rest = divmod(int(most_seconds * 1e6), 1_000_000)
    # `struct timeval` of 64-bit systems: seconds, microseconds
    limit = seconds.to_bytes(8, "little") + rest.to_bytes(8, "little")
    connected.settimeout(None)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    if connected.family in (socket.AF_INET, socket.AF_INET6):
        _find_losses(connected)
    connection = Connection(connected.detach())
    try:
        # as in `multiprocessing`: the side that listens asks first
        for step in (answer_challenge, deliver_challenge)[:: 1 if is_client else -1]:
            step(connection, key)
        with socket.socket(fileno=connection.fileno()) as same:
            # 0: from now on a read waits without a limit
            same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, bytes(16))
            # the descriptor stays that of the connection
            same.detach()
    except BaseException:
        connection.close()
        raise
    return connection


def _find_losses(connected: socket.socket) -> None:
    """Lets a connection end when its other side is gone without a word."""
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE_MS)
    if hasattr(socket, "TCP_KEEPIDLE"):
        # seconds: the first probe of a silent connection, and each further one
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
