"""The machines of a cluster, as the server uses them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from max.serve.process.settings import WorkerSettings
from max.serve.routers.handover import KnownEngine
from max.serve.worker.started_worker import Worker


@dataclass(frozen=True)
class Node:
    """A machine of a cluster.

    Args:
        identifier: The cluster's identifier.
        address: Its address.
        cpus: Its cores.
        is_alive: Whether it is part of the cluster.
    """

    identifier: str
    address: str
    cpus: float
    is_alive: bool

    def is_one_of(self, names: Sequence[str]) -> bool:
        """Whether one of some names is its address or the begin of its identifier.

        Args:
            names: The names.
        """
        return any(name == self.address or self.identifier.startswith(name) for name in names)


class Cluster(Protocol):
    """Machines that run engines; ``RayCluster`` implements it."""

    def nodes(self) -> list[Node]:
        """The machines."""
        ...

    @property
    def excluded_nodes(self) -> Sequence[str]:
        """The machines that no further engine is started on, by their identifiers."""
        ...

    def exclude(self, node: str) -> None:
        """Starts no further engine on a machine, given by its identifier."""
        ...

    def start_worker(
        self, settings: WorkerSettings, cpus: int | None = None, nodes: Sequence[str] = ()
    ) -> Worker:
        """Starts an engine on a machine, and waits until it listens.

        Args:
            settings: The settings of its worker.
            cpus: Its cores; None: those of each replica.
            nodes: The machines that it may run on, by address or the begin of an identifier; none: all.

        Raises:
            OSError: None can be started.
        """
        ...

    def adopt(self, known: KnownEngine, silence_s: float) -> Worker:
        """Takes over an engine of an earlier owner.

        Args:
            known: What is known of the engine.
            silence_s: The time without a sign of life after which it is unhealthy.

        Raises:
            OSError: It is no more.
        """
        ...

    def close(self) -> None:
        """Leaves the cluster."""
        ...
