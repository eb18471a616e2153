"""Engines as actors of a Ray cluster, which finds machines for them and ends them with their server."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Sequence
from typing import Any

from max.pipelines.core.exceptions import ConfigError
from max.serve.process.settings import RaySettings, WorkerSettings
from max.serve.remote.cluster import Node
from max.serve.remote.connections import KEY_BYTES
from max.serve.remote.cores import ClaimedCores
from max.serve.remote.host import EngineHost
from max.serve.remote.worker import RemoteWorker

logger = logging.getLogger("max.serve")

START_S = 120.0
"""The longest time in seconds until the cluster has found a machine and its process listens."""
_LOOK_S = 0.05


def _ray() -> Any:
    try:
        import ray  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(
            "--ray needs the package ray, which is not installed",
            'Install it with: pip install "supremum[ray]"',
        ) from error
    return ray


class EngineActor:
    """What runs on the machine of a replica.

    Args:
        key: The key that the server must know.
        cpus: The cores that the engine may use.
    """

    def __init__(self, key: bytes, cpus: int) -> None:
        self._cores = ClaimedCores(cpus)
        if self._cores.cores:
            os.sched_setaffinity(0, self._cores.cores)
        self._host = EngineHost(key)

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
        self._host.run(settings)


class _Engine:
    """An actor of a cluster that is the process of an engine.

    Args:
        ray: The module.
        actor: The handle of the actor.
    """

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray: Any = ray
        self._actor: Any = actor
        self._running: Any = None
        # guards both: a handle that is used or freed after Ray has ended would end this process
        self._lock = threading.Lock()

    def address(self) -> tuple[str, int, str]:
        """Its address, as :meth:`EngineActor.address` returns it."""
        return self._ray.get(self._actor.address.remote(), timeout=START_S)

    def run(self, settings: WorkerSettings) -> None:
        """Runs the engine.

        Args:
            settings: The settings of its worker.
        """
        self._running = self._actor.run.remote(settings)

    def wait(self, timeout: float | None) -> None:
        """Waits for its end.

        Args:
            timeout: The longest time in seconds; None: no limit.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while end is None or time.monotonic() < end:
            with self._lock:
                if self._running is None or self._ray.wait([self._running], timeout=0)[0]:
                    return
            time.sleep(_LOOK_S)

    def end(self) -> None:
        """Ends its process."""
        with self._lock, contextlib.suppress(Exception):  # it has ended already
            if self._actor is not None:
                self._ray.kill(self._actor, no_restart=True)
        self.forget()

    def forget(self) -> None:
        """Frees the handles; Ray ends its actors when it ends itself."""
        with self._lock:
            self._actor = self._running = None


class RayCluster:
    """A Ray cluster: joins it, or starts one on this machine.

    Args:
        settings: How it is joined.
        replicas: The number of replicas that share its cores, where no number of cores is given; None: one for each
            machine.

    Raises:
        ConfigError: Ray is not installed, or there is no cluster at the address.
    """

    def __init__(self, settings: RaySettings, replicas: int | None) -> None:
        self._ray = ray = _ray()
        started = not ray.is_initialized()
        if started:
            try:
                ray.init(
                    address=settings.address,
                    log_to_driver=False,
                    include_dashboard=False,
                    logging_level=logging.WARNING,
                    namespace="supremum",
                )
            except ConnectionError as error:
                raise ConfigError(
                    f"there is no Ray cluster at {settings.address!r}: {error}",
                    "Start one with `ray start --head`, or leave out --ray-address.",
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
    def excluded(self) -> Sequence[str]:
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
            OSError: No machine has the cores free, or the engine cannot be reached.
        """
        ray, key = self._ray, secrets.token_bytes(KEY_BYTES)
        cpus = cpus or self.cpus
        options: dict[str, Any] = {"num_cpus": cpus, "max_restarts": 0, "max_concurrency": 2}
        options |= self._placement(nodes)
        engine = _Engine(ray, ray.remote(EngineActor).options(**options).remote(key, cpus))
        self._engines.add(engine)

        def end() -> None:
            engine.end()
            self._engines.discard(engine)

        try:
            host, port, node = engine.address()
            engine.run(settings)
            name = f"on {host}, node {node[:12]}"
            worker = RemoteWorker(
                host, port, key, settings.unhealthy_s, end, engine.wait, name, node
            )
        except Exception as error:
            end()
            if isinstance(error, OSError):
                raise
            raise OSError(f"the cluster starts no engine of {cpus} cores: {error}") from error
        return worker

    def _placement(self, only: Sequence[str]) -> dict[str, Any]:
        """The options that choose a machine: spread, without those that are excluded.

        Args:
            only: The machines that are allowed; none: all.

        Raises:
            OSError: None is left.
        """
        alive = [node for node in self.nodes() if node.is_alive]
        found = {each.identifier for each in alive if not only or each.is_one_of(only)}
        left = found - self._excluded
        if not left:
            names = ", ".join(f"{node.identifier[:12]} ({node.address})" for node in alive)
            what = "is drained" if found else f"is none of {', '.join(only)}"
            raise OSError(f"each machine of the cluster {what}; they are {names}")
        if len(left) == len(alive):
            return {"scheduling_strategy": "SPREAD"}
        return {"label_selector": {"ray.io/node-id": f"in({','.join(sorted(left))})"}}

    def close(self) -> None:
        """Leaves the cluster, and stops it if it was started here."""
        if self._started and not self._is_closed:
            self._is_closed = True
            for engine in list(self._engines):
                engine.forget()
            self._ray.shutdown()
