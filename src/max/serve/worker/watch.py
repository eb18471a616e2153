"""Watches the signs of life of a worker: whether it answers, and when it is to be replaced."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from max.serve.process.settings import WatchLimits
from max.serve.worker.life_signs import Signs


class WorkerWatch:
    """The watch over one worker, by an event loop.

    Times during which this process itself did not run, as on a suspended machine, do not count as silence.

    Args:
        signs: The signs of the worker.
        limits: How long it may be silent.
        on_loss: Called once with the reason why it is to be replaced.
        clock: The clock of the signs.
    """

    def __init__(
        self,
        signs: Signs,
        limits: WatchLimits,
        on_loss: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._signs, self._limits, self._on_loss, self._clock = signs, limits, on_loss, clock
        self._looked_at = self._runs_since = clock()
        self._timer = asyncio.get_running_loop().call_later(signs.interval_s, self._look)

    @property
    def responds(self) -> bool:
        """Whether the last beat is recent."""
        return self._silence() < self._limits.unhealthy_s

    def stop(self) -> None:
        """Ends the watch."""
        self._timer.cancel()

    def _look(self) -> None:
        limits, silence = self._limits, self._silence()
        if limits.restart_s and silence >= limits.restart_s:
            self._on_loss(f"its process has not run for {silence:.1f} s")
            return
        begin = self._signs.step_begin
        # a step that was running while this process was stopped counts from its wake on
        step = 0.0 if begin is None else self._looked_at - max(begin, self._runs_since)
        if limits.step_s and step >= limits.step_s:
            self._on_loss(f"a step of the engine has taken {step:.1f} s")
            return
        self._timer = asyncio.get_running_loop().call_later(self._signs.interval_s, self._look)

    def _silence(self) -> float:
        """The seconds since the last beat, without those in which this process did not run."""
        now = self._clock()
        # looks were missed: this process was stopped, or the machine slept
        if now - self._looked_at > 2 * self._signs.interval_s:
            self._runs_since = now
        self._looked_at = now
        return now - max(self._signs.last_beat, self._runs_since)
