"""Read-only memory that tensors share until one of them is written: copy on write."""

from __future__ import annotations

import ctypes
import weakref
from typing import Protocol, cast

from max._host.reentry import reentrant_lock
from max.driver._memory import ALIGNMENT, Memory, allocate
from max.dtype import DType

__all__ = ["SharedMemory"]

_lock = reentrant_lock()


class _Sharer(Protocol):
    """A tensor."""

    _ptr: int
    _owner: object
    _read_only: bool


class _Lease:
    """Lives as long as an array that reads the memory."""

    __slots__ = ("__weakref__", "memory")

    def __init__(self, memory: SharedMemory) -> None:
        self.memory = memory


class SharedMemory:
    """Read-only memory of the host: that of a read-only array, or of a mapped file.

    The first write to a tensor copies the memory, and moves all tensors that share it to the copy, so that they go on
    sharing. The array and the file keep their elements. The copy holds the memory before, as executions may be reading
    it.

    Args:
        start: The address of the first byte.
        nbytes: The size.
        owner: Keeps the memory alive.
    """

    __slots__ = ("_copy", "_fixed", "_leases", "_tensors", "nbytes", "owner", "start")

    def __init__(self, start: int, nbytes: int, owner: object) -> None:
        self.start, self.nbytes, self.owner = start, nbytes, owner
        self._tensors: weakref.WeakSet[_Sharer] = weakref.WeakSet()
        self._leases: list[weakref.ref[_Lease]] = []
        self._copy: Memory | None = None
        self._fixed = False

    def add(self, tensor: _Sharer) -> None:
        """Adds a tensor on the memory."""
        with _lock:
            if self._copy is None:
                self._tensors.add(tensor)
            else:  # another thread copied the memory
                self._move(tensor)

    def lease(self) -> object:
        """An owner for an array on the memory; while it lives, the memory cannot be copied."""
        lease = _Lease(self)
        with _lock:
            self._leases = [each for each in self._leases if each() is not None]
            self._leases.append(weakref.ref(lease))
        return lease

    def fix(self) -> None:
        """Keeps the tensors where they are, as a program holds their address: writes are errors from now on."""
        self._fixed = True

    def separate(self, tensor: _Sharer) -> None:
        """Moves all tensors to a copy of the memory.

        Args:
            tensor: The tensor that is written.

        Raises:
            ValueError: A loaded model or an array reads the memory.
        """
        with _lock:
            # another thread has moved it already
            if not tensor._read_only:  # pyright: ignore[reportPrivateUsage]
                return
            if self._fixed:
                raise ValueError(
                    "Tensor: the memory is read-only and a loaded model reads it; write to a copy()"
                )
            if any(each() is not None for each in self._leases):
                raise ValueError(
                    "Tensor: the memory is read-only and an array of to_numpy() or DLPack reads it; write to a copy()"
                )
            # views were aligned by their addresses
            shift = self.start % ALIGNMENT
            memory = allocate("Tensor", DType.uint8, (self.nbytes + shift,), zero=False)
            ctypes.memmove(memory.ptr + shift, self.start, self.nbytes)
            copy = Memory(memory.ptr + shift, (memory.owner, self.owner))
            if self._copy is None:  # a signal handler may have made one
                self._copy = copy
            for each in list(self._tensors):
                self._move(each)
            self._tensors.clear()

    def _move(self, tensor: _Sharer) -> None:
        copy = cast("Memory", self._copy)
        if tensor._read_only:  # pyright: ignore[reportPrivateUsage]
            ptr = tensor._ptr + copy.ptr - self.start  # pyright: ignore[reportPrivateUsage]
            # one statement without a call: a signal handler finds the tensor moved or not
            tensor._owner, tensor._ptr, tensor._read_only = copy.owner, ptr, False  # pyright: ignore[reportPrivateUsage]
