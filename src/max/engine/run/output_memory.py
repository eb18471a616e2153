"""Memory for the outputs of a model, reused after its last tensor is released.

Fresh memory costs a page fault every few KiB or MiB, which for large outputs exceeds the time to compute them.
"""

# tensors are made directly: the checks of the constructor would cost as much as the rest
# pyright: reportPrivateUsage=false
from __future__ import annotations

import ctypes
import logging
import math
import sys
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from max._host import guard, host_memory
from max._host.machine import SystemMemory, system_memory
from max._host.reentry import reentrant_lock
from max.driver import Device, Tensor
from max.driver._memory import ALIGNMENT, NO_CHARS, Array, address, allocate_bytes
from max.dtype import DType

__all__ = ["OutputMemory", "kept_blocks", "trim_all", "under_pressure"]

logger = logging.getLogger("max.engine")

_BYTES = np.dtype(np.uint8)
LEAST_KEPT = 64 << 10
"""The minimum size of a kept block; the process' allocator is fast for smaller ones."""
KEPT_PER_OUTPUT = 2
"""The number of blocks kept per output: a loop holds the last result while it computes the next one."""
MOST_WASTE = 4
"""The maximum ratio between a block and an output that reuses it."""
LEAST_CHECKED = 1 << 20
"""The minimum size of a fresh block for which free memory is checked."""
LEFT_SHARE = 0.1
"""The minimum share of free memory for blocks to be kept."""
FRESH_SECONDS = 0.05
"""The time for which a reading of free memory is valid."""
KEPT_SHARE = 0.25
"""The maximum share of memory for the blocks of all models."""


class OutputMemory:
    """The newest blocks of each output of a model.

    Args:
        outputs: The dtype and device of each output.
        guarded: Whether each block is fresh and between guard pages.
    """

    def __init__(self, outputs: Sequence[tuple[DType, Device]], guarded: bool = False) -> None:
        self._guarded = guarded
        # looked up once: properties take longer than an allocation
        self._outputs = [
            (dtype, dtype.size_in_bytes, device, device.default_stream, device.memory.addressable)
            for dtype, device in outputs
        ]
        self._numpy = [
            (
                dtype.to_numpy() if device.memory.addressable and not guarded else None,
                dtype.size_in_bytes,
            )
            for dtype, device in outputs
        ]
        """The NumPy dtypes of outputs whose small blocks may be arrays, and their sizes."""
        self._kept: list[list[npt.NDArray[np.uint8]]] = [[] for _ in outputs]
        _process.add(self)

    def trim(self) -> None:
        """Frees the blocks that no tensor uses, and stops tracking the others."""
        for kept in self._kept:
            kept.clear()

    def kept_bytes(self) -> int:
        """The total size of all blocks, used or not."""
        return sum(block.size for kept in self._kept for block in list(kept))

    def tensor(self, index: int, shape: tuple[int, ...]) -> Tensor:
        """An uninitialized tensor for an output, in memory that nothing else uses.

        Args:
            index: The index of the output.
            shape: Its shape.

        Raises:
            MemoryError: The device is out of memory.
        """
        dtype, itemsize, device, stream, addressable = self._outputs[index]
        if not addressable:
            return Tensor._empty(dtype, shape, device)
        nbytes = math.prod(shape) * itemsize
        if self._guarded:
            memory = guard.allocate(nbytes)
            return Tensor._wrap(address(memory), dtype, shape, owner=memory, target=device)
        if nbytes < LEAST_KEPT:
            return Tensor._over(allocate_bytes(nbytes), dtype, shape, device, stream)
        block = self._free_block(self._kept[index], nbytes)
        if block is None:
            return self._fresh(index, dtype, shape, device, nbytes)
        start = -(-address(block) // ALIGNMENT) * ALIGNMENT
        return Tensor._wrap(start, dtype, shape, owner=block, target=device)

    def arrays(self, shapes: Sequence[tuple[int, ...]]) -> tuple[list[int], list[Array]]:
        """The addresses of `tensor`'s memory for all outputs, and NumPy arrays of it.

        Args:
            shapes: The shapes of the outputs.

        Raises:
            MemoryError: The device is out of memory.
        """
        pointers: list[int] = []
        arrays: list[Array] = []
        for index, shape in enumerate(shapes):
            numpy, itemsize = self._numpy[index]
            nbytes = math.prod(shape) * itemsize
            if numpy is None or nbytes >= LEAST_KEPT:
                tensor = self.tensor(index, shape)
                pointers.append(tensor._ptr)
                arrays.append(tensor.to_numpy())
                continue
            memory: Any = np.empty(nbytes + ALIGNMENT, _BYTES)
            start = ctypes.addressof(NO_CHARS.from_buffer(memory))
            offset = -start % ALIGNMENT
            pointers.append(start + offset)
            arrays.append(np.ndarray(shape, numpy, memory, offset))
        return pointers, arrays

    def _fresh(
        self, index: int, dtype: DType, shape: tuple[int, ...], device: Device, nbytes: int
    ) -> Tensor:
        """A tensor in a new block, which is kept unless little memory is left."""
        crowded = nbytes >= LEAST_CHECKED and under_pressure(nbytes)
        if crowded:
            trim_all()
        try:
            tensor = Tensor._empty(dtype, shape, device)
        except MemoryError:
            trim_all()
            return Tensor._empty(dtype, shape, device)
        if not crowded:
            owner: Any = tensor._owner
            kept = self._kept[index]
            kept.append(owner)
            # the oldest ones are not kept
            del kept[:-KEPT_PER_OUTPUT]
        return tensor

    def _free_block(
        self, kept_blocks: list[npt.NDArray[np.uint8]], nbytes: int
    ) -> npt.NDArray[np.uint8] | None:
        """A kept block of a fitting size that no tensor uses, else None; drops free blocks of other sizes."""
        for _ in range(len(kept_blocks)):
            try:
                # the thread that pops a block owns it: several threads may run a model
                block = kept_blocks.pop(0)
            except IndexError:
                return None
            free = sys.getrefcount(block) == 2  # this frame's and the call's
            if free and not nbytes <= block.size - ALIGNMENT <= MOST_WASTE * nbytes:
                continue  # of another size: not put back, and so freed
            kept_blocks.append(block)
            if free:
                return block
        return None


class KeptBlocks:
    """The blocks that the models of a process keep, and a reading of the free memory."""

    def __init__(self) -> None:
        self._memories: weakref.WeakSet[OutputMemory] = weakref.WeakSet()
        self._lock = reentrant_lock()
        self._free, self._read_s = SystemMemory(math.inf, math.inf), -math.inf

    def add(self, memory: OutputMemory) -> None:
        """Counts the blocks of a model from now on, as long as it exists."""
        with self._lock:
            self._memories.add(memory)

    def memories(self) -> list[OutputMemory]:
        """The memories of all models."""
        with self._lock:
            return list(self._memories)

    def under_pressure(self, nbytes: int) -> bool:
        """See `under_pressure`."""
        now = time.monotonic()
        if now - self._read_s > FRESH_SECONDS:
            self._free, self._read_s = system_memory(), now
        free = self._free
        if free.available - nbytes < LEFT_SHARE * free.total:
            return True
        kept = sum(each.kept_bytes() for each in self.memories())
        return nbytes + kept > KEPT_SHARE * free.total


_process = KeptBlocks()


def under_pressure(nbytes: int) -> bool:
    """Whether a block of this size should not be kept: little memory is free, or the limit is reached.

    Args:
        nbytes: The size of the block.
    """
    return _process.under_pressure(nbytes)


def kept_blocks() -> dict[int, int]:
    """How often each block is kept for further outputs, by the identity of the block."""
    memories = _process.memories()
    return Counter([id(block) for each in memories for kept in each._kept for block in kept])


def trim_all() -> None:
    """Frees the unused output blocks of all models."""
    logger.debug("little memory is left: blocks that were kept for outputs are freed")
    for each in _process.memories():
        each.trim()
    host_memory.release_free_memory()
