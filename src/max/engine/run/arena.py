"""Arenas: the memory for the temporary buffers of programs."""

from __future__ import annotations

import weakref
from typing import NamedTuple

from max._backends import Backend
from max._compiler.program.code import ALIGNMENT
from max._host.reentry import reentrant_lock
from max.engine.run.output_memory import LEAST_KEPT, trim_all, under_pressure

__all__ = ["Arena", "ArenaBlock", "arena_of"]

MOST_SPARE = 2
"""The number of blocks that are kept for programs with several segments."""


class ArenaBlock(NamedTuple):
    """The memory of a segment.

    Args:
        address: Its address.
        owner: Keeps the memory alive.
        size: Its size; 0: it is not used again.
    """

    address: int
    owner: object
    size: int


class Arena:
    """Memory for temporary buffers. All programs of a queue share it, since they run one at a time.

    Args:
        backend: The device of the memory.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._memory = self._make(ALIGNMENT)
        self._spare: list[ArenaBlock] = []  # the newest one last

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

    def separate(self, size: int, holes: tuple[int, ...] = ()) -> ArenaBlock:
        """Memory of its own, for a program with several segments: other programs may run between them.

        It is new, or was given back: fresh memory costs a page fault every few KiB.

        Args:
            size: The number of bytes.
            holes: As for `take`.
        """
        while not holes:
            try:
                # the thread that pops a block owns it
                block = self._spare.pop()
            except IndexError:
                break
            if block.size >= size:
                return block
            # too small: a greater one takes its place
        memory = self._backend.allocate(max(size, 1), holes)
        return ArenaBlock(memory.address, memory.owner, 0 if holes else size)

    def give_back(self, block: ArenaBlock) -> None:
        """Keeps the memory of a segment for further ones, unless it is small or little memory is left.

        Args:
            block: The memory, which nothing uses any more.
        """
        if block.size >= LEAST_KEPT and not under_pressure(block.size):
            self._spare.append(block)
            del self._spare[:-MOST_SPARE]

    def trim(self) -> None:
        """Frees the memory; a run in progress holds the owner of its memory."""
        self._spare.clear()
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
