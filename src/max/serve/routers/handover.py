"""What the next owner of the engines has to know: which engines and routers there are, and what they were told.

The owner writes it to a file of the server's folder, which only its user can read, whenever it changes. If the owner
dies, the next one reads it, and takes engines and routers over where they are.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from max.serve.process.settings import WorkerSettings
from max.serve.routers.address import DoorAddress

_NAME = "handover"


@dataclass(frozen=True)
class KnownEngine:
    """An engine of a model.

    Args:
        number: Its number among the replicas of the model.
        settings: The settings of its worker.
        door: Where it is; None: no process of it is known.
        actor: What a cluster calls its process; empty: it is on this machine.
    """

    number: int
    settings: WorkerSettings
    door: DoorAddress | None
    actor: str = ""


@dataclass(frozen=True)
class KnownModel:
    """A model.

    Args:
        engines: Its engines, but those that end.
        adapters: The adapters that are loaded, by name.
        adapter_changes: The changes of adapters since the start of the server, as ``Replica.adapters``.
    """

    engines: tuple[KnownEngine, ...]
    adapters: Mapping[str, str] = field(default_factory=dict)
    adapter_changes: Mapping[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True)
class KnownRouter:
    """A router.

    Args:
        number: Its number.
        row: Its row of the counts.
        door: Where it is.
        retires: Whether it ends as it was told to.
    """

    number: int
    row: int
    door: DoorAddress
    retires: bool


@dataclass(frozen=True)
class Handover:
    """What the next owner has to know.

    Args:
        models: The models, in the order of the settings.
        routers: The routers.
        epochs: How often tenants have dropped their cached prefixes, as ``PrefixEpochs.all``.
        past: The counts of routers that have ended.
        excluded_nodes: The machines of a cluster on which no further engine is started.
    """

    models: tuple[KnownModel, ...] = ()
    routers: tuple[KnownRouter, ...] = ()
    epochs: tuple[int, Mapping[str, int]] = (0, {})
    past: Mapping[Any, float] = field(default_factory=dict)
    excluded_nodes: tuple[str, ...] = ()

    @classmethod
    def read(cls, folder: str) -> Handover | None:
        """What the last owner has left; None: there was none.

        Args:
            folder: The folder of the server.
        """
        try:
            # a folder that only this user can write to
            found = pickle.loads((Path(folder) / _NAME).read_bytes())
        except FileNotFoundError:
            return None
        return found if isinstance(found, cls) else None

    def write(self, folder: str) -> None:
        """Writes it in place of the one before.

        Args:
            folder: The folder of the server.

        Raises:
            OSError: It cannot be written.
        """
        new = Path(folder) / f"{_NAME}.new"
        new.write_bytes(pickle.dumps(self))
        # in one step: an owner that is lost meanwhile leaves a whole file
        os.replace(new, Path(folder) / _NAME)
