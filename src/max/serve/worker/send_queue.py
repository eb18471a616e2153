"""Sends that never wait for the other end of a connection."""

from __future__ import annotations

import errno
import os
import socket
import sys
import threading
from collections import deque
from multiprocessing.connection import Connection

from max.pipelines.generation.process.channel import wire


class SendQueue:
    """Sends frames in order: what the other end takes at once, and the rest by a thread.

    So an end that does not read (a stopped process) holds up nobody, and nearly all frames wake no thread.

    Args:
        connection: The end of a pipe or socket, by which nothing else sends.
        name: The name of the thread.

    Raises:
        OSError: No thread can be started.
    """

    def __init__(self, connection: Connection, name: str) -> None:
        self._connection = connection
        # a descriptor of its own: the connection's may be closed by another thread
        self._socket = _socket_of(connection)
        self._left: deque[bytes] = deque()
        self._left_bytes = 0
        self._has_ended = False
        self._broken: OSError | None = None
        self._changed = threading.Condition()  # guards the four before
        # started here: if it could not be started later, frames would wait for ever
        self._thread = threading.Thread(target=self._write, name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            if self._socket is not None:
                self._socket.close()
            raise OSError(errno.EAGAIN, str(error)) from error

    def send(self, *frames: bytes) -> int:
        """Sends frames; thread-safe, and nothing happens after :meth:`end`.

        Args:
            frames: The frames.

        Returns:
            The bytes that the other end has not taken yet.

        Raises:
            OSError: The other end is closed.
        """
        with self._changed:
            if self._broken is not None:
                raise self._broken
            if self._has_ended:
                return 0
            if self._socket is not None:
                data = b"".join(map(wire, frames))
                if not self._left:
                    # only while none waits: frames keep their order
                    data = self._rest(self._socket, data)
                frames = (data,) if data else ()
            if frames:
                self._left.extend(frames)
                self._left_bytes += sum(map(len, frames))
                self._changed.notify_all()
            return self._left_bytes

    def _rest(self, connected: socket.socket, data: bytes) -> bytes:
        """Sends what the other end takes at once, and returns the rest; the lock is held."""
        try:
            return data[connected.send(data, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            return data
        except OSError as error:
            self._broken = error
            self._changed.notify_all()
            raise

    def _write(self) -> None:
        while (frame := self._next()) is not None:
            try:
                if self._socket is None:
                    self._connection.send_bytes(frame)
                else:
                    self._socket.sendall(frame)
            except OSError as error:
                with self._changed:
                    self._broken = error
                break
            with self._changed:
                # only now: no later frame may be sent before the end of this one
                self._left_bytes -= len(self._left.popleft())
                self._changed.notify_all()
        with self._changed:
            self._left.clear()
            self._changed.notify_all()
            if self._socket is not None:
                self._socket.close()

    def _next(self) -> bytes | None:
        """Waits for a frame; None: there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._left or self._has_ended or self._broken)
            return self._left[0] if self._left else None

    @property
    def left_bytes(self) -> int:
        """The bytes that the other end has not taken yet."""
        return self._left_bytes

    def flush(self, timeout: float) -> None:
        """Waits until all was sent, or the other end is closed.

        Args:
            timeout: The longest time in seconds.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._left, timeout)

    def end(self) -> None:
        """Ends the thread after what was sent, or at once if the other end is closed."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()


def _socket_of(connection: Connection) -> socket.socket | None:
    """The socket of a connection, which its sends can be tried on; None: it has none, as on Windows."""
    if not isinstance(connection, Connection) or sys.platform == "win32":  # pyright: ignore[reportUnnecessaryIsInstance]
        return None
    descriptor = os.dup(connection.fileno())
    try:
        return socket.socket(fileno=descriptor)
    except OSError:  # a pipe of one direction
        os.close(descriptor)
        return None
