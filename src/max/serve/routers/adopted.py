"""Processes that an earlier owner has started: an owner takes them over at their addresses."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import struct
from collections.abc import Callable
from multiprocessing.connection import Connection, wait

from max.serve.remote.worker import RemoteWorker
from max.serve.routers.address import OWNER_PURPOSES, DoorAddress
from max.serve.routers.handover import KnownEngine
from max.serve.worker.started_worker import StartOf, Worker

logger = logging.getLogger("max.serve")

_CREDENTIALS = struct.Struct("3i")


class AdoptedProcess:
    """A process that is no child of this one; as far as it is used, like one of ``multiprocessing``.

    Args:
        pid: Its number.

    Raises:
        ProcessLookupError: There is none.
    """

    exitcode: int | None = None
    """Its parent only knows how it has ended."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        """Its number."""
        # a descriptor stays that of this process, while the number may become another one's
        self._file = os.pidfd_open(pid)

    def __del__(self) -> None:
        # the constructor may have failed
        if hasattr(self, "_file"):
            os.close(self._file)

    @classmethod
    def behind(cls, connection: Connection) -> AdoptedProcess:
        """The process that listens where a connection was made to.

        Args:
            connection: The connection, to a socket file.

        Raises:
            OSError: It has ended.
        """
        # the socket object closes a copy of the descriptor
        with socket.socket(fileno=os.dup(connection.fileno())) as same:
            # unix(7): process, user and group of the other side, of which the first is used
            found = same.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return cls(_CREDENTIALS.unpack(found)[0])

    def is_alive(self) -> bool:
        """Whether it runs."""
        # pidfd_open(2): the descriptor is readable once the process has ended
        return not wait([self._file], 0)

    def join(self, timeout: float | None = None) -> None:
        """Waits for its end.

        Args:
            timeout: The longest time in seconds; None: no limit.
        """
        wait([self._file], timeout)

    def kill(self) -> None:
        """Ends it at once."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._file, signal.SIGKILL)


Adopt = Callable[[KnownEngine, float], Worker]
"""Takes over an engine; the second argument is the time without a sign of life after which it is unhealthy."""


def adopt_here(known: KnownEngine, silence_s: float) -> Worker:
    """Takes over an engine of this machine.

    Args:
        known: What is known of the engine.
        silence_s: The time without a sign of life after which it is unhealthy.

    Raises:
        OSError: It is no more.
    """
    if known.door is None:
        raise ProcessLookupError("it had no process")
    return AdoptedWorker(known.door, silence_s)


def start_known(known: KnownEngine, start: StartOf, adopt: Adopt = adopt_here) -> Worker:
    """Takes over an engine of an earlier owner, or starts one in its place if it has ended.

    Args:
        known: What is known of the engine.
        start: Starts a worker.
        adopt: Takes it over.

    Raises:
        OSError: None can be started.
    """
    if known.door is not None:
        try:
            return adopt(known, start.settings.unhealthy_s)
        except OSError as error:
            logger.warning("engine %d is no more: %s", known.number, error)
    return start()


class AdoptedWorker(RemoteWorker):
    """An engine of an earlier owner, whose owner this process becomes.

    Args:
        door: Where it is.
        silence_s: The time without a sign of life after which it is unhealthy.

    Raises:
        OSError: It cannot be reached, or does not know the key.
    """

    def __init__(self, door: DoorAddress, silence_s: float) -> None:
        super().__init__(
            door.host,
            door.port,
            door.key,
            silence_s,
            self._kill,
            self._join,
            name=door.host.rpartition("/")[2],
            purposes=OWNER_PURPOSES,
        )
        try:
            self._process = AdoptedProcess.behind(self._commands)
        except BaseException:
            self._commands.close()
            self._beats.close()
            raise
        self.pid = self._process.pid
        """The number of its process."""

    def _join(self, timeout: float | None) -> None:
        self._process.join(timeout)

    def _kill(self) -> None:
        self._process.kill()
        self._process.join()
