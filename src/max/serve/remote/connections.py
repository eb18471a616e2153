"""Connections between a server and an engine over TCP: both sides prove that they know a key.

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
        host: The address to bind.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((host, 0))
    listener.listen(8)
    return listener


def accept(listener: socket.socket, key: bytes, purposes: Iterable[str]) -> list[Connection]:
    """Waits for a connection of each purpose by a client that knows the key; others are closed.

    Args:
        listener: The socket; it is closed at the end.
        key: The key.
        purposes: What the connections are for.

    Raises:
        OSError: The socket was closed.
    """
    expected = list(purposes)
    found: queue.SimpleQueue[tuple[str, Connection] | OSError] = queue.SimpleQueue()
    # strangers that are silent hold up nobody: each has a thread, and the next ones wait in the system's queue
    free = threading.BoundedSemaphore(_MOST_STRANGERS)

    def prove(accepted: socket.socket) -> None:
        with free, contextlib.suppress(OSError, EOFError, ValueError, AuthenticationError):
            connection = _proven(accepted, key, is_client=False)
            found.put((_purpose(connection), connection))

    def take() -> None:
        while True:
            try:
                accepted, _ = listener.accept()
                with free:
                    pass
                threading.Thread(target=prove, args=(accepted,), name="client", daemon=True).start()
            except (OSError, RuntimeError) as error:  # closed, or no thread can be started
                found.put(error if isinstance(error, OSError) else OSError(str(error)))
                return

    threading.Thread(target=take, name="clients", daemon=True).start()
    connections: dict[str, Connection] = {}
    try:
        while len(connections) < len(expected):
            item = found.get()
            if isinstance(item, OSError):
                raise item
            purpose, connection = item
            if purpose in expected and purpose not in connections:
                connections[purpose] = connection
            else:
                connection.close()
    except BaseException:
        for connection in connections.values():
            connection.close()
        raise
    finally:
        close_listener(listener)
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


def cut(connection: Connection) -> None:
    """Ends a connection, and with it the calls of other threads that wait for it; its file stays open.

    Args:
        connection: The connection.
    """
    # a close alone does not wake them where the other side is silent
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.shutdown(socket.SHUT_RDWR)


def connect(host: str, port: int, key: bytes, purpose: str) -> Connection:
    """Connects to a listener that knows the key.

    Args:
        host: Its address.
        port: Its port.
        key: The key.
        purpose: What the connection is for.

    Raises:
        OSError: It cannot be reached, or does not know the key.
    """
    try:
        connected = socket.create_connection((host, port), CONNECT_S)
        connection = _proven(connected, key, is_client=True)
        connection.send_bytes(purpose.encode())
    except (EOFError, ValueError, AuthenticationError) as error:
        raise ConnectionRefusedError(f"{host}:{port} does not know the key") from error
    return connection


def _purpose(connection: Connection) -> str:
    return connection.recv_bytes(64).decode("utf-8", "replace")


def _proven(connected: socket.socket, key: bytes, is_client: bool) -> Connection:
    """The connection of a socket after both sides have proven the key."""
    # a timeout of the system, as `Connection` reads the descriptor without Python's
    seconds = int(CONNECT_S)
    limit = seconds.to_bytes(8, "little") + bytes(8)
    connected.settimeout(None)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE_MS)
    if hasattr(socket, "TCP_KEEPIDLE"):
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    connection = Connection(connected.detach())
    try:
        for step in (answer_challenge, deliver_challenge)[:: 1 if is_client else -1]:
            step(connection, key)
        with socket.socket(fileno=connection.fileno()) as same:
            same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, bytes(16))
            same.detach()
    except BaseException:
        connection.close()
        raise
    return connection
