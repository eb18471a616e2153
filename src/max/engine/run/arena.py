"""Arenas: the memory for the temporary buffers of programs."""

from __future__ import annotations

import weakref

from max._backends import Backend
from max._compiler.program.code import ALIGNMENT
from max._reentry import reentrant_lock
from max.engine.run.output_memory import trim_all

__all__ = ["Arena", "arena_of"]


class Arena:
    """Memory for temporary buffers. All programs of a queue share it, since they run one at a time.

    Args:
        backend: The device of the memory.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._memory = self._make(ALIGNMENT)

    def _make(self, size: int) -> tuple[int, object, int]:
        """Allocates a block; returns its address, its owner and its size."""
        block = self._backend.allocate(size)
        return block.address, block.owner, size

    def take(self, size: int, holes: tuple[int, ...] = ()) -> tuple[int, object]:
        """The address of at least `size` bytes, and their owner, which the caller holds until the end of its run.

        Args:
            size: The number of bytes.
            holes: The offsets of guard pages; with them the memory is new.
        """
        if holes:
            return self._backend.allocate(size, holes)
        block = self._memory
        if block[2] < size:
            # other runs may still use the old memory: they hold its owner
            try:
                # grows by half at least, so that rising sizes allocate seldom
                block = self._memory = self._make(max(size, block[2] + block[2] // 2))
            except MemoryError:
                self.trim()
                trim_all()
                block = self._memory = self._make(size)
        return block[0], block[1]

    def fresh(self, size: int, holes: tuple[int, ...] = ()) -> tuple[int, object]:
        """New memory, for a program with several segments: other programs may run between them.

        Args:
            size: The number of bytes.
            holes: As for `take`.
        """
        return self._backend.allocate(max(size, 1), holes)

    def trim(self) -> None:
        """Frees the memory; a run in progress holds the owner of its memory."""
        self._memory = self._make(ALIGNMENT)


class Arenas:
    """The arenas of a process, one for each queue: programs of one queue run one at a time."""

    def __init__(self) -> None:
        self._of_queue: weakref.WeakKeyDictionary[object, Arena] = weakref.WeakKeyDictionary()
        self._lock = reentrant_lock()  # signal handlers may run models

    def of(self, backend: Backend) -> Arena:
        """The arena of a device; sessions on the same queue share it."""
        with self._lock:
            arena = self._of_queue.get(backend.queue)
            if arena is None:
                arena = self._of_queue.setdefault(backend.queue, Arena(backend))
            return arena


_arenas = Arenas()


def arena_of(backend: Backend) -> Arena:
    """The arena of a device in this process."""
    return _arenas.of(backend)
