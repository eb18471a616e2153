"""Engines as actors of a Ray cluster, which finds machines for them.

With one server process they are actors of its job, which end with it. Where another process would own the engines next,
they are detached actors with a name: the next owner finds them by it, and each ends itself when there is no server any
more (`max.serve.routers.shared_channel`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

from max.pipelines.core.exceptions import ConfigError
from max.serve.process.process_end import end_soon
from max.serve.process.settings import RaySettings, WorkerSettings
from max.serve.remote.cluster import Node
from max.serve.remote.connections import KEY_BYTES
from max.serve.remote.cores import ClaimedCores
from max.serve.remote.host import EngineHost
from max.serve.remote.ray_keeper import kept_cluster, start_options
from max.serve.remote.worker import RemoteWorker
from max.serve.routers.address import OWNER_PURPOSES, PURPOSES, DoorAddress
from max.serve.routers.handover import KnownEngine
from max.serve.worker.engine_state import NoMachineError

logger = logging.getLogger("max.serve")

START_S = 120.0
"""The longest time in seconds until the cluster has found a machine and its process listens."""
ADOPT_S = 20.0
"""The longest time in seconds until an actor of an earlier owner says where it is."""
NAMESPACE = "supremum"
"""Where the names of actors are looked up."""
_LOOK_S = 0.05
_TELL_S = 15.0
"""Seconds after which it is logged that a start waits."""
_ASK_S = 5.0
"""Seconds that an actor takes at the most to say whether its engine has ended."""


def _ray() -> Any:
    import ray  # pyright: ignore[reportMissingImports]

    return ray


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
        """Ends the process if no owner connects, and after the engine has ended: nobody else may do it."""
        if self._host.has_owner.wait(START_S):
            self._ended.wait()
        end_soon()

    def address(self) -> tuple[str, int, str]:
        """The address and the port of the engine, and the cluster's identifier of the machine."""
        ray = _ray()
        context = ray.get_runtime_context()
        return ray.util.get_node_ip_address(), self._host.port, context.get_node_id()

    def run(self, settings: WorkerSettings) -> None:
        """Runs the engine until the server ends it.

        Args:
            settings: The settings of its worker.
        """
        # a thread of Ray's own
        self._take_cores()
        try:
            self._host.run(settings, self._outlives_owner)
        finally:
            self._ended.set()

    def has_ended(self, timeout: float) -> bool:
        """Whether the engine has ended; waits for it.

        Args:
            timeout: The longest time in seconds.
        """
        return self._ended.wait(timeout)


class _Engine:
    """An actor of a cluster that is the process of an engine.

    Args:
        ray: The module.
        actor: The handle of the actor.
    """

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray: Any = ray
        self._actor: Any = actor
        self._asked: Any = None  # its address, and then whether it has ended
        # guards both: a handle that is used or freed after Ray has ended would end this process
        self._lock = threading.Lock()

    def address(self, timeout: float) -> tuple[str, int, str]:
        """Its address, as :meth:`EngineActor.address` returns it.

        Args:
            timeout: The longest time in seconds until it says so.

        Raises:
            TimeoutError: It does not say so in time, as no machine has room for it.
            OSError: It was ended meanwhile.
        """
        begin, is_told = time.monotonic(), False
        while True:
            with self._lock:
                if self._actor is None:
                    raise OSError("the engine was ended while it started")
                if self._asked is None:
                    self._asked = self._actor.address.remote()
                if self._ray.wait([self._asked], timeout=0)[0]:
                    asked, self._asked = self._asked, None
                    return self._ray.get(asked)
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

    def run(self, settings: WorkerSettings) -> None:
        """Runs the engine.

        Args:
            settings: The settings of its worker.
        """
        self._actor.run.remote(settings)

    def wait(self, timeout: float | None) -> None:
        """Waits for its end.

        Args:
            timeout: The longest time in seconds; None: no limit.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while end is None or time.monotonic() < end:
            with self._lock:
                if self._actor is None or self._says_ended():
                    return
            time.sleep(_LOOK_S)

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
        self.forget()

    def forget(self) -> None:
        """Frees the handles; Ray ends its actors when it ends itself."""
        with self._lock:
            self._actor = self._asked = None


class RayCluster:
    """A Ray cluster: joins it, or starts one on this machine.

    Args:
        settings: How it is joined.
        replicas: The number of replicas that share its cores, where no number of cores is given; None: one for each
            machine.
        folder: The folder of the server, where the next owner of the engines finds the cluster; empty: engines end with
            this process, and so does a cluster that it starts.

    Raises:
        ConfigError: Ray is not installed, or there is no cluster at the address.
    """

    def __init__(self, settings: RaySettings, replicas: int | None, folder: str = "") -> None:
        if find_spec("ray") is None:
            raise ConfigError(
                "--ray needs the package ray, which is not installed",
                'Install it with: pip install "supremum[ray]"',
            )
        self._outlives = bool(folder)
        address = settings.address
        if address is None and folder:
            address = kept_cluster(folder)
        self._ray = ray = _ray()
        started = not ray.is_initialized()
        if started:
            try:
                ray.init(address=address, namespace=NAMESPACE, **start_options())
            except ConnectionError as error:
                raise ConfigError(
                    f"there is no Ray cluster at {address!r}: {error}",
                    "Start one with `ray start --head`, or leave out --ray-address. Where it wants a token, set"
                    " RAY_AUTH_MODE=token, and have the same ~/.ray/auth_token here.",
                ) from error
        self._started, self._is_closed = started, False
        self._engines: set[_Engine] = set()
        machines = [node.cpus for node in self.nodes() if node.is_alive and node.cpus >= 1]
        self.replicas = replicas or max(len(machines), 1)
        """The number of replicas."""
        # one for each machine must fit on the smallest one
        shared = sum(machines) // replicas if replicas else min(machines, default=1)
        self.cpus = settings.cpus or max(int(shared), 1)
        """The cores of a replica."""
        largest = max(machines, default=0)
        if self.cpus > largest:
            self.close()
            raise ConfigError(
                f"a replica needs {self.cpus} cores, and the largest machine of the cluster has {largest:g}",
                "Give a smaller --ray-cpus.",
            )
        self._excluded: set[str] = set()

    def nodes(self) -> list[Node]:
        """The machines of the cluster."""
        return [
            Node(
                node["NodeID"],
                node["NodeManagerAddress"],
                node["Resources"].get("CPU", 0),
                bool(node["Alive"]),
            )
            for node in self._ray.nodes()
        ]

    @property
    def excluded_nodes(self) -> Sequence[str]:
        """The machines that no further engine is started on, by their identifiers."""
        return sorted(self._excluded)

    def exclude(self, node: str) -> None:
        """Starts no further engine on a machine.

        Args:
            node: Its identifier.
        """
        self._excluded.add(node)

    def start_worker(
        self, settings: WorkerSettings, cpus: int | None = None, nodes: Sequence[str] = ()
    ) -> RemoteWorker:
        """Starts an engine on a machine of the cluster; waits until it listens.

        Args:
            settings: The settings of its worker; the model's files are read on that machine.
            cpus: Its cores; None: those of each replica.
            nodes: The machines that it may run on, by address or the begin of an identifier; none: all.

        Raises:
            NoMachineError: No machine that it may run on has the cores free.
            OSError: The engine cannot be reached.
        """
        ray, key = self._ray, secrets.token_bytes(KEY_BYTES)
        cpus = cpus or self.cpus
        # `run` holds a thread of the actor, whose other methods are called meanwhile
        options: dict[str, Any] = {"num_cpus": cpus, "max_restarts": 0, "max_concurrency": 4}
        options |= self._placement(nodes)
        name = f"engine-{secrets.token_hex(8)}" if self._outlives else ""
        if name:
            options |= {"name": name, "namespace": NAMESPACE, "lifetime": "detached"}
        actor = ray.remote(EngineActor).options(**options).remote(key, cpus, self._outlives)
        engine = self._note(_Engine(ray, actor))
        try:
            try:
                host, port, node = engine.address(START_S)
            except TimeoutError as error:
                raise NoMachineError(
                    f"no machine of the cluster has {cpus} free cores; waited for {START_S:g} s"
                ) from error
            engine.run(settings)
            worker = self._worker(
                engine, DoorAddress(host, port, key), node, name, settings.unhealthy_s
            )
        except Exception as error:
            self._end(engine)
            if isinstance(error, OSError):
                raise
            # before it, Ray shows stacks of other machines
            reason = (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
            raise OSError(f"the cluster starts no engine of {cpus} cores: {reason}") from error
        return worker

    def adopt(self, known: KnownEngine, silence_s: float) -> RemoteWorker:
        """Takes over an engine of an earlier owner.

        Args:
            known: What is known of the engine.
            silence_s: The time without a sign of life after which it is unhealthy.

        Raises:
            OSError: It is no more.
        """
        if known.door is None or not known.actor:
            raise ProcessLookupError("it had no process")
        try:
            engine = _Engine(self._ray, self._ray.get_actor(known.actor, namespace=NAMESPACE))
        except ValueError as error:
            raise ProcessLookupError(f"the cluster has no {known.actor}") from error
        self._note(engine)
        try:
            _, _, node = engine.address(ADOPT_S)
            return self._worker(engine, known.door, node, known.actor, silence_s, OWNER_PURPOSES)
        except Exception as error:
            self._end(engine)
            raise ProcessLookupError(f"{known.actor} does not answer: {error}") from error

    def _worker(
        self,
        engine: _Engine,
        door: DoorAddress,
        node: str,
        actor: str,
        silence_s: float,
        purposes: tuple[str, str] = PURPOSES,
    ) -> RemoteWorker:
        """Connects to an engine."""
        return RemoteWorker(
            door.host,
            door.port,
            door.key,
            silence_s,
            partial(self._end, engine),
            engine.wait,
            name=f"on {door.host}, node {node[:12]}",
            node=node,
            purposes=purposes,
            actor=actor,
        )

    def _note(self, engine: _Engine) -> _Engine:
        self._engines.add(engine)
        return engine

    def _end(self, engine: _Engine) -> None:
        """Ends an engine's process."""
        engine.end()
        self._engines.discard(engine)

    def _placement(self, only: Sequence[str]) -> dict[str, Any]:
        """The options that choose a machine: spread, without those that are excluded.

        Args:
            only: The machines that are allowed; none: all.

        Raises:
            NoMachineError: None is left.
        """
        alive = [node for node in self.nodes() if node.is_alive]
        found = {each.identifier for each in alive if not only or each.is_one_of(only)}
        left = found - self._excluded
        if not left:
            names = ", ".join(f"{node.identifier[:12]} ({node.address})" for node in alive)
            what = "is drained" if found else f"is none of {', '.join(only)}"
            raise NoMachineError(f"each machine of the cluster {what}; they are {names}")
        if len(left) == len(alive):
            return {"scheduling_strategy": "SPREAD"}
        return {"label_selector": {"ray.io/node-id": f"in({','.join(sorted(left))})"}}

    def close(self) -> None:
        """Leaves the cluster, and stops it if it was started here."""
        if self._started and not self._is_closed:
            self._is_closed = True
            for engine in list(self._engines):
                if self._outlives:
                    engine.end()  # nobody else would
                engine.forget()
            self._ray.shutdown()
