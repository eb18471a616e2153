"""The registry of tensors that are recorded and not yet computed."""

# the cells of tensors are read directly
# pyright: reportPrivateUsage=false

from __future__ import annotations

from typing import Any
from weakref import ref

from max._host.reentry import LockLevel, hold_lock, reentrant_lock
from max.experimental.programs.lazy_values import Cell

__all__ = ["LOCK", "PENDING", "PendingTensors"]

LOCK = reentrant_lock(LockLevel.EAGER)
"""Guards the recorded calls: held while they are collected and run. Functions that take it are `locked`."""


class PendingTensors:
    """Weak references to the tensors that are recorded and not yet computed."""

    LEAST = 4096
    """The references are pruned when there are more: those of freed and computed tensors are removed."""

    def __init__(self) -> None:
        self._references: list[ref[Any]] = []
        self._most = self.LEAST

    def add(self, cell: Cell, tensor: object) -> None:
        """Registers the tensor on a cell that is not computed, so that the next run keeps the cell's value."""
        reference = cell.tensor_reference = ref(tensor)
        self._references.append(reference)
        if len(self._references) > self._most:
            self._prune()

    @hold_lock(LOCK)
    def _prune(self) -> None:
        self._references[:] = [ref(tensor) for tensor in self.alive()]
        self._most = max(self.LEAST, 2 * len(self._references))

    def alive(self) -> list[Any]:
        """The tensors that are not computed, except those of unfinished replays."""
        tensors = [reference() for reference in list(self._references)]
        return [tensor for tensor in tensors if tensor is not None and tensor._cell.storage is None]


PENDING = PendingTensors()
