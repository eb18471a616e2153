"""What a tensor is: its type and its memory. Nothing here computes it."""

# the cells of tensors are read directly
# pyright: reportPrivateUsage=false

from __future__ import annotations

import importlib
import math
from types import ModuleType
from typing import TypeVar

from max import driver
from max.driver import Device
from max.dtype import DType
from max.experimental.programs.lazy_values import Cell
from max.graph import BufferValue, Shape, TensorType, TensorValue

__all__ = ["Properties", "handed_out"]

_Export = TypeVar("_Export")


def handed_out(cell: Cell, export: _Export) -> _Export:
    """Drops copies of a cell's elements, as others may write to its memory from now on.

    Args:
        cell: The cell.
        export: The object that gives access to the memory; returned. It must exist before the call.
    """
    cell.drop_copies()
    return export


class Properties:
    """The properties of `Tensor`; a base of it."""

    __slots__ = ()

    _cell: Cell | None
    """A tensor that is recorded or computed; None for a value of a graph."""
    _value: BufferValue | TensorValue | None
    """The value of a graph that is being built; None for the others."""

    def _graph_value(self) -> BufferValue | TensorValue:
        assert self._value is not None
        return self._value

    @property
    def type(self) -> TensorType:
        """Its shape, dtype and device."""
        if self._cell is not None:
            type_ = self._cell.type
            return TensorType(type_.dtype, type_.shape, type_.device)
        type_ = self._graph_value().type
        return type_.as_tensor() if not isinstance(type_, TensorType) else type_

    @property
    def shape(self) -> Shape:
        """The dimensions."""
        return Shape(self._cell.type.dims) if self._cell is not None else self.type.shape

    @property
    def dtype(self) -> DType:
        """The element type."""
        return self._cell.type.dtype if self._cell is not None else self.type.dtype

    @property
    def rank(self) -> int:
        """The number of dimensions."""
        return len(self._cell.type.shape) if self._cell is not None else self.type.rank

    @property
    def device(self) -> Device:
        """The device that it is on."""
        ref = self._cell.type.device if self._cell is not None else self.type.device
        return ref.to_device()

    def num_elements(self) -> int:
        """The number of elements."""
        count = 1
        for dim in self.shape:
            count *= int(dim)
        return count

    @property
    def real(self) -> bool:
        """Whether it is computed."""
        return self._cell is not None and self._cell.storage is not None

    @property
    def storage(self) -> driver.Tensor | None:
        """The memory of a tensor that is computed; else None."""
        cell = self._cell
        return None if cell is None else handed_out(cell, cell.storage)

    @property
    def driver_tensor(self) -> driver.Tensor:
        """The memory of a tensor that is computed.

        Raises:
            TypeError: It is not; see :attr:`realize`.
        """
        storage = self.storage
        if storage is None:
            raise TypeError("the tensor is not computed yet: realize it first")
        return storage

    def __array_namespace__(self, *, api_version: str | None = None) -> ModuleType:
        """The functions of the Python array API standard on tensors: `max.experimental.array_api`.

        Args:
            api_version: The version of the standard; None for the newest here.

        Raises:
            ValueError: Another version.
        """
        namespace = importlib.import_module("max.experimental.array_api")
        newest = namespace.__array_api_version__
        if api_version not in (None, "2021.12", "2022.12", "2023.12", newest):
            raise ValueError(
                f"__array_namespace__: version {api_version!r}, expected {newest!r} or an earlier one"
            )
        return namespace

    @property
    def ndim(self) -> int:
        """The number of dimensions; :attr:`rank` by the name of the array API standard."""
        return self.rank

    @property
    def size(self) -> int:
        """The number of elements; :meth:`num_elements` by the name of the array API standard."""
        return math.prod(int(dim) for dim in self.shape)
