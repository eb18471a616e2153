"""Counts of what the compiler did in this process."""

from __future__ import annotations

import time
from dataclasses import field

from max._dataclass import dataclass

__all__ = ["CompileStats", "stats"]


@dataclass
class CompileStats:
    """Counts since the process started; tests gate on them."""

    modules: int = 0
    """Modules that went through the passes."""
    from_disk: int = 0
    """Programs that came from the cache instead."""
    recipes: int = 0
    """Of these, programs that were found without staging their module."""
    kernels: int = 0
    """Kernels that were specialized."""
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    """Time of each pass and phase, summed."""

    def add(self, name: str, start: float) -> float:
        """Adds the time since `start` to a phase; returns the current time."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - start
        return now


stats = CompileStats()
