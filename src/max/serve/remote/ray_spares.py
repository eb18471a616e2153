"""A pool of warm processes on a Ray cluster: started, with the engine's modules imported, without reserved cores."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Sequence
from typing import Protocol

from max.serve.remote.ray_engine import ActorEngine

logger = logging.getLogger("max.serve")

START_S = 120.0
"""The timeout in seconds of a process's start."""
RESERVE_S = 2
"""The timeout of a reservation of cores, in whole seconds as Ray takes it; free cores take milliseconds."""
REST_S = 3.0
"""Seconds from the use of a process until the next one starts, which would slow down the first one's load."""
LOOK_S = 0.5
"""Seconds between two checks of the pool."""


class Starter(Protocol):
    """Starts and ends the processes of a pool; ``RayCluster`` implements it."""

    @property
    def excluded_nodes(self) -> Sequence[str]:
        """The machines that are being drained."""
        ...

    def start_spare(self, besides: Collection[str]) -> ActorEngine | None:
        """Starts a process on a machine that is not in `besides`; None if there is no such machine."""
        ...

    def end(self, engine: ActorEngine) -> None:
        """Ends a process."""
        ...


class Spares:
    """A pool of warm processes; a thread replaces those that are taken, lost, or on a drained machine.

    Args:
        starter: Starts and ends processes.
        count: The size of the pool.
    """

    def __init__(self, starter: Starter, count: int) -> None:
        self._starter, self._count = starter, count
        self._ready: list[ActorEngine] = []
        self._starting: list[ActorEngine] = []  # at most one
        self._lock = threading.Lock()
        self._taken_at = -REST_S
        self._closing = threading.Event()
        threading.Thread(target=self._keep, name="ready processes", daemon=True).start()

    def take(self, nodes: Collection[str], cpus: int) -> ActorEngine | None:
        """Takes a process and reserves its cores; None if there is none, or its machine has no free cores.

        Args:
            nodes: The machines that are allowed.
            cpus: The number of cores to reserve.
        """
        with self._lock:
            self._taken_at = time.monotonic()
            found = [each for each in self._ready if each.found and each.found.node in nodes]
            if not found:
                return None
            self._ready.remove(found[0])
        try:
            if found[0].reserve(cpus, RESERVE_S):
                return found[0]
        except Exception as error:  # the process or the cluster is lost
            logger.info("a warm process is lost: %s", error)
        self._starter.end(found[0])
        return None

    def close(self) -> None:
        """Ends all processes, including one that is starting; none is started afterwards."""
        self._closing.set()
        with self._lock:  # a concurrent check has registered the process that it started
            left, self._ready = [*self._ready, *self._starting], []
        for each in left:
            self._starter.end(each)

    def _keep(self) -> None:
        while not self._closing.wait(LOOK_S):
            try:
                self._look()
            except Exception as error:
                # for example when no machine is left: the next check tries again
                if not self._closing.is_set():
                    logger.info("the pool of warm processes has none: %s", error)
                self._closing.wait(REST_S)

    def _look(self) -> None:
        excluded = set(self._starter.excluded_nodes)
        with self._lock:
            gone = [
                each
                for each in self._ready
                if each.has_ended() or each.found is None or each.found.node in excluded
            ]
            self._ready = [each for each in self._ready if each not in gone]
        for each in gone:
            self._starter.end(each)
        started = self._start()
        if started is None:
            return
        try:
            started.address(START_S)
            started.prepare()
            with self._lock:
                if self._closing.is_set():
                    raise OSError("it was ended while it started")
                self._ready.append(started)
        except BaseException:
            self._starter.end(started)
            raise
        finally:
            with self._lock:
                self._starting.remove(started)

    def _start(self) -> ActorEngine | None:
        """Starts a process; None if the pool is full, one was taken recently, or no machine is left."""
        with self._lock:
            is_early = time.monotonic() - self._taken_at < REST_S
            if self._closing.is_set() or len(self._ready) >= self._count or is_early:
                return None
            started = self._starter.start_spare({e.found.node for e in self._ready if e.found})
            if started is not None:
                self._starting.append(started)
            return started
