"""Processes of a Ray cluster that are ready to run an engine: started, with its modules imported, without cores."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Sequence
from typing import Protocol

from max.serve.remote.ray_engine import ActorEngine

logger = logging.getLogger("max.serve")

START_S = 120.0
"""The longest time in seconds until such a process is ready."""
RESERVE_S = 2
"""Whole seconds, as Ray takes them, that a machine is asked for the cores of an engine; free ones take milliseconds."""
REST_S = 3.0
"""Seconds after a process was taken until the next one is started, which would slow down its load."""
LOOK_S = 0.5
"""Seconds between two looks at them."""


class Starter(Protocol):
    """Starts and ends their processes; ``RayCluster`` implements it."""

    @property
    def excluded_nodes(self) -> Sequence[str]:
        """The machines that are drained."""
        ...

    def start_spare(self, besides: Collection[str]) -> ActorEngine | None:
        """Starts one; None: there is no machine besides some."""
        ...

    def end(self, engine: ActorEngine) -> None:
        """Ends one."""
        ...


class Spares:
    """Keeps a number of them; a thread replaces those that are taken, lost, or on a machine that is drained.

    Args:
        starter: Starts and ends them.
        count: Their number.
    """

    def __init__(self, starter: Starter, count: int) -> None:
        self._starter, self._count = starter, count
        self._ready: list[ActorEngine] = []
        self._starting: list[ActorEngine] = []  # one at the most
        self._lock = threading.Lock()
        self._taken_at = -REST_S
        self._closing = threading.Event()
        threading.Thread(target=self._keep, name="ready processes", daemon=True).start()

    def take(self, nodes: Collection[str], cpus: int) -> ActorEngine | None:
        """One that is ready, with its cores reserved; None: no machine has one, or its cores are not free.

        Args:
            nodes: The machines that it may be on.
            cpus: Its cores.
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
        except Exception as error:  # it is lost, or the cluster is
            logger.info("a process that was ready is lost: %s", error)
        self._starter.end(found[0])
        return None

    def close(self) -> None:
        """Ends them, also one that is starting; none is started afterwards."""
        self._closing.set()
        with self._lock:  # what a look was about to start is known now
            left, self._ready = [*self._ready, *self._starting], []
        for each in left:
            self._starter.end(each)

    def _keep(self) -> None:
        while not self._closing.wait(LOOK_S):
            try:
                self._look()
            except Exception as error:
                # as where no machine is left: the next look tries again
                if not self._closing.is_set():
                    logger.info("no process is kept ready: %s", error)
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
        """Starts one; None: there are enough, one was taken just before, or no machine is left for it."""
        with self._lock:
            is_early = time.monotonic() - self._taken_at < REST_S
            if self._closing.is_set() or len(self._ready) >= self._count or is_early:
                return None
            started = self._starter.start_spare({e.found.node for e in self._ready if e.found})
            if started is not None:
                self._starting.append(started)
            return started
