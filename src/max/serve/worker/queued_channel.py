"""A channel whose sends never wait for the other end."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from typing import Any

from max.pipelines.generation.channel import Channel


class QueuedChannel:
    """Sends through a thread: a worker that does not read, as it is stopped, does not stop the event loop.

    Args:
        channel: The channel that may wait.
    """

    def __init__(self, channel: Channel[Any, Any]) -> None:
        self._channel = channel
        self._frames: queue.SimpleQueue[Sequence[Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._broken: OSError | None = None

    def send(self, message: Any) -> None:
        """Queues a message; by one thread at a time.

        Args:
            message: The message.

        Raises:
            OSError: The other end was closed before.
        """
        self.send_all([message])

    def send_all(self, messages: Sequence[Any]) -> None:
        """Queues several messages as one frame; by one thread at a time.

        Args:
            messages: The messages.

        Raises:
            OSError: The other end was closed before.
        """
        if self._broken is not None:
            raise self._broken
        if self._thread is None:
            self._thread = threading.Thread(target=self._write, name="engine commands", daemon=True)
            self._thread.start()
        self._frames.put(messages)

    def _write(self) -> None:
        while (messages := self._frames.get()) is not None:
            try:
                self._channel.send_all(messages)
            except OSError as error:
                self._broken = error
                return

    def end_sends(self) -> None:
        """Ends the thread, after the other end was closed."""
        self._frames.put(None)

    def receive(self) -> Any:
        """Waits for the next message; by one thread at a time.

        Raises:
            EOFError: The other end is closed.
        """
        return self._channel.receive()

    def receive_all(self) -> Sequence[Any]:
        """Waits for the next frame, and returns its messages; by one thread at a time.

        Raises:
            EOFError: The other end is closed.
        """
        return self._channel.receive_all()

    def close(self) -> None:
        """Closes this end."""
        self.end_sends()
        self._channel.close()
