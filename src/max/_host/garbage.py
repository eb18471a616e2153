"""Fewer passes of Python's garbage collector while a model is compiled.

The collector visits young objects after 700 new ones, and all objects several times in a compilation. A compiler's
objects live on, or are freed by reference counts: of 140,000 objects after the start of a decoder, the collector found
900 to be garbage, and took a sixth of the start's time.
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager

from max._host.reentry import reentrant_lock

__all__ = ["MOST_NEW", "rare_collections"]

MOST_NEW = 200_000
"""The number of new objects that start a collection while collections are rare: some tens of MB of garbage at most."""


class _Collector:
    """The blocks in which collections are rare, and the thresholds to restore after the last one."""

    def __init__(self) -> None:
        self._lock = reentrant_lock()
        self._running = 0
        self._before: tuple[int, int, int] | None = None
        """The thresholds to restore; None if they were not changed."""
        self._has_frozen = False
        """Whether the program has frozen objects, which would be thawed."""

    def enter(self) -> None:
        """Begins a block."""
        with self._lock:
            self._running += 1
            thresholds = gc.get_threshold()
            if self._running == 1 and 0 < thresholds[0] < MOST_NEW:
                self._before = thresholds
                gc.set_threshold(MOST_NEW, *thresholds[1:])

    def leave(self, keep: bool) -> None:
        """Ends a block."""
        with self._lock:
            self._running -= 1
            if keep and gc.isenabled() and not self._has_frozen:
                # the count visits each of them: it is not asked again when there are some
                self._has_frozen = gc.get_freeze_count() > 0
                if not self._has_frozen:
                    gc.freeze()
                    gc.unfreeze()
            if self._running == 0 and self._before is not None:
                if gc.get_threshold()[0] == MOST_NEW:
                    gc.set_threshold(*self._before)
                self._before = None


_collector = _Collector()


@contextmanager
def rare_collections(keep: bool = False) -> Generator[None]:
    """Makes collections rare in a ``with`` block, or in a function that it decorates; on all threads.

    A collector that is off stays off, and thresholds that are higher, or that change meanwhile, stay as they are.

    Args:
        keep: Whether the objects at the end count as old without being visited, for a block whose objects live long,
            and that a process runs a few times. Garbage among them stays until the next collection of old objects.
    """
    _collector.enter()
    try:
        yield
    finally:
        _collector.leave(keep)
