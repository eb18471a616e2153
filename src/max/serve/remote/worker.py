"""The side of the server: an engine at an address, as a worker."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from max.pipelines.generation.process.channel import ConnectionChannel, MessageCodec
from max.serve.remote.connections import connect, shut_down
from max.serve.routers.address import PURPOSES, SIGN, DoorAddress
from max.serve.worker.life_signs import BEATS_PER_LIMIT
from max.serve.worker.queued_channel import QueuedChannel


class ReceivedSigns:
    """The signs of life that an engine sends, on this machine's clock.

    Args:
        connection: Receives them.
        silence_s: The time without a sign after which the engine is unhealthy.
    """

    def __init__(self, connection: Connection, silence_s: float) -> None:
        self.interval_s = silence_s / BEATS_PER_LIMIT
        """The seconds between two beats."""
        self.last_beat = time.monotonic()
        """The time of the last beat."""
        self.step_begin: float | None = None
        """When the running step began; None: none runs."""
        self.loading = ""
        """The step of the load; empty: nothing is known."""
        self._connection = connection
        threading.Thread(target=self._receive, name="engine heartbeat", daemon=True).start()

    def _receive(self) -> None:
        while True:
            try:
                sign = self._connection.recv_bytes(SIGN.size)
            except (OSError, EOFError, TypeError):  # closed here or there
                return
            if len(sign) != SIGN.size:
                return
            taken, loading = SIGN.unpack(sign)
            now = time.monotonic()
            # the engine sends a duration, as the clocks of two machines differ
            self.last_beat, self.step_begin = now, None if taken < 0 else now - taken
            self.loading = loading.rstrip(b"\0").decode("utf-8", "replace")


class RemoteWorker:
    """An engine at an address; connects to it.

    Args:
        host: The address.
        port: The port.
        key: The key that both know.
        silence_s: The time without a sign of life after which it is unhealthy.
        end: Ends its process at once, and waits for it.
        wait: Waits for the end of its process; the argument is a timeout in seconds, None: no limit.
        name: What messages call it.
        node: The cluster's identifier of its machine; empty: it is on none.
        purposes: What its two connections are for.
        actor: What the cluster calls its process, so that another owner finds it; empty: it ends with this one.

    Raises:
        OSError: It cannot be reached, or does not know the key.
    """

    pid: int | None = None
    """The number of its process, which is none of this machine."""

    def __init__(
        self,
        host: str,
        port: int,
        key: bytes,
        silence_s: float,
        end: Callable[[], None],
        wait: Callable[[float | None], None],
        name: str = "",
        node: str = "",
        purposes: tuple[str, str] = PURPOSES,
        actor: str = "",
    ) -> None:
        self.name, self.node = name or f"{host}:{port}", node
        self.actor = actor
        """What the cluster calls its process; empty: another owner cannot take it over."""
        self.door = DoorAddress(host, port, key)
        """Where further processes of the server connect."""
        self._end, self._wait = end, wait
        first, second = purposes
        self._commands = commands = connect(host, port, key, first)
        try:
            self._beats = connect(host, port, key, second)
        except BaseException:
            commands.close()
            raise
        self.signs = ReceivedSigns(self._beats, silence_s)
        """Its signs of life."""
        channel: ConnectionChannel[Any, Any] = ConnectionChannel(commands, MessageCodec())
        self.channel = QueuedChannel(channel)

    @property
    def exit_reason(self) -> str:
        """How it has ended, in words."""
        return f"the engine {self.name} was lost"

    def join(self, timeout: float | None = None) -> None:
        """Waits for the end of the engine.

        Args:
            timeout: The longest time in seconds; None: no limit.
        """
        self._wait(timeout)

    def kill(self) -> None:
        """Ends the engine at once, and the connection to it."""
        try:
            self._end()
        finally:
            # wakes the threads that read from them
            for connection in (self._commands, self._beats):
                if not connection.closed:
                    shut_down(connection)
            self.channel.close()
            self._beats.close()
