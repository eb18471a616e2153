"""A channel whose sends never wait for the other end."""

from __future__ import annotations

import errno
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from max.pipelines.generation.process.channel import ConnectionChannel, wire


class QueuedChannel:
    """Sends what the other end takes at once, and leaves the rest to a thread.

    So a worker that does not read (a stopped one) cannot block the event loop, and nearly all messages wake no thread.

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
        self._left: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        # guards what follows: the pieces that the thread has not sent, whether there is an end
        self._waiting, self._has_ended = 0, False
        self._broken: OSError | None = None
        # a descriptor of its own: the connection's may be closed by another thread
        self._socket = _socket_of(channel)
        # started here: if it could not be started later, messages would wait for ever
        self._thread = threading.Thread(target=self._write, name="engine commands", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            if self._socket is not None:
                self._socket.close()
            raise OSError(errno.EAGAIN, str(error)) from error

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
        if self._broken is not None:
            raise self._broken
        left = self._channel.frame(messages)
        with self._lock:
            if self._has_ended:
                return
            if self._socket is not None:
                left = wire(left)
                if not self._waiting:
                    left = self._send_now(self._socket, left)
                if not left:
                    return
            self._waiting += 1
            self._left.put(left)

    def _send_now(self, connected: socket.socket, data: bytes) -> bytes:
        """Sends what the other end takes at once, and returns the rest."""
        try:
            return data[connected.send(data, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            return data
        except OSError as error:
            self._broken = error
            self._left.put(None)
            raise

    def _write(self) -> None:
        while (data := self._left.get()) is not None:
            try:
                if self._socket is None:
                    self._channel.send_frame(data)
                else:
                    self._socket.sendall(data)
            except OSError as error:
                self._broken = error
                break
            with self._lock:
                self._waiting -= 1
        if self._socket is not None:
            with self._lock:
                self._has_ended = True
                self._socket.close()

    def end_sends(self) -> None:
        """Ends the thread, after the other end was closed."""
        self._left.put(None)

    def close(self) -> None:
        """Closes this end."""
        self.end_sends()
        self._channel.close()


def _socket_of(channel: Any) -> socket.socket | None:
    """The socket of a channel, which its sends can be tried on; None: it has none, as on Windows."""
    connection = getattr(channel, "connection", None)
    if not isinstance(connection, Connection) or sys.platform == "win32":
        return None
    try:
        return socket.socket(fileno=os.dup(connection.fileno()))
    except OSError:  # a pipe of one direction
        return None
