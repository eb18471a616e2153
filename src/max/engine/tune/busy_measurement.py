"""Measurement of row thresholds between the executions of a program, on a device that is never idle."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator

from max._backends.backend import Backend
from max.engine.tune.row_thresholds import Threshold
from max.engine.tune.threshold_measurement import TURN_RUNS, stats

__all__ = ["BusyMeasurement"]

BUSY_SHARE = 0.03
"""The largest share of the time that measurements take."""


class BusyMeasurement:
    """A measurement that goes on by one turn after an execution of its program, on the thread that executed it.

    The device has just become free there, so that a turn is not disturbed. If something ran meanwhile, it is begun
    again.

    Args:
        begin: Begins the measurement: its turns, and their result.
        backend: The device.
        keep: Called with the result.
    """

    def __init__(
        self,
        begin: Callable[[], Generator[None, None, Threshold | None]],
        backend: Backend,
        keep: Callable[[Threshold | None], None],
    ) -> None:
        self._begin, self._backend, self._keep = begin, backend, keep
        self._turns = begin()
        self._lock = threading.Lock()
        self._started, self._spent = time.perf_counter(), 0.0
        self.ended = False
        """Whether the result is known."""

    def take_turn(self) -> None:
        """Runs a turn, if measurements may take the time now."""
        begin = time.perf_counter()
        # a turn of another thread is not waited for
        if self._spent > BUSY_SHARE * (begin - self._started) or not self._lock.acquire(False):
            return
        try:
            before = self._backend.run_number()
            if self.ended or before % 2:  # something runs
                return
            try:
                next(self._turns)
            except StopIteration as end:
                self.ended = True
                self._keep(end.value)
                return
            # a run of something else disturbed the turn
            if self._backend.run_number() != before + TURN_RUNS:
                stats.given_up += 1
                self._turns = self._begin()
        finally:
            self._spent += time.perf_counter() - begin
            self._lock.release()
