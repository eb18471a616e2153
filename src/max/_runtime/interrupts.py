"""What ends an execution early: signals that Python handles, and events that other threads set.

A thread looks every :data:`TICK` seconds at the pools. In a run that it finds going on twice it makes
the workers look up (`max_poll` of :mod:`max._runtime.native`). If the run was begun by the main thread,
that one lets Python handle its signals; if it was begun under an event that is set, it ends. Short runs
never notice, and where nothing runs the thread sleeps.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from typing import Protocol

logger = logging.getLogger("max.runtime")

TICK = 0.02
"""Seconds between looks."""
_QUIET_TICKS = 50
"""After that many without a run the thread sleeps."""


class ExecutionInterrupted(RuntimeError):
    """An execution ended early, as an event was set; see :func:`max.engine.interrupt_on`.

    What it wrote to outputs and buffers is undefined; the next execution works.
    """

    __module__ = "max.engine"


class Interruptible(Protocol):
    """What the thread needs of a pool."""

    def run_number(self) -> int:
        """Twice the runs begun, less 1 during a run."""
        ...

    def caller(self) -> int:
        """The thread that began the last run, as `threading.get_ident` has it."""
        ...

    def nudge(self, run: int, check_signals: bool, interrupt: bool) -> None:
        """Makes the workers of a run look up; does nothing where it is over."""
        ...


_pools: weakref.WeakSet[Interruptible] = weakref.WeakSet()
awake = False
"""Whether the thread looks; a run that begins wakes it where it does not."""
_events: dict[int, list[threading.Event]] = {}
_lock = threading.RLock()  # a signal handler may come while the main thread holds it
_wanted = threading.Event()
_thread: threading.Thread | None = None


@contextmanager
def interrupt_on(event: threading.Event) -> Generator[None]:
    """Lets an event end the executions that this thread makes in a ``with`` block.

    An execution that is going on when another thread sets the event ends within a tenth of a second, and raises
    :class:`ExecutionInterrupted`; one that is over sooner is completed. An endless loop, or a kernel that waits
    for workers that never come, ends too. Blocks may be nested: each event counts. ::

        stop = threading.Event()
        with interrupt_on(stop):
            outputs = model.execute(x)     # stop.set() in another thread

    Ctrl-C needs no such block: it ends what the main thread executes with ``KeyboardInterrupt``.

    Args:
        event: The event.

    Raises:
        TypeError: ``event`` is no `threading.Event`.
    """
    if not isinstance(event, threading.Event):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"interrupt_on: got {type(event).__name__}, expected a threading.Event")
    me = threading.get_ident()
    with _lock:
        # a new list each time: the thread that looks reads without the lock
        _events[me] = [*_events.get(me, ()), event]
    try:
        yield
    finally:
        with _lock:
            left = list(_events[me])
            left.remove(event)
            if left:
                _events[me] = left
            else:
                del _events[me]


def check_interrupt() -> None:
    """Raises where an event is set under which this thread runs; for what runs in parts.

    Raises:
        ExecutionInterrupted: One is.
    """
    if _events and _is_set(threading.get_ident()):
        raise ExecutionInterrupted("the execution was interrupted: its event is set")


def _is_set(thread: int) -> bool:
    return any(event.is_set() for event in _events.get(thread, ()))


def watch(pool: Interruptible) -> None:
    """Looks at a pool from now on, as long as it lives."""
    with _lock:
        _pools.add(pool)


def wake() -> None:
    """Makes the thread look; called when a run begins and :data:`awake` is false."""
    global awake, _thread
    with _lock:
        _wanted.set()
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_watch, name="max-interrupts", daemon=True)
            try:
                _thread.start()
            except RuntimeError:  # no thread to be had, or the interpreter is leaving
                logger.debug("executions cannot be interrupted: no thread", exc_info=True)
                _thread = None
        awake = True


def _watch() -> None:
    global awake
    seen: weakref.WeakKeyDictionary[Interruptible, int] = weakref.WeakKeyDictionary()
    quiet = 0
    while True:
        time.sleep(TICK)
        if _look(seen):
            quiet = 0
            awake = True
            continue
        quiet += 1
        if quiet == _QUIET_TICKS:
            # runs wake the thread from now on; one that had looked before is seen in the next ticks
            _wanted.clear()
            awake = False
        elif quiet > _QUIET_TICKS + 5:
            _wanted.wait()
            quiet = 0


def _look(seen: weakref.WeakKeyDictionary[Interruptible, int]) -> bool:
    """Nudges what runs for long; whether anything ran since the last look."""
    ran = False
    main = threading.main_thread().ident
    with _lock:
        pools = list(_pools)
    for pool in pools:
        run, before = pool.run_number(), seen.get(pool, 0)
        seen[pool] = run
        ran |= run != before or run % 2 == 1
        if run % 2 == 1 and run == before:
            caller = pool.caller()
            pool.nudge(run, caller == main, bool(_events) and _is_set(caller))
    return ran


def _after_fork() -> None:
    global awake, _thread, _lock, _wanted
    awake, _thread, _lock, _wanted = False, None, threading.RLock(), threading.Event()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
