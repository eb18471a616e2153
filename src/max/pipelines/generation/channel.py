"""Message channels between an engine and its users."""

from __future__ import annotations

import threading
from multiprocessing.connection import Connection
from typing import Generic, Protocol, TypeVar

In = TypeVar("In", covariant=True)
Out = TypeVar("Out", contravariant=True)
Received = TypeVar("Received")
Sent = TypeVar("Sent")


class Channel(Protocol[In, Out]):
    """One end of a channel: messages in both directions, each direction in order."""

    def send(self, message: Out) -> None:
        """Sends a message; from any thread.

        Args:
            message: The message.

        Raises:
            OSError: The other end is closed.
        """
        ...

    def receive(self) -> In:
        """Waits for the next message; by one thread at a time.

        Raises:
            EOFError: The other end is closed.
        """
        ...

    def close(self) -> None:
        """Closes this end."""
        ...


class ConnectionChannel(Generic[Received, Sent]):
    """A channel over a connection of ``multiprocessing``; messages are pickled.

    Args:
        connection: One end of a pipe, or of a socket.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()

    def send(self, message: Sent) -> None:
        """Sends a message; from any thread.

        Args:
            message: The message.

        Raises:
            OSError: The other end is closed.
        """
        with self._sending:
            self._connection.send(message)

    def receive(self) -> Received:
        """Waits for the next message; by one thread at a time.

        Raises:
            EOFError: The other end is closed.
        """
        try:
            return self._connection.recv()
        except OSError as error:  # a reset connection, or a process that was killed
            raise EOFError(str(error)) from error
        except TypeError as error:
            # a connection that another thread closes meanwhile has no handle to read from
            if not self._connection.closed:
                raise
            raise EOFError("the channel was closed") from error

    def close(self) -> None:
        """Closes this end."""
        self._connection.close()
