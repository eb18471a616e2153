"""Engines as actors of a Ray cluster: `EngineActor` runs in the actor's process, `ActorEngine` is its handle in the
server's."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from max.serve.process.process_end import end_soon
from max.serve.process.settings import WorkerSettings
from max.serve.remote.cores import ClaimedCores
from max.serve.remote.host import EngineHost
from max.serve.routers.address import DoorAddress

logger = logging.getLogger("max.serve")

OWNER_S = 120.0
"""Seconds without a call of the owner after which an engine that outlives its owner ends, if none has connected."""
LATER_IMPORTS = ("llvmlite.binding", "tokenizers")
"""The packages that each engine imports when it loads a model, besides its own modules."""
_LOOK_S = 0.05
_TELL_S = 15.0
"""Seconds after which a start that waits for resources is logged."""
_ASK_S = 5.0
"""The timeout in seconds of a call that asks an actor whether its engine has ended."""


def ray_module() -> Any:
    """Imports Ray, which takes seconds."""
    import ray  # pyright: ignore[reportMissingImports]

    return ray


class EngineAddress(NamedTuple):
    """The address of an engine.

    Args:
        host: The IP address of its machine.
        port: Its port.
        node: The cluster's identifier of its machine.
        cache: The address of its cache for engines on other machines.
    """

    host: str
    port: int
    node: str
    cache: DoorAddress


class EngineActor:
    """The process of an engine on a machine of the cluster.

    Args:
        key: The key that the server must present.
        cpus: The number of cores that the engine may use.
        outlives_owner: Whether it waits for a new owner if the first one is lost, and ends itself when none connects.
    """

    def __init__(self, key: bytes, cpus: int, outlives_owner: bool = False) -> None:
        self._cores = ClaimedCores(cpus)
        self._take_cores()
        self._host = EngineHost(key)
        self._outlives_owner = outlives_owner
        self._ended = threading.Event()
        self._asked_at = time.monotonic()
        if outlives_owner:
            threading.Thread(target=self._end_alone, name="owner", daemon=True).start()

    def _take_cores(self) -> None:
        """Pins this thread and the threads that it starts to the engine's cores, with the niceness of Ray itself."""
        if self._cores.cores:
            os.sched_setaffinity(0, self._cores.cores)
        # Ray starts actors with a niceness of 15; lowering it needs privileges, or `RAY_worker_niceness=0 ray start`
        with contextlib.suppress(OSError):
            of_ray = os.getpriority(os.PRIO_PROCESS, os.getppid())
            os.setpriority(os.PRIO_PROCESS, 0, of_ray)

    def _end_alone(self) -> None:
        """Ends the process if no owner connects, and after the engine has ended: without an owner nobody else does.

        An engine that is kept ready has no owner, but `has_ended` is called on it regularly.
        """
        while (left := self._asked_at + OWNER_S - time.monotonic()) > 0:
            if self._host.has_owner.wait(left):
                self._ended.wait()
                break
        end_soon()

    def address(self) -> EngineAddress:
        """The engine's address."""
        self._asked_at = time.monotonic()
        ray = ray_module()
        host, cache = ray.util.get_node_ip_address(), self._host.shared_cache
        node = ray.get_runtime_context().get_node_id()
        return EngineAddress(host, self._host.port, node, DoorAddress(host, cache.port, cache.key))

    def run(self, settings: WorkerSettings, cpus: int = 0) -> None:
        """Runs the engine until the server ends it.

        Args:
            settings: The settings of its worker.
            cpus: The number of cores of an engine that was started without any.
        """
        if cpus:
            self._cores = ClaimedCores(cpus)
        # the method runs on a thread of Ray
        self._take_cores()
        try:
            self._host.run(settings, self._outlives_owner)
        finally:
            self._ended.set()

    def prepare(self) -> None:
        """Imports what every model needs, before it is known which model will be loaded."""
        for name in LATER_IMPORTS:
            importlib.import_module(name)

    def reserve(self, cpus: int, seconds: int) -> Any:
        """Reserves cores of this machine for an engine that was started without any.

        Ray frees them when both this process and the job of the owner that started it have ended.

        Args:
            cpus: The number of cores.
            seconds: The timeout, in whole seconds.

        Returns:
            The placement group; None if the cores are not free.
        """
        ray = ray_module()
        node = ray.get_runtime_context().get_node_id()
        group = ray.util.placement_group(
            [{"CPU": cpus}], bundle_label_selector=[{"ray.io/node-id": node}]
        )
        if group.wait(seconds):
            return group
        ray.util.remove_placement_group(group)
        return None

    def has_ended(self, timeout: float) -> bool:
        """Waits for the end of the engine; returns whether it has ended.

        Args:
            timeout: The timeout in seconds.
        """
        self._asked_at = time.monotonic()
        return self._ended.wait(timeout)


class ActorEngine:
    """The server's handle of an engine that runs as an actor of a cluster.

    Args:
        ray: The module.
        actor: The handle of the actor.
        key: The key that its owner must present; empty: another process has started it.
        name: Its name in the cluster, by which a new owner finds it; empty: it ends with this process.
    """

    def __init__(self, ray: Any, actor: Any, key: bytes = b"", name: str = "") -> None:
        self._ray: Any = ray
        self._actor: Any = actor
        self._asked: Any = (
            None  # the pending call: for the address first, then whether it has ended
        )
        self.key = key
        """The key that its owner must present."""
        self.name = name
        """Its name in the cluster."""
        self._cores: Any = None  # the placement group of an engine that was started without cores
        self.found: EngineAddress | None = None
        """Its address; None until it is known."""
        self.config: Mapping[str, Any] = {}
        """The configuration of its model, if known."""
        # guards the handles: to use or free one after Ray has shut down would abort this process
        self._lock = threading.Lock()

    def address(self, timeout: float) -> EngineAddress:
        """Waits until the engine's process has started; returns its address.

        Args:
            timeout: The timeout in seconds.

        Raises:
            TimeoutError: It has not started in time, for example because no machine has free cores.
            OSError: It was ended meanwhile.
        """
        begin, is_told = time.monotonic(), False
        while True:
            with self._lock:
                actor = self._live_actor()
                if self._asked is None:
                    self._asked = actor.address.remote()
                if self._ray.wait([self._asked], timeout=0)[0]:
                    asked, self._asked = self._asked, None
                    self.found = found = self._ray.get(asked)
                    return found
            waited = time.monotonic() - begin
            if waited > timeout:
                raise TimeoutError
            if waited > _TELL_S and not is_told:
                is_told = True
                logger.warning(
                    "an engine has not started for %.0f s; no machine of the cluster may have cores free",
                    waited,
                )
            time.sleep(_LOOK_S)

    def run(self, settings: WorkerSettings, cpus: int = 0) -> None:
        """Runs the engine.

        Args:
            settings: The settings of its worker.
            cpus: The number of cores of an engine that was started without any.

        Raises:
            OSError: It was ended meanwhile.
        """
        self.config = settings.config
        with self._lock:
            self._live_actor().run.remote(settings, cpus)

    def prepare(self) -> None:
        """Starts the imports that every model needs, without waiting for them.

        Raises:
            OSError: It was ended meanwhile.
        """
        with self._lock:
            self._live_actor().prepare.remote()

    def _live_actor(self) -> Any:
        """The handle of its process; the lock is held."""
        if self._actor is None:
            raise OSError("the engine was ended while it started")
        return self._actor

    def reserve(self, cpus: int, seconds: int) -> bool:
        """Reserves cores of its machine for an engine that was started without any; returns whether that succeeded.

        Args:
            cpus: The number of cores.
            seconds: The timeout, in whole seconds.

        Raises:
            TimeoutError: The actor does not respond.
        """
        asked, end = None, time.monotonic() + seconds + _ASK_S
        while time.monotonic() < end:
            with self._lock:
                if self._actor is None:
                    return False
                if asked is None:
                    asked = self._actor.reserve.remote(cpus, seconds)
                # the actor waits for cores, and frees those that it gets too late
                if self._ray.wait([asked], timeout=_LOOK_S)[0]:
                    self._cores = self._ray.get(asked)
                    return self._cores is not None
        raise TimeoutError("the actor does not respond whether its machine has free cores")

    def _free(self) -> None:
        if self._cores is not None:
            self._ray.util.remove_placement_group(self._cores)
            self._cores = None

    def wait(self, timeout: float | None) -> None:
        """Waits for the end of the engine.

        Args:
            timeout: The timeout in seconds; None: no limit.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while end is None or time.monotonic() < end:
            if self.has_ended():
                return
            time.sleep(_LOOK_S)

    def has_ended(self) -> bool:
        """Whether the engine is known to have ended; does not block."""
        with self._lock:
            return self._actor is None or self._says_ended()

    def _says_ended(self) -> bool:
        """Whether the engine is known to have ended; does not block. The caller holds the lock."""
        if self._asked is None:
            self._asked = self._actor.has_ended.remote(_ASK_S)
        if not self._ray.wait([self._asked], timeout=0)[0]:
            return False
        asked, self._asked = self._asked, None
        try:
            return self._ray.get(asked)
        except Exception:  # the process has died
            return True

    def end(self) -> None:
        """Kills the engine's process."""
        with self._lock, contextlib.suppress(Exception):  # it has ended already
            if self._actor is not None:
                self._ray.kill(self._actor, no_restart=True)
                self._free()
        self.forget()

    def forget(self) -> None:
        """Frees the handles; Ray kills its actors when it shuts down."""
        with self._lock:
            self._actor = self._asked = self._cores = None
