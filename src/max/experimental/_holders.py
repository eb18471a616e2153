"""Tensors that were recorded and not computed."""

# the cells of tensors are read directly
# pyright: reportPrivateUsage=false

from __future__ import annotations

import threading
from typing import Any
from weakref import ref

from max.experimental._cells import Cell

__all__ = ["LOCK", "hold", "held"]

LOCK = threading.RLock()
"""Guards what was recorded: held while calls are collected and run."""
_LEAST = 4096
"""The number of holders from which on those that are gone or computed are removed."""

_holders: list[ref[Any]] = []
_most = _LEAST


def hold(cell: Cell, tensor: Any) -> None:
    """Notes that a tensor is on a cell that is not computed, so that a run which comes by keeps its value."""
    global _most
    holder = cell.holder = ref(tensor)
    _holders.append(holder)
    if len(_holders) > _most:
        with LOCK:
            _holders[:] = [ref(tensor) for tensor in held()]
            _most = max(_LEAST, 2 * len(_holders))


def held() -> list[Any]:
    """The tensors that are not computed, but for those of replays that go on."""
    tensors = [holder() for holder in list(_holders)]
    return [tensor for tensor in tensors if tensor is not None and tensor._cell.storage is None]
