"""Element access of tensors: as NumPy arrays, by index, and writes with broadcasting."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

from max.driver._arguments import HOST, writable_value
from max.driver._indexing import Index, apply_index
from max.driver._memory import Array, Memory, address, array_at
from max.driver._shared_memory import SharedMemory
from max.driver._strided_memory import StridedMemory

__all__ = ["ElementAccess"]

HOST_MEMORY = HOST.memory


class ElementAccess(StridedMemory):
    """Reads and writes elements; those on other devices through a copy on the host."""

    __slots__ = ()

    def to_numpy(self) -> Array:
        """A NumPy array on the same memory, with ml_dtypes' dtypes for bfloat16 and narrower floats.

        That of read-only memory is read-only, and while it lives the tensor is too.

        Raises:
            ValueError: The tensor is not on the host.
        """
        if not self._device.is_host:
            raise ValueError(
                f"Tensor.to_numpy: the tensor is on {self._device.label}:{self._device.id}; use to(CPU())"
            )
        owner, read_only = self._owner, self._read_only
        # while the array lives, a write to a tensor cannot move the memory
        if isinstance(owner, SharedMemory):
            owner = owner.lease()
        memory = Memory(self._ptr, owner)
        return array_at(memory, self._dtype, self._shape, self._strides, read_only)

    def item(self) -> Any:
        """The value of a tensor of one element, as a Python bool, int or float.

        Raises:
            ValueError: The tensor has another number of elements.
        """
        if self.num_elements != 1:
            raise ValueError(
                f"Tensor.item: expected one element, the shape is {self._shape}; index it first"
            )
        value = self._on_host().to_numpy().reshape(()).item()
        return value if isinstance(value, (bool, int, float)) else float(value)

    def __getitem__(self, index: Index | tuple[Index, ...]) -> Self:
        """A view, by NumPy's basic indexing: integers, slices, ``...`` and ``None``.

        Raises:
            AxisError: There are too many indices, or one is out of range; it is an IndexError and a ValueError.
            TypeError: An index is an array or a mask.
        """
        offset, shape, strides = apply_index(index, self._shape, self.strides)
        return self._derive(self._dtype, shape, strides, offset)

    def __setitem__(self, index: Index | tuple[Index, ...], value: object) -> None:
        """Writes a number, array or tensor into a part of the tensor, with broadcasting.

        Raises:
            ValueError: The shapes do not broadcast, an integer type would lose a fraction, or an array or a loaded
                model reads the memory of a read-only array.
            TypeError: The value is not a number, or its dtype does not convert to the tensor's.
        """
        if not self._shape and index == 0 and type(index) is int:
            # the one element of `Tensor.scalar`, as programs for MAX write it
            index = ()
        self[index]._write(value)

    def _write(self, value: object) -> None:
        """Writes a number, array or tensor into the whole tensor, with broadcasting."""
        self._begin_write()
        if isinstance(value, ElementAccess):
            value = value._on_host().to_numpy()
        if not self._device.is_host:
            self._write_through_host(value)
            return
        array = self.to_numpy()
        value = writable_value(value, self._dtype)
        try:
            array[...] = value
        except ValueError as error:
            raise ValueError(f"Tensor: writing to shape {self._shape}: {error}") from error

    def _on_host(self) -> Self:
        """The tensor itself if it is on the host, else a copy there."""
        if self._device.is_host:
            return self
        start, nbytes = self._span()
        data = self._device.memory.read(start, nbytes)
        ptr = address(data) + self._ptr - start
        return self._wrap(ptr, self._dtype, self._shape, self._strides, data)

    def _write_through_host(self, value: object) -> None:
        """Writes to device memory: elements are converted and broadcast on the host, then copied."""
        # between the elements of a strided tensor lie others, which are written back as they were
        staged = (
            self._on_host()
            if self._strides is not None
            else self._empty(self._dtype, self._shape, HOST)
        )
        staged._write(value)
        start, nbytes = self._span()
        data = HOST_MEMORY.read(staged._span()[0], nbytes)
        self._device.memory.write(start, data)

    def __iter__(self) -> Iterator[Self]:
        """The views along the first axis.

        Raises:
            TypeError: The tensor has rank 0.
        """
        if not self._shape:
            raise TypeError("Tensor: a tensor of rank 0 cannot be iterated over")
        return (self[i] for i in range(self._shape[0]))
