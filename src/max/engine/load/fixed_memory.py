"""Memory that lives as long as a model: weights, constants, and results computed once."""

# part of the engine: it reads the private fields of tensors
# pyright: reportPrivateUsage=false
from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from max._backends import Backend, Backends
from max._compiler.program.code import ALIGNMENT, Compiled, FixedBuffer
from max._host import guard, host_memory
from max._lazy import lazy_module
from max.driver import Tensor
from max.dtype import DType

if TYPE_CHECKING:
    from max.graph import weights as weight_files
else:
    # the graph layer is imported by callers that stage graphs
    weight_files = lazy_module("max.graph.weights")

__all__ = ["FixedMemory"]

Array = np.ndarray[Any, np.dtype[Any]]


class FixedMemory:
    """The fixed buffers of a model, each in the memory of its device.

    Weights and constants on the CPU are not copied; those of other devices are copied there. With ``MAX_GUARD`` each
    buffer on the CPU lies between guard pages.

    Args:
        compiled: The model.
        backends: The devices of the session.
        weights: The values of the weights.
        constants: The constants by buffer index.
        packed: Returns the results computed once on the CPU, as one array of the size that is its argument; None if
            they are to be computed.
        allocate: Allocates the memory of results that are to be computed.

    Attributes:
        addresses: The address of each buffer.
        is_computed: Whether the results computed once came from ``packed``.
        casts: The weights to cast into reserved memory, by buffer index.
        copies: The constants to copy into reserved memory, as kernels expect whole elements at their places.

    Raises:
        MemoryError: A device is out of memory.
    """

    def __init__(
        self,
        compiled: Compiled,
        backends: Backends,
        weights: Mapping[str, Tensor | weight_files.LaterCast],
        constants: Mapping[int, Array],
        packed: Callable[[int], Array | None] | None = None,
        allocate: Callable[[int], Array] = host_memory.allocate,
    ) -> None:
        self.addresses: list[int] = []
        self.casts: dict[int, weight_files.LaterCast] = {}
        self.copies: dict[int, Array] = {}
        self._owners: dict[int, object] = {}
        on_host = [backends[item.device].shares_host_memory for item in compiled.fixed_buffers]
        # one allocation for results computed once on the CPU, so that it gets huge pages
        sizes = [
            -(-item.bytes // ALIGNMENT) * ALIGNMENT
            for item, host in zip(compiled.fixed_buffers, on_host, strict=True)
            if item.kind == "kept" and host
        ]
        # with guard pages each result has memory of its own
        num_bytes = 0 if compiled.guarded else sum(sizes)
        ready = None if packed is None else packed(num_bytes)
        self.is_computed = ready is not None
        self._kept = allocate(num_bytes) if ready is None else ready
        places = iter(accumulate(sizes, initial=self._kept.ctypes.data))
        for index, item in enumerate(compiled.fixed_buffers):
            if item.kind == "weight":
                value = weights[item.name]
            elif item.kind == "constant":
                value = constants[index]
            else:
                value = None
            if isinstance(value, weight_files.LaterCast):
                # kernels cast into reserved memory, and only on the host
                if on_host[index] and not compiled.guarded:
                    self.casts[index] = value
                    self._reserve(index, item)
                    continue
                value = value.now()
            if not on_host[index]:
                self._on_device(index, item, value, backends[item.device])
            elif compiled.guarded:
                self._owners[index] = block = _guarded_buffer(item, value)
                self.addresses.append(block.ctypes.data)
            elif value is None:
                self.addresses.append(next(places))
            elif isinstance(value, np.ndarray) and not value.flags.aligned:
                self.copies[index] = value
                self._reserve(index, item)
            else:
                self._own(index, value)

    @property
    def owners(self) -> list[object]:
        """The objects that keep the memory alive."""
        return [self._kept, *self._owners.values()]

    @property
    def kept_results(self) -> Array:
        """The results computed once on the CPU."""
        return self._kept

    def release(self, index: int) -> None:
        """Drops the reference to a buffer after its last use.

        Args:
            index: The index of the buffer.
        """
        self._owners.pop(index, None)

    def copy_constant(self, index: int, mapped_files: host_memory.MappedFiles) -> None:
        """Copies a constant into its reserved memory, and releases its pages of a mapped file."""
        source = self.copies.pop(index)
        target: Any = self._owners[index]
        target[: source.nbytes] = source.reshape(-1).view(np.uint8)
        mapped_files.give_back(source.ctypes.data, source.nbytes)

    def _reserve(self, index: int, item: FixedBuffer) -> None:
        """Reserves a buffer on the CPU that is filled later; its pages are not touched yet."""
        self._owners[index] = block = host_memory.allocate(item.bytes)
        self.addresses.append(block.ctypes.data)

    def _own(self, index: int, value: Tensor | Array) -> None:
        """Uses the memory of a value as a buffer on the CPU."""
        if isinstance(value, Tensor):
            value = value._on_host()
            address = value._fixed_address()
        else:
            address = value.ctypes.data
        self._owners[index] = value
        self.addresses.append(address)

    def _on_device(
        self, index: int, item: FixedBuffer, value: Tensor | Array | None, backend: Backend
    ) -> None:
        """A buffer on another device: the tensor's memory if it is there, else a copy."""
        memory = backend.device.memory
        if isinstance(value, Tensor) and backend.holds(value.device):
            self._owners[index] = value
            self.addresses.append(value._ptr)
            return
        block = memory.allocate("load", DType.uint8, (item.bytes,), False)
        if value is not None and item.bytes:
            memory.write(block.ptr, _bytes(value))
        self._owners[index] = block.owner
        self.addresses.append(block.ptr)


def _bytes(value: Tensor | Array) -> Array:
    """The elements of a contiguous value as a uint8 array of the host."""
    if isinstance(value, Tensor):
        array = value._on_host().to_numpy()
    else:
        array = value
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _guarded_buffer(item: FixedBuffer, value: Tensor | Array | None) -> Array:
    """A buffer between guard pages: a copy of the value, or uninitialized memory for a result computed once."""
    return guard.allocate(item.bytes) if value is None else guard.guarded_copy(_bytes(value))
