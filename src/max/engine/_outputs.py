"""Memory for the outputs of a model, taken again when nobody holds it any more.

Fresh memory from the system costs a page fault every few KiB or MiB, for large outputs more than computing them.
"""

# tensors are made directly: the checks of the constructor would cost as much as the rest
# pyright: reportPrivateUsage=false
from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from max.driver import Device, Tensor
from max.driver._memory import ALIGNMENT, address
from max.dtype import DType

__all__ = ["OutputMemory"]

LEAST = 64 << 10
"""Bytes from which on memory is kept; below, the allocator of the process is fast."""
KEPT = 2
"""Blocks that are kept for an output: a loop holds the last result while the next one is computed."""
WASTE = 4
"""A block at most so many times too large is used."""


class OutputMemory:
    """The newest blocks of each output of a model.

    Args:
        count: How many outputs there are.
    """

    def __init__(self, count: int) -> None:
        self._kept: list[list[npt.NDArray[np.uint8]]] = [[] for _ in range(count)]

    def tensor(self, index: int, dtype: DType, shape: tuple[int, ...], device: Device) -> Tensor:
        """A tensor for an output, not initialised, in memory that nothing else holds.

        Args:
            index: Which output.
            dtype: Its element type.
            shape: Its shape.
            device: Where it is.

        Raises:
            MemoryError: There is not as much memory.
        """
        nbytes = math.prod(shape) * dtype.size_in_bytes
        if nbytes < LEAST:
            return Tensor._empty(dtype, shape, device)
        block = self._free_block(self._kept[index], nbytes)
        if block is None:
            tensor = Tensor._empty(dtype, shape, device)
            owner: Any = tensor._owner
            kept = self._kept[index]
            kept.append(owner)
            del kept[:-KEPT]
            return tensor
        start = -(-address(block) // ALIGNMENT) * ALIGNMENT
        return Tensor._wrap(start, dtype, shape, owner=block, target=device)

    def _free_block(
        self, kept: list[npt.NDArray[np.uint8]], nbytes: int
    ) -> npt.NDArray[np.uint8] | None:
        for _ in range(len(kept)):
            try:
                # who takes it out of the list decides about it: several threads may run a model
                block = kept.pop(0)
            except IndexError:
                return None
            free = sys.getrefcount(block) == 2  # this frame's and the call's
            if free and not nbytes <= block.size - ALIGNMENT <= WASTE * nbytes:
                continue  # of another size: given back
            kept.append(block)
            if free:
                return block
        return None
