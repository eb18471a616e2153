"""Signs of life of a worker process, in memory that it shares with the server: no messages, and no waiting.

Two signs tell a process that does not run (stopped, swapped out, its interpreter lock held for ever) from an engine
that does not go on: a thread notes the time at intervals, and the engine's loop notes when each of its steps begins.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import threading
import time
from typing import Any, Protocol

BEATS_PER_LIMIT = 2.5
"""Beats within the time after which a silent worker is unhealthy; an idle process hardly wakes for them."""
_STEP_BYTES = 96


class Signs(Protocol):
    """The signs of a worker, as a server sees them; times are those of the server's clock."""

    @property
    def interval_s(self) -> float:
        """The seconds between two beats."""
        ...

    @property
    def last_beat(self) -> float:
        """The time of the last beat."""
        ...

    @property
    def step_begin(self) -> float | None:
        """When the running step began; None: none runs."""
        ...

    @property
    def loading(self) -> str:
        """The step of the load; empty: nothing is known."""
        ...


class LifeSigns:
    """The times of a worker's signs, on the clock that all processes of a machine share.

    Args:
        silence_s: The time without a sign after which the worker is unhealthy.
    """

    def __init__(self, silence_s: float) -> None:
        self.interval_s = silence_s / BEATS_PER_LIMIT
        """The seconds between two beats."""
        context = multiprocessing.get_context("spawn")
        # raw, without a lock: a worker that dies could hold it
        self._times: Any = context.RawArray(ctypes.c_double, 2)
        self._times[0] = time.monotonic()
        self._step: Any = context.RawArray(ctypes.c_char, _STEP_BYTES)

    def start(self) -> None:
        """Starts the thread of the beats, in the worker."""
        threading.Thread(target=self._beat, name="engine heartbeat", daemon=True).start()

    def note_load(self, step: str, num_done: int, total: int) -> None:
        """Notes what the worker loads, for the server.

        Args:
            step: The step in a few words; empty: the load has ended.
            num_done: Its parts that are done.
            total: All its parts; 0: it has none.
        """
        text = f"{step} {num_done}/{total}" if total else step
        # a reader may see parts of two texts, which people read only
        self._step.value = text.encode("utf-8", "replace")[: _STEP_BYTES - 1]

    @property
    def loading(self) -> str:
        """The step of the load, with its parts: ``compiling kernels 3/17``; empty: nothing is known."""
        return self._step.value.decode("utf-8", "replace")

    def step_begins(self) -> None:
        """Notes that the engine begins a step."""
        self._times[1] = time.monotonic()

    def step_ends(self) -> None:
        """Notes that the engine waits for requests."""
        self._times[1] = 0.0

    @property
    def last_beat(self) -> float:
        """The time of the last beat."""
        return self._times[0]

    @property
    def step_begin(self) -> float | None:
        """When the running step began; None: none runs."""
        return self._times[1] or None

    def _beat(self) -> None:
        while True:
            self._times[0] = time.monotonic()
            time.sleep(self.interval_s)
