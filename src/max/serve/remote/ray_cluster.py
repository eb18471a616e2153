"""Engines as actors of a Ray cluster, which finds machines for them.

With one server process they are actors of its job, which end with it. Where another process would own the engines next,
they are detached actors with a name: the next owner finds them by it, and each ends itself when there is no server any
more (`max.serve.routers.shared_channel`). Processes that are ready are not taken over: they end some time after their
owner.
"""

from __future__ import annotations

import logging
import random
import secrets
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

from max.pipelines.core.exceptions import ConfigError
from max.serve.process.settings import RaySettings, WorkerSettings
from max.serve.remote.cluster import Node
from max.serve.remote.connections import KEY_BYTES
from max.serve.remote.ray_engine import ActorEngine, EngineActor, ray_module
from max.serve.remote.ray_keeper import kept_cluster, start_options
from max.serve.remote.ray_spares import Spares
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
MOST_CACHES = 4
"""The caches of other machines that an engine asks when it starts."""


def _one_of(nodes: Collection[str]) -> dict[str, Any]:
    """The options that choose one of some machines."""
    return {"label_selector": {"ray.io/node-id": f"in({','.join(sorted(nodes))})"}}


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
        self._ray = ray = ray_module()
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
        self._starts = (
            threading.Lock()
        )  # no process is started after the end: Ray would start a cluster for it
        self._engines: set[ActorEngine] = set()
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

    _spares: Spares | None = None

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
        cpus = cpus or self.cpus
        while (spare := self._spare(cpus, nodes)) is not None:
            try:
                return self._run(spare, settings, cpus)
            except Exception as error:  # its process, or its machine, is gone
                logger.info("a process that was ready does not run an engine: %s", error)
                self.end(spare)
        engine = self._actor(cpus, self._placement(nodes))
        try:
            try:
                engine.address(START_S)
            except TimeoutError as error:
                raise NoMachineError(
                    f"no machine of the cluster has {cpus} free cores; waited for {START_S:g} s"
                ) from error
            return self._run(engine, settings)
        except Exception as error:
            self.end(engine)
            if isinstance(error, OSError):
                raise
            # before it, Ray shows stacks of other machines
            reason = (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
            raise OSError(f"the cluster starts no engine of {cpus} cores: {reason}") from error

    def _actor(self, cpus: int, placement: Mapping[str, Any]) -> ActorEngine:
        """Starts the process of an engine.

        Args:
            cpus: Its cores; 0: it reserves them when it runs.
            placement: The options that choose a machine.

        Raises:
            OSError: The cluster was left meanwhile.
        """
        key = secrets.token_bytes(KEY_BYTES)
        name = f"engine-{secrets.token_hex(8)}" if self._outlives else ""
        # `run` holds a thread of the actor, whose other methods are called meanwhile
        options: dict[str, Any] = {"num_cpus": cpus, "max_restarts": 0, "max_concurrency": 4}
        options |= placement
        if name:
            options |= {"name": name, "namespace": NAMESPACE, "lifetime": "detached"}
        with self._starts:
            if self._is_closed:
                raise OSError("the cluster was left meanwhile")
            made = self._ray.remote(EngineActor).options(**options).remote(key, cpus, bool(name))
            return self._note(ActorEngine(self._ray, made, key, name))

    def _run(self, engine: ActorEngine, settings: WorkerSettings, cpus: int = 0) -> RemoteWorker:
        """Runs an engine whose address is known.

        Args:
            engine: Its process.
            settings: The settings of its worker.
            cpus: The cores of one that was started without any.
        """
        assert engine.found is not None
        host, port, node, _ = engine.found
        engine.run(replace(settings, caches=self._caches(node, settings.config)), cpus)
        door = DoorAddress(host, port, engine.key)
        return self._worker(engine, door, node, settings.unhealthy_s)

    def keep_spares(self, count: int) -> None:
        """Keeps processes ready, without cores and models, that start an engine in less time than new ones.

        Args:
            count: Their number; on each machine there is one at the most.
        """
        self._spares = Spares(self, count)

    def start_spare(self, besides: Collection[str]) -> ActorEngine | None:
        """Starts a process that is kept ready, on a machine that has the cores of an engine; None: there is no other.

        Args:
            besides: The machines that have one.
        """
        fit = {n.identifier for n in self.nodes() if n.is_alive and n.cpus >= self.cpus}
        left = fit - self._excluded - set(besides)
        return self._actor(0, _one_of(left)) if left else None

    def _spare(self, cpus: int, nodes: Sequence[str]) -> ActorEngine | None:
        """A process that is ready, with its cores reserved; None: there is none where the engine may run."""
        if self._spares is None:
            return None
        allowed = {
            node.identifier
            for node in self.nodes()
            if node.is_alive and (not nodes or node.is_one_of(nodes))
        }
        return self._spares.take(allowed - self._excluded, cpus)

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
            actor = self._ray.get_actor(known.actor, namespace=NAMESPACE)
        except ValueError as error:
            raise ProcessLookupError(f"the cluster has no {known.actor}") from error
        engine = self._note(ActorEngine(self._ray, actor, name=known.actor))
        try:
            node = engine.address(ADOPT_S).node
            return self._worker(engine, known.door, node, silence_s, OWNER_PURPOSES)
        except Exception as error:
            self.end(engine)
            raise ProcessLookupError(f"{known.actor} does not answer: {error}") from error

    def _worker(
        self,
        engine: ActorEngine,
        door: DoorAddress,
        node: str,
        silence_s: float,
        purposes: tuple[str, str] = PURPOSES,
    ) -> RemoteWorker:
        """Connects to an engine."""
        return RemoteWorker(
            door.host,
            door.port,
            door.key,
            silence_s,
            partial(self.end, engine),
            engine.wait,
            name=f"on {door.host}, node {node[:12]}",
            node=node,
            purposes=purposes,
            actor=engine.name,
        )

    def _caches(self, node: str, config: Mapping[str, Any]) -> tuple[DoorAddress, ...]:
        """The caches that an engine asks: of other machines one each, first of those that run the same model.

        Args:
            node: The machine of the engine, whose folder it has itself.
            config: The configuration of its model.
        """
        running = [(each.config == config, each.found) for each in list(self._engines)]
        others = {at.node: (same, at.cache) for same, at in running if at and at.node != node}
        # one machine may run several models
        others |= {at.node: (same, at.cache) for same, at in running if at and same}
        others.pop(node, None)
        drawn = random.sample(list(others.values()), len(others))
        ordered = sorted(drawn, key=lambda item: not item[0])
        return tuple(cache for _, cache in ordered[:MOST_CACHES])

    def _note(self, engine: ActorEngine) -> ActorEngine:
        self._engines.add(engine)
        return engine

    def end(self, engine: ActorEngine) -> None:
        """Ends an engine's process.

        Args:
            engine: The engine.
        """
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
        return _one_of(left)

    def close(self) -> None:
        """Leaves the cluster, and stops it if it was started here."""
        if self._spares is not None:
            self._spares.close()
        with self._starts:
            was_closed, self._is_closed = self._is_closed, True
        if self._started and not was_closed:
            for engine in list(self._engines):
                if self._outlives:
                    engine.end()  # nobody else would
                engine.forget()
            self._ray.shutdown()
