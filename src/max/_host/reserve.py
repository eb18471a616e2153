"""Memory whose pages a thread requests from the system before the memory is used.

At the first write to a page the system finds and clears memory for it. For the packed weights of a model this takes
longer than writing them. It needs only their size, so it can run while the model is compiled.
"""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from max._host import host_memory
from max._host.machine import usable_cpus
from max._host.threads import DaemonThread

__all__ = ["LEAST_BYTES", "SPARE_BYTES", "STEP_BYTES", "Reserve"]

LEAST_BYTES = 128 << 20
"""The least size of a block that is worth a thread."""
SPARE_BYTES = 64 << 20
"""Bytes at the end that are not touched: the compiler needs about as many, so that the peak of a load does not grow."""
STEP_BYTES = 16 << 20
"""The bytes that are touched between two checks whether the block is taken; on slow machines they take 50 ms."""


class Reserve:
    """A block of memory whose pages a thread touches from the first on, until the block is taken.

    The thread leaves out the last `SPARE_BYTES`. With only one core, or less than `LEAST_BYTES`, there is no thread.

    Args:
        num_bytes: The expected size. The block that is taken may be smaller, or greater by an eighth.
    """

    def __init__(self, num_bytes: int) -> None:
        self._block: npt.NDArray[np.uint8] | None = None
        self._stopped = False
        self._thread: DaemonThread | None = None
        self.touched = 0
        """The bytes at the start of the block that are touched so far."""
        if num_bytes < LEAST_BYTES or usable_cpus() < 2:
            return
        try:
            # pages that are not touched cost nothing
            self._block = host_memory.allocate(num_bytes + num_bytes // 8, host_memory.HUGE_PAGE)
            self._thread = DaemonThread(self._touch, num_bytes - SPARE_BYTES, name="max memory")
            self._thread.start()
        except (MemoryError, RuntimeError):  # `take` reports a lack of memory
            self._block = self._thread = None

    def _touch(self, num_bytes: int) -> None:
        """Writes to the pages of the first `num_bytes` bytes in steps, until the block is taken."""
        assert self._block is not None
        start = self._block.ctypes.data
        while self.touched < num_bytes and not self._stopped:
            step = min(STEP_BYTES, num_bytes - self.touched)
            ctypes.memset(start + self.touched, 0, step)  # without Python's lock
            self.touched += step

    def take(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """A block of memory with undefined contents, aligned to cache lines; ends the thread.

        The block is the reserved one if that is large enough, once. Touched pages beyond its end are given back.

        Args:
            num_bytes: The size.

        Raises:
            MemoryError: There is no memory.
        """
        block = self._block
        self.close()
        if block is None or block.size < num_bytes:
            return host_memory.allocate(num_bytes)
        if self.touched > num_bytes:
            host_memory.discard(block[num_bytes:])
        return block[:num_bytes]

    def close(self) -> None:
        """Ends the thread, and frees the block if it is not taken."""
        self._stopped = True
        if self._thread is not None:
            self._thread.join()
        self._thread = self._block = None
