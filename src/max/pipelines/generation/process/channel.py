"""Message channels between an engine and its users."""

from __future__ import annotations

import pickle
import threading
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, Generic, Protocol, TypeVar

In = TypeVar("In", covariant=True)
Out = TypeVar("Out", contravariant=True)
Received = TypeVar("Received")
Sent = TypeVar("Sent")


class Channel(Protocol[In, Out]):
    """One end of a channel that carries messages in both directions, in order per direction."""

    def send(self, message: Out) -> None:
        """Sends a message; thread-safe.

        Args:
            message: The message.

        Raises:
            OSError: The other end is closed.
        """
        ...

    def send_all(self, messages: Sequence[Out]) -> None:
        """Sends several messages as one frame; thread-safe.

        Args:
            messages: The messages; nothing is sent if there are none.

        Raises:
            OSError: The other end is closed.
        """
        ...

    def receive(self) -> In:
        """Waits for the next message; to be called by one thread at a time.

        Raises:
            EOFError: The other end is closed.
        """
        ...

    def receive_all(self) -> Sequence[In]:
        """Waits for the next frame and returns its messages; to be called by one thread at a time.

        Raises:
            EOFError: The other end is closed.
        """
        ...

    def close(self) -> None:
        """Closes this end."""
        ...


class Codec(Protocol):
    """Converts messages to bytes and back; both ends of a channel use the same codec."""

    def encode(self, messages: Sequence[Any]) -> bytes:
        """Encodes messages as one frame."""
        ...

    def decode(self, frame: bytes) -> list[Any]:
        """Decodes the messages of a frame."""
        ...


class PickleCodec:
    """Pickles lists of messages of any type; requires no further package."""

    def encode(self, messages: Sequence[Any]) -> bytes:
        """Encodes messages as one frame."""
        return pickle.dumps(list(messages), pickle.HIGHEST_PROTOCOL)

    def decode(self, frame: bytes) -> list[Any]:
        """Decodes the messages of a frame.

        Args:
            frame: The frame, from the other end of the channel.
        """
        return pickle.loads(frame)


class ConnectionChannel(Generic[Received, Sent]):
    """A channel over a connection of ``multiprocessing``.

    Args:
        connection: One end of a pipe or socket.
        codec: Encodes the messages; None: they are pickled.
    """

    def __init__(self, connection: Connection, codec: Codec | None = None) -> None:
        self._connection = connection
        self._codec: Codec = codec or PickleCodec()
        self._sending = threading.Lock()
        self._unread: deque[Received] = deque()  # the rest of a frame that receive() began

    def send(self, message: Sent) -> None:
        """Sends a message; thread-safe.

        Args:
            message: The message.

        Raises:
            OSError: The other end is closed.
        """
        self.send_all([message])

    def send_all(self, messages: Sequence[Sent]) -> None:
        """Sends several messages as one frame; thread-safe.

        Args:
            messages: The messages; nothing is sent if there are none.

        Raises:
            OSError: The other end is closed.
        """
        if messages:
            self.send_frame(self.frame(messages))

    def frame(self, messages: Sequence[Sent]) -> bytes:
        """Encodes messages for :meth:`send_frame`.

        Args:
            messages: The messages.

        Raises:
            Exception: The codec cannot encode a message.
        """
        return self._codec.encode(messages)

    def send_frame(self, frame: bytes) -> None:
        """Sends encoded messages; thread-safe.

        Args:
            frame: The bytes, from :meth:`frame`.

        Raises:
            OSError: The other end is closed.
        """
        with self._sending:
            self._connection.send_bytes(frame)

    def receive(self) -> Received:
        """Waits for the next message; to be called by one thread at a time.

        Raises:
            EOFError: The other end is closed.
        """
        if not self._unread:
            self._unread.extend(self._next_frame())
        return self._unread.popleft()

    def receive_all(self) -> list[Received]:
        """Waits for the next frame and returns its messages; to be called by one thread at a time.

        Raises:
            EOFError: The other end is closed.
        """
        if not self._unread:
            return self._next_frame()
        messages = list(self._unread)
        self._unread.clear()
        return messages

    def _next_frame(self) -> list[Received]:
        """The messages of the next frame; a closed connection raises EOFError."""
        try:
            frame = self._connection.recv_bytes()
        except OSError as error:  # the connection was reset, or the other process was killed
            raise EOFError(str(error)) from error
        except TypeError as error:
            # a TypeError is expected only if another thread closed the connection, which then has no handle
            if not self._connection.closed:
                raise
            raise EOFError("the channel was closed") from error
        return self._codec.decode(frame)

    def close(self) -> None:
        """Closes this end."""
        self._connection.close()
