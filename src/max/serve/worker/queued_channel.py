"""A channel whose sends never wait for the other end."""

from __future__ import annotations

import errno
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from max.pipelines.generation.process.channel import ConnectionChannel


class QueuedChannel:
    """Sends through a thread, so that a worker that does not read (a stopped one) cannot block the event loop.

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
        self._frames: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._broken: OSError | None = None
        # started here: if it could not be started later, messages would wait for ever
        self._thread = threading.Thread(target=self._write, name="engine commands", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            raise OSError(errno.EAGAIN, str(error)) from error

    def send(self, message: object) -> None:
        """Queues a message; by one thread at a time.

        Args:
            message: The message.

        Raises:
            OSError: The other end was closed before.
        """
        self.send_all([message])

    def send_all(self, messages: Sequence[object]) -> None:
        """Queues several messages as one frame; by one thread at a time.

        Args:
            messages: The messages.

        Raises:
            OSError: The other end was closed before.
            Exception: The codec cannot encode one: it is the sender's error, and the channel goes on.
        """
        if self._broken is not None:
            raise self._broken
        self._frames.put(self._channel.frame(messages))

    def _write(self) -> None:
        while (frame := self._frames.get()) is not None:
            try:
                self._channel.send_frame(frame)
            except OSError as error:
                self._broken = error
                return

    def end_sends(self) -> None:
        """Ends the thread, after the other end was closed."""
        self._frames.put(None)

    def close(self) -> None:
        """Closes this end."""
        self.end_sends()
        self._channel.close()
