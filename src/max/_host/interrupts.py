"""Ends executions early: on signals that Python handles, and on events that other threads set.

A thread inspects the pools every :data:`TICK` seconds. If it sees the same run twice, it makes the workers call
`max_poll` (:mod:`max._backends.cpu.runtime.native`). If the main thread started the run, Python then handles its
signals. If the run was started in an `interrupt_on` block whose event is set, the run ends. Short runs are never
disturbed, and the thread sleeps while nothing runs.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from typing import Protocol

from max._host.reentry import in_child, reentrant_lock
from max._host.threads import DaemonThread

logger = logging.getLogger("max.runtime")

TICK = 0.02
"""Seconds between two inspections."""
_QUIET_TICKS = 50
"""Inspections without a run before the thread sleeps."""


class ExecutionInterrupted(RuntimeError):
    """An execution ended early because an event was set; see :func:`max.engine.interrupt_on`.

    The contents of its outputs and buffers are undefined; later executions are not affected.
    """

    __module__ = "max.engine"


class Interruptible(Protocol):
    """The part of a pool that the thread uses."""

    def run_number(self) -> int:
        """Twice the runs begun, less 1 during a run."""
        ...

    def caller(self) -> int:
        """The `threading.get_ident` of the thread that began the last run."""
        ...

    def nudge(self, run: int, check_signals: bool, interrupt: bool) -> None:
        """Makes the workers of a run call ``max_poll``; does nothing if the run is over."""
        ...


class InterruptWatch:
    """The pools that a thread inspects, and the events that end executions of a thread."""

    def __init__(self) -> None:
        self._pools: weakref.WeakSet[Interruptible] = weakref.WeakSet()
        self._events: dict[int, list[threading.Event]] = {}
        self._lock = reentrant_lock()
        self.reset_thread()

    def reset_thread(self) -> None:
        """Drops the thread, which a forked child does not have."""
        self.awake = False
        """Whether the thread is awake; a run that starts wakes it otherwise."""
        self._thread: DaemonThread | None = None
        self._wake = threading.Lock()
        """Released to wake the thread, which sleeps in `acquire`. A signal handler may release it inside a release."""
        self._wake.acquire()

    def add_event(self, thread: int, event: threading.Event) -> None:
        """Makes executions of a thread end when an event is set."""
        with self._lock:
            # a new list each time: the inspecting thread reads without the lock
            self._events[thread] = [*self._events.get(thread, ()), event]

    def remove_event(self, thread: int, event: threading.Event) -> None:
        """Ends what `add_event` began."""
        with self._lock:
            remaining = list(self._events[thread])
            remaining.remove(event)
            if remaining:
                self._events[thread] = remaining
            else:
                del self._events[thread]

    def is_interrupted(self, thread: int) -> bool:
        """Whether an event of a thread is set."""
        # without the lock, as `add_event` allows
        events = self._events
        return bool(events) and any(event.is_set() for event in events.get(thread, ()))

    def watch(self, pool: Interruptible) -> None:
        """Inspects a pool from now on, as long as it exists."""
        with self._lock:
            self._pools.add(pool)

    def wake(self) -> None:
        """Wakes the thread; called when a run starts while `awake` is false."""
        with self._lock:
            with contextlib.suppress(RuntimeError):  # it is awake
                self._wake.release()
            if self._thread is None or not self._thread.is_alive():
                self._thread = DaemonThread(self._inspect, name="max interrupts")
                try:
                    self._thread.start()
                except (
                    RuntimeError
                ):  # the system refused a thread, or the interpreter is shutting down
                    logger.debug("executions cannot be interrupted: no thread", exc_info=True)
                    self._thread = None
            self.awake = True

    def _inspect(self) -> None:
        """The thread: inspects the pools, and sleeps after `_QUIET_TICKS` inspections without a run."""
        seen: weakref.WeakKeyDictionary[Interruptible, int] = weakref.WeakKeyDictionary()
        quiet = 0
        while True:
            time.sleep(TICK)
            if self._look(seen):
                quiet = 0
                self.awake = True
                continue
            quiet += 1
            if quiet == _QUIET_TICKS:
                # from now on runs wake the thread; the next ticks still see a run that read `awake` before
                self._wake.acquire(blocking=False)
                self.awake = False
            elif quiet > _QUIET_TICKS + 5:
                self._wake.acquire()
                quiet = 0

    def _look(self, seen_runs: weakref.WeakKeyDictionary[Interruptible, int]) -> bool:
        """Nudges runs that the last inspection saw too; returns whether anything ran since."""
        ran = False
        main = threading.main_thread().ident
        with self._lock:
            pools = list(self._pools)
        for pool in pools:
            run, before = pool.run_number(), seen_runs.get(pool, 0)
            seen_runs[pool] = run
            # odd numbers are runs in progress
            ran |= run != before or run % 2 == 1
            if run % 2 == 1 and run == before:
                caller = pool.caller()
                pool.nudge(run, caller == main, self.is_interrupted(caller))
        return ran


WATCH = InterruptWatch()
"""The watch of this process."""
in_child(WATCH.reset_thread)


@contextmanager
def interrupt_on(event: threading.Event) -> Generator[None]:
    """Makes executions of this thread in a ``with`` block end when an event is set.

    An execution that runs when another thread sets the event ends within a tenth of a second and raises
    :class:`ExecutionInterrupted`, unless it completes earlier. This includes endless loops and kernels in a deadlock.
    Blocks may be nested; each event ends executions. ::

        stop = threading.Event()
        with interrupt_on(stop):
            outputs = model.execute(x)     # stop.set() in another thread

    Ctrl-C needs no such block: it ends executions of the main thread with ``KeyboardInterrupt``.

    Args:
        event: The event.

    Raises:
        TypeError: ``event`` is not a `threading.Event`.
    """
    if not isinstance(event, threading.Event):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"interrupt_on: got {type(event).__name__}, expected a threading.Event")
    thread = threading.get_ident()
    WATCH.add_event(thread, event)
    try:
        yield
    finally:
        WATCH.remove_event(thread, event)


def check_interrupt() -> None:
    """Checks the events of this thread, between the segments of an execution.

    Raises:
        ExecutionInterrupted: An event is set.
    """
    if WATCH.is_interrupted(threading.get_ident()):
        raise ExecutionInterrupted("the execution was interrupted: its event is set")
