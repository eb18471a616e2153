"""A channel whose sends never wait for the other end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from max.pipelines.generation.process.channel import ConnectionChannel
from max.serve.worker.send_queue import SendQueue

MOST_UNREAD_BYTES = 256 << 20
"""The bytes that may wait for the other end before it counts as one that does not read."""


class QueuedChannel:
    """A channel that sends by a `SendQueue`, so that a worker that does not read cannot block the event loop.

    Args:
        channel: The channel that may wait.

    Raises:
        OSError: No thread can be started.
    """

    def __init__(self, channel: ConnectionChannel[Any, Any]) -> None:
        self._channel = channel
        # only sends are queued
        self.receive: Callable[[], Any] = channel.receive
        """Waits for the next message; by one thread at a time."""
        self.receive_all: Callable[[], Sequence[Any]] = channel.receive_all
        """Waits for the next frame, and returns its messages; by one thread at a time."""
        self._sends = SendQueue(channel.connection, "engine commands")

    def send(self, message: object) -> None:
        """Sends a message; by one thread at a time.

        Args:
            message: The message.

        Raises:
            OSError: The other end is closed.
        """
        self.send_all([message])

    def send_all(self, messages: Sequence[object]) -> None:
        """Sends several messages as one frame; by one thread at a time.

        Args:
            messages: The messages.

        Raises:
            OSError: The other end is closed.
            Exception: The codec cannot encode one: it is the sender's error, and the channel goes on.
        """
        self._sends.send(self._channel.frame(messages))

    @property
    def is_full(self) -> bool:
        """Whether more than `MOST_UNREAD_BYTES` wait for the other end; sends still work."""
        return self._sends.left_bytes > MOST_UNREAD_BYTES

    def end_sends(self) -> None:
        """Ends the thread, after the other end was closed."""
        self._sends.end()

    def close(self) -> None:
        """Closes this end."""
        self.end_sends()
        self._channel.close()
