"""The registry of tensors that are recorded and not yet computed."""

# the cells of tensors are read directly
# pyright: reportPrivateUsage=false

from __future__ import annotations

from typing import Any
from weakref import ref

from max._reentry import LockLevel, locked, reentrant_lock
from max.experimental.programs.lazy_values import Cell

__all__ = ["LOCK", "hold", "held"]

LOCK = reentrant_lock(LockLevel.EAGER)
"""Guards the recorded calls: held while they are collected and run. Functions that take it are `locked`."""
_LEAST = 4096
"""The registry is pruned when it has more entries: freed and computed tensors are removed."""

_holders: list[ref[Any]] = []
_most = _LEAST


def hold(cell: Cell, tensor: object) -> None:
    """Registers the tensor on a cell that is not computed, so that the next run keeps the cell's value."""
    holder = cell.holder = ref(tensor)
    _holders.append(holder)
    if len(_holders) > _most:
        _prune()


@locked(LOCK)
def _prune() -> None:
    global _most
    _holders[:] = [ref(tensor) for tensor in held()]
    _most = max(_LEAST, 2 * len(_holders))


def held() -> list[Any]:
    """The tensors that are not computed, except those of unfinished replays."""
    tensors = [holder() for holder in list(_holders)]
    return [tensor for tensor in tensors if tensor is not None and tensor._cell.storage is None]
