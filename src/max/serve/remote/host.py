"""The side of the engine: it listens on a port, and runs for the one server that connects."""

from __future__ import annotations

import struct
import threading
import time
from dataclasses import replace
from multiprocessing.connection import Connection

from max.serve.process.settings import WorkerSettings
from max.serve.remote.connections import accept, close_listener, listen
from max.serve.worker.engine import run_engine
from max.serve.worker.life_signs import LifeSigns

PURPOSES = ("commands", "beats")
"""The connections of a server: its requests, and the signs of life."""
SIGN = struct.Struct("<d96s")
"""A sign of life: the seconds that the running step has taken, -1 for none, and the step of the load."""


class EngineHost:
    """An engine for one server.

    Args:
        key: The key that the server must know.
        host: The address to listen on.
    """

    def __init__(self, key: bytes, host: str = "0.0.0.0") -> None:
        self._key = key
        self._listener = listen(host)
        self.port: int = self._listener.getsockname()[1]
        """The port."""

    def run(self, settings: WorkerSettings) -> None:
        """Runs the engine until the server ends it or is gone; the first two connections are the server's.

        Args:
            settings: The settings of the worker.

        Raises:
            OSError: The listener was closed.
        """
        commands, beats = accept(self._listener, self._key, PURPOSES)
        signs = LifeSigns(settings.unhealthy_s)
        threading.Thread(
            target=_send_signs, args=(beats, signs), name="engine heartbeat", daemon=True
        ).start()
        run_engine(replace(settings, cores=()), commands, signs)

    def close(self) -> None:
        """Stops listening, so that a :meth:`run` that waits for the server ends."""
        close_listener(self._listener)


def _send_signs(connection: Connection, signs: LifeSigns) -> None:
    """Sends the signs at their intervals; that they arrive is the beat."""
    while True:
        begin = signs.step_begin
        taken = -1.0 if begin is None else max(time.monotonic() - begin, 0.0)
        try:
            connection.send_bytes(SIGN.pack(taken, signs.loading.encode("utf-8", "replace")))
        except OSError:
            return  # the server is gone, which the engine's own connection tells too
        time.sleep(signs.interval_s)
