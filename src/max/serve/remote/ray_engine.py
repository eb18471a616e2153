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
"""Seconds without a sign of the owner after which an engine that outlives it ends, if none has connected."""
LATER_IMPORTS = ("llvmlite.binding", "tokenizers")
"""What each engine imports when it loads a model, besides its own modules."""
_LOOK_S = 0.05
_TELL_S = 15.0
"""Seconds after which it is logged that a start waits."""
_ASK_S = 5.0
"""Seconds that an actor takes at the most to say whether its engine has ended."""


def ray_module() -> Any:
    """The module of Ray, which takes long to import."""
    import ray  # pyright: ignore[reportMissingImports]

    return ray


class EngineAddress(NamedTuple):
    """Where an engine is.

    Args:
        host: Its address.
        port: Its port.
        node: The cluster's identifier of its machine.
        cache: Where engines on other machines get entries of its cache.
    """

    host: str
    port: int
    node: str
    cache: DoorAddress


class EngineActor:
    """What runs on the machine of a replica.

    Args:
        key: The key that the server must know.
        cpus: The cores that the engine may use.
        outlives_owner: Whether it waits for the next owner if the first one is lost, and ends itself when none comes.
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
        """Lets this thread, and those that it starts, run on the engine's cores, and as Ray itself does."""
        if self._cores.cores:
            os.sched_setaffinity(0, self._cores.cores)
        # Ray starts actors with a niceness of 15; less needs a right, or `RAY_worker_niceness=0 ray start`
        with contextlib.suppress(OSError):
            of_ray = os.getpriority(os.PRIO_PROCESS, os.getppid())
            os.setpriority(os.PRIO_PROCESS, 0, of_ray)

    def _end_alone(self) -> None:
        """Ends the process if no owner connects, and after the engine has ended: nobody else may do it.

        One that is kept ready has no owner, but is asked all the time.
        """
        while (left := self._asked_at + OWNER_S - time.monotonic()) > 0:
            if self._host.has_owner.wait(left):
                self._ended.wait()
                break
        end_soon()

    def address(self) -> EngineAddress:
        """Where it is."""
        self._asked_at = time.monotonic()
        ray = ray_module()
        host, cache = ray.util.get_node_ip_address(), self._host.shared_cache
        node = ray.get_runtime_context().get_node_id()
        return EngineAddress(host, self._host.port, node, DoorAddress(host, cache.port, cache.key))

    def run(self, settings: WorkerSettings, cpus: int = 0) -> None:
        """Runs the engine until the server ends it.

        Args:
            settings: The settings of its worker.
            cpus: The cores of an engine that was started without any.
        """
        if cpus:
            self._cores = ClaimedCores(cpus)
        # a thread of Ray's own
        self._take_cores()
        try:
            self._host.run(settings, self._outlives_owner)
        finally:
            self._ended.set()

    def prepare(self) -> None:
        """Does what each load of a model needs, before it is known which one is loaded."""
        for name in LATER_IMPORTS:
            importlib.import_module(name)

    def reserve(self, cpus: int, seconds: int) -> Any:
        """Reserves cores of this machine for an engine that was started without any.

        Ray frees them with this process and the job of the owner that has started it, whichever lives longer.

        Args:
            cpus: Their number.
            seconds: The longest time that is waited for them, in whole seconds.

        Returns:
            The placement group; None: they are not free.
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
        """Whether the engine has ended; waits for it.

        Args:
            timeout: The longest time in seconds.
        """
        self._asked_at = time.monotonic()
        return self._ended.wait(timeout)


class ActorEngine:
    """An actor of a cluster that is the process of an engine.

    Args:
        ray: The module.
        actor: The handle of the actor.
        key: What its owner must know; empty: another process has started it.
        name: Its name in the cluster, by which the next owner finds it; empty: it ends with this process.
    """

    def __init__(self, ray: Any, actor: Any, key: bytes = b"", name: str = "") -> None:
        self._ray: Any = ray
        self._actor: Any = actor
        self._asked: Any = None  # its address, and then whether it has ended
        self.key = key
        """What its owner must know."""
        self.name = name
        """Its name in the cluster."""
        self._cores: Any = None  # the placement group of an engine that was started without cores
        self.found: EngineAddress | None = None
        """Its address; None: not known yet."""
        self.config: Mapping[str, Any] = {}
        """The configuration of its model, as far as it is known."""
        # guards both: a handle that is used or freed after Ray has ended would end this process
        self._lock = threading.Lock()

    def address(self, timeout: float) -> EngineAddress:
        """Its address.

        Args:
            timeout: The longest time in seconds until it says so.

        Raises:
            TimeoutError: It does not say so in time, as no machine has room for it.
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
            cpus: The cores of an engine that was started without any.

        Raises:
            OSError: It was ended meanwhile.
        """
        self.config = settings.config
        with self._lock:
            self._live_actor().run.remote(settings, cpus)

    def prepare(self) -> None:
        """Lets it do what each load needs, beside whatever comes next.

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
        """Reserves cores of its machine for an engine that was started without any; returns whether they are free.

        Args:
            cpus: Their number.
            seconds: The longest time that is waited for them, in whole seconds.

        Raises:
            TimeoutError: It does not answer.
        """
        asked, end = None, time.monotonic() + seconds + _ASK_S
        while time.monotonic() < end:
            with self._lock:
                if self._actor is None:
                    return False
                if asked is None:
                    asked = self._actor.reserve.remote(cpus, seconds)
                # it waits for cores, and frees those that come too late
                if self._ray.wait([asked], timeout=_LOOK_S)[0]:
                    self._cores = self._ray.get(asked)
                    return self._cores is not None
        raise TimeoutError("it does not say whether its machine has cores free")

    def _free(self) -> None:
        if self._cores is not None:
            self._ray.util.remove_placement_group(self._cores)
            self._cores = None

    def wait(self, timeout: float | None) -> None:
        """Waits for its end.

        Args:
            timeout: The longest time in seconds; None: no limit.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while end is None or time.monotonic() < end:
            if self.has_ended():
                return
            time.sleep(_LOOK_S)

    def has_ended(self) -> bool:
        """Whether it has ended, as far as that is known; does not wait for an answer."""
        with self._lock:
            return self._actor is None or self._says_ended()

    def _says_ended(self) -> bool:
        """Whether the engine has ended; does not wait for an answer. The lock is held."""
        if self._asked is None:
            self._asked = self._actor.has_ended.remote(_ASK_S)
        if not self._ray.wait([self._asked], timeout=0)[0]:
            return False
        asked, self._asked = self._asked, None
        try:
            return self._ray.get(asked)
        except Exception:  # the process is no more
            return True

    def end(self) -> None:
        """Ends its process."""
        with self._lock, contextlib.suppress(Exception):  # it has ended already
            if self._actor is not None:
                self._ray.kill(self._actor, no_restart=True)
                self._free()
        self.forget()

    def forget(self) -> None:
        """Frees the handles; Ray ends its actors when it ends itself."""
        with self._lock:
            self._actor = self._asked = self._cores = None
