"""A model of a pool: its state, its users, its times."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from max.pipelines.store.local import StoredModel
from max.serve.models.model import ServedModel
from max.serve.worker.client import EngineState


class ModelStatus(Enum):
    """The state of a model of a pool; the values are those of llama.cpp's router."""

    UNLOADED = "unloaded"
    """No process holds it."""
    LOADING = "loading"
    """A worker loads it."""
    LOADED = "loaded"
    """Requests run."""
    FAILED = "failed"
    """The last attempt to load it failed; the next request tries again."""


@dataclass(frozen=True)
class PoolLimits:
    """How many models are loaded, and for how long.

    Args:
        max_models: The most that are loaded at once.
        idle_timeout_s: A model without requests is unloaded after this time; negative: never.
    """

    max_models: int = 4
    idle_timeout_s: float = 300.0


@dataclass
class PoolEntry:
    """A model of a pool.

    Args:
        name: Its name.
        stored_model: Its files; None for the model that the server was started with.
        model: The loaded model.
        pinned: Whether it stays loaded.
        users: Requests that hold it.
        used_at: When the last of them ended, by the monotonic clock.
        keep_alive: Seconds that it stays after its last request; None: the pool's timeout.
        error: Why the last attempt to load it failed.
    """

    name: str
    stored_model: StoredModel | None = None
    model: ServedModel | None = None
    pinned: bool = False
    users: int = 0
    used_at: float = 0.0
    keep_alive: float | None = None
    error: str = ""
    loading: asyncio.Future[Any] | None = field(default=None, repr=False)
    timer: asyncio.TimerHandle | None = field(default=None, repr=False)
    stopping: asyncio.Task[None] | None = field(default=None, repr=False)
    """The task that stops its former worker, which holds its memory until the task ends."""

    def stop_timer(self) -> None:
        """Cancels the timer that unloads it."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    @property
    def in_memory(self) -> bool:
        """Whether a process holds it or will hold it: it loads, is loaded, or its worker stops."""
        return self.model is not None or self.loading is not None or self.stopping is not None

    @property
    def status(self) -> ModelStatus:
        """Its state."""
        if self.loading is not None:
            return ModelStatus.LOADING
        if self.model is not None and self.model.engine.state is not EngineState.STOPPED:
            return ModelStatus.LOADED
        return ModelStatus.FAILED if self.error else ModelStatus.UNLOADED
