"""The machines of a cluster, as the server uses them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from max.serve.process.settings import WorkerSettings
from max.serve.worker.event_reader import Worker


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


class Cluster(Protocol):
    """Machines that run engines; ``RayCluster`` implements it."""

    def nodes(self) -> list[Node]:
        """The machines."""
        ...

    def exclude(self, node: str) -> None:
        """Starts no further engine on a machine, given by its identifier."""
        ...

    def start_worker(self, settings: WorkerSettings) -> Worker:
        """Starts an engine on a machine, and waits until it listens.

        Args:
            settings: The settings of its worker.

        Raises:
            OSError: None can be started.
        """
        ...

    def close(self) -> None:
        """Leaves the cluster."""
        ...
