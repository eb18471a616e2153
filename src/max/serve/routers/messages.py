"""What the owner of the engines and a router tell each other; they are parent and child, so it is pickled."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from max.pipelines.generation.process.channel import ConnectionChannel
from max.serve.process.settings import ServerSettings
from max.serve.routers.address import DoorAddress
from max.serve.worker.queued_channel import QueuedChannel

logger = logging.getLogger("max.serve")


@dataclass(frozen=True)
class RoutedModel:
    """A model of a router.

    Args:
        name: Its name for clients; None: that of its configuration.
        config: The fields of its configuration that are set.
        is_single: Whether there is no second engine ever.
        canary_of: The name of the model whose requests it gets a share of; empty: none.
        share: The share.
        by: By what requests are chosen.
    """

    name: str | None
    config: dict[str, Any]
    is_single: bool
    canary_of: str = ""
    share: float = 0.0
    by: Any = "request"


@dataclass(frozen=True)
class RouterSettings:
    """What a router is started with.

    Args:
        settings: The settings of the server.
        models: Its models.
        folder: The folder of the server's socket files and counts.
        rows: The rows of the file of counts.
        row: The router's row.
        log_level: The level of the ``max`` logger.
        door: Where the next owner connects to it.
    """

    settings: ServerSettings
    models: tuple[RoutedModel, ...]
    folder: str
    rows: int
    row: int
    log_level: str
    door: DoorAddress


@dataclass(frozen=True)
class Engines:
    """The engines of a model, all of them.

    Args:
        model: The number of the model.
        doors: Where they are, by their numbers.
        adapters: The adapters that are loaded, by name.
    """

    model: int
    doors: Mapping[int, DoorAddress]
    adapters: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Epochs:
    """How often tenants have dropped their cached prefixes.

    Args:
        first: The number of tenants that are not listed.
        of_tenants: The numbers of the others.
    """

    first: int
    of_tenants: Mapping[str, int]


@dataclass(frozen=True)
class Metrics:
    """Asks for the counts of a router."""


@dataclass(frozen=True)
class Look:
    """Asks whether a router goes on, and for its open requests."""


@dataclass(frozen=True)
class End:
    """Ends a router.

    Args:
        graceful_s: Seconds for open requests to end; None: no limit, and clients are given time to go elsewhere.
    """

    graceful_s: float | None


@dataclass(frozen=True)
class Order:
    """A message of the owner.

    Args:
        number: The number of its answer.
        what: The message.
    """

    number: int
    what: Engines | Epochs | Metrics | Look | End


@dataclass(frozen=True)
class Reply:
    """A router has done what an order says.

    Args:
        number: The number of the order; 0: the router is ready.
        value: Its answer.
    """

    number: int
    value: Any = None


class Link:
    """One end of the channel between the owner and a router, for an event loop.

    Args:
        connection: The end.
        take: Called in the loop with each message, and None at the end.
    """

    def __init__(self, connection: Connection, take: Callable[[Any], None]) -> None:
        pipe: ConnectionChannel[Any, Any] = ConnectionChannel(connection)
        self._channel = QueuedChannel(pipe)
        self._loop, self._take = asyncio.get_running_loop(), take
        threading.Thread(target=self._read, name="server link", daemon=True).start()

    def send(self, message: Order | Reply) -> None:
        """Sends a message; does nothing if the other process has ended."""
        try:
            self._channel.send(message)
        except OSError:
            pass  # the reader tells it

    def close(self) -> None:
        """Ends the sends, after the other process has ended."""
        self._channel.end_sends()

    def _read(self) -> None:
        message: Any = True
        while message is not None:
            try:
                message = self._channel.receive()
            except EOFError:
                message = None
            except Exception:
                logger.exception("the messages of another server process cannot be read")
                message = None
            try:
                self._loop.call_soon_threadsafe(self._take, message)
            except RuntimeError:
                return  # the loop is closed
