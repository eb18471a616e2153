"""Finds out by reference counts whether only this package can write to the memory of an eager tensor.

Arrays, views, DLPack capsules and driver tensors hold a reference to the object that owns the memory. If all of its
references are accounted for here, no such object exists.
"""

# the owners of memory are read directly
# pyright: reportPrivateUsage=false

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from max import driver
from max.driver._shared_memory import SharedMemory
from max.dtype import DType
from max.engine.run.output_memory import kept_blocks
from max.experimental.programs.lazy_values import Cell
from max.experimental.programs.value_types import type_of

__all__ = ["owned_cells"]


def owned_cells(cells: Sequence[Cell]) -> list[bool]:
    """For each cell, whether only these cells, and programs that read, can reach its memory.

    Memory of immutable `bytes` counts as owned, memory from DLPack never does: its producer has more references.

    Args:
        cells: Tensors in memory. The caller holds no other reference to their storages.
    """
    kept = kept_blocks()
    results = [_is_owned(cell, kept) for cell in cells]
    # if a model's outputs released a block meanwhile, its count may hide a foreign reference
    after = kept_blocks()
    return [
        result and kept.get(block, 0) == after.get(block, 0)
        for result, block in zip(results, map(_owner_id, cells), strict=True)
    ]


def _owner_id(cell: Cell) -> int:
    assert cell.storage is not None
    return id(cell.storage._owner)


def _is_owned(cell: Cell, kept_counts: dict[int, int]) -> bool:
    storage = cell.storage
    if storage is None or not storage.is_host:
        return False
    owner: Any = storage._owner
    if isinstance(owner, SharedMemory):
        owner = owner.owner
    if type(owner) is not np.ndarray:
        return False
    immutable = _is_immutable(owner)
    if not immutable and (
        owner.base is not None or not owner.flags.owndata or weakref.getweakrefcount(owner)
    ):
        return False
    of_storage, of_owner = cell.references()
    block = id(owner)
    del storage, owner
    on_storage, on_owner = _references(cell)
    if on_storage - _ONCE[0] != of_storage:
        return False
    return immutable or on_owner - _ONCE[1] == of_owner + kept_counts.get(block, 0)


def _is_immutable(array: object) -> bool:
    base = array
    while type(base) is np.ndarray:
        base = base.base
    return type(base) is bytes


def _references(cell: Cell) -> tuple[int, int]:
    """The reference counts of a cell's storage and of the owner of its memory, with the references of this frame."""
    storage = cell.storage
    assert storage is not None
    owner = storage._owner
    return sys.getrefcount(storage), sys.getrefcount(owner)


def _sole() -> tuple[int, int]:
    """The same counts for a storage that only its cell refers to."""
    storage = driver.Tensor(DType.uint8, (1,))
    cell = Cell(type_of(storage), storage)
    del storage
    return _references(cell)


_ONCE = _sole()
