"""The side of the engine: it listens on a port, and runs for the server that connects first, and others after it."""

from __future__ import annotations

import threading
from dataclasses import replace

from max._host.disk_cache import default_cache
from max.serve.process.settings import WorkerSettings
from max.serve.remote.connections import Acceptor, accept, close_listener, listen
from max.serve.remote.peer_caches import PeerCaches
from max.serve.remote.shared_cache import SharedCache
from max.serve.routers.address import PURPOSES
from max.serve.routers.door import Door, send_signs
from max.serve.worker.engine import run_engine
from max.serve.worker.life_signs import LifeSigns


class EngineHost:
    """An engine for the server that connects first, which owns it, and for further processes of that server.

    Args:
        key: The key that the server must know.
        host: The address to listen on.
    """

    def __init__(self, key: bytes, host: str = "0.0.0.0") -> None:
        self._listener = listen(host)
        self._acceptor = Acceptor(self._listener, key)
        self.port: int = self._listener.getsockname()[1]
        """The port."""
        self.shared_cache = SharedCache(host)
        """Its cache, for engines on other machines."""
        self.has_owner = threading.Event()
        """Set when the owner has connected."""

    def run(self, settings: WorkerSettings, outlives_owner: bool = False) -> None:
        """Runs the engine until its owner ends it or is gone; the first two connections are the owner's.

        Args:
            settings: The settings of the worker.
            outlives_owner: Whether it waits for the next owner if the first one is lost.

        Raises:
            OSError: The listener was closed.
        """
        caches = PeerCaches(settings.caches)
        default_cache().remote = caches if settings.caches else None
        try:
            commands, beats = accept(self._acceptor, PURPOSES)
            self.has_owner.set()
            door = None
            if settings.doors:
                door = Door(self._acceptor, self.close, outlives_owner)
            else:
                # a single server: nobody else may connect
                self.close()
            signs = LifeSigns(settings.unhealthy_s)
            send_signs(beats, signs)
            # the cores were claimed on this machine; those of the settings are the server's
            run_engine(replace(settings, cores=()), commands, signs, door)
        finally:
            self.close()
            self.shared_cache.close()
            caches.close()

    def close(self) -> None:
        """Stops listening, so that a :meth:`run` that waits for the server ends."""
        close_listener(self._listener)
