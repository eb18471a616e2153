"""A channel whose sends never wait for the other end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from max.pipelines.generation.process.channel import ConnectionChannel
from max.serve.worker.send_queue import SendQueue

MOST_UNREAD_BYTES = 256 << 20
"""The bytes that may wait for the other end before it counts as one that does not read."""
_MOST_HELD_BYTES = 64 << 10
"""The bytes of frames that wait for the end of a turn of the event loop; more are sent at once."""


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
        self._held: list[bytes] = []  # frames of `send_soon`
        self._held_bytes = 0

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
        frame = self._channel.frame(messages)
        self._sends.send(*self._take_held(), frame)

    def send_soon(self, message: object, loop: asyncio.AbstractEventLoop) -> None:
        """Sends a message together with others of the same turn of an event loop: one call of the system for all.

        If the other end is closed, the message is lost: who receives finds that.

        Args:
            message: The message.
            loop: The loop that runs.

        Raises:
            Exception: The codec cannot encode it; the messages of others are sent.
        """
        frame = self._channel.frame([message])
        if not self._held:
            loop.call_soon(self._send_held)
        self._held.append(frame)
        self._held_bytes += len(frame)
        if self._held_bytes > _MOST_HELD_BYTES:
            self._send_held()

    def _send_held(self) -> None:
        # none: they were sent before the end of the turn
        if self._held:
            with suppress(OSError):
                self._sends.send(*self._take_held())

    def _take_held(self) -> list[bytes]:
        held, self._held, self._held_bytes = self._held, [], 0
        return held

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
