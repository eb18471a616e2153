"""Tensors as Python numbers, NumPy arrays, DLPack capsules and text: each computes the tensor first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from max import driver
from max.driver import CPU
from max.dtype import DType
from max.experimental import _recorder
from max.experimental._cells import Cell
from max.graph import BufferValue, Shape, TensorType, TensorValue

__all__ = ["Conversions", "handed_out"]

_Export = TypeVar("_Export")


def handed_out(cell: Cell, export: _Export) -> _Export:
    """Notes that others may write to the memory of a cell from now on.

    Args:
        cell: The cell.
        export: What gives the access, returned as it is. It exists before the call, which counts on that.
    """
    cell.changed()
    return export


class Conversions:
    """The methods of `Tensor` that read its elements."""

    __slots__ = ()

    _cell: Cell | None
    """A tensor that is recorded or computed; None for a value of a graph."""
    _value: BufferValue | TensorValue | None
    """The value of a graph that is being built; None for the others."""

    if TYPE_CHECKING:

        @property
        def type(self) -> TensorType: ...
        @property
        def shape(self) -> Shape: ...
        @property
        def dtype(self) -> DType: ...
        @property
        def rank(self) -> int: ...
        @property
        def real(self) -> bool: ...
        def num_elements(self) -> int: ...

    def _materialize(self) -> driver.Tensor:
        cell = self._cell
        if cell is None:
            raise TypeError(
                "the tensor is a value of a graph that is being built, so it has no elements yet"
            )
        if cell.storage is None:
            _recorder.materialize([cell])
        storage = cell.storage
        assert storage is not None
        return storage

    def item(self) -> Any:
        """The value of a tensor of one element, as a Python number.

        Raises:
            TypeError: It has another number of elements.
        """
        if self._cell is not None and self.num_elements() != 1:
            raise TypeError(f"item: the tensor has {self.num_elements()} elements, expected 1")
        return self._host().reshape(()).item()

    def to_numpy(self) -> np.ndarray[Any, Any]:
        """The elements as a NumPy array; on the CPU it shares their memory."""
        return self._on_memory(self._host())

    def _on_memory(self, export: _Export) -> _Export:
        """An array or capsule on the memory, through which others may write from now on."""
        assert self._cell is not None
        return handed_out(self._cell, export)

    def _host(self) -> np.ndarray[Any, Any]:
        storage = self._materialize()
        return (storage if storage.is_host else storage.to(CPU())).to_numpy()

    def __bool__(self) -> bool:
        return bool(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __index__(self) -> int:
        if not self.dtype.is_integral():
            raise TypeError(f"a tensor of {self.dtype.name} is no index")
        return int(self.item())

    def __len__(self) -> int:
        if not self.rank:
            raise TypeError("len() of a tensor of rank 0")
        return int(self.shape[0])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        array = self._on_memory(self._host())
        return np.array(array, dtype, copy=copy) if copy is not None else np.asarray(array, dtype)

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self._on_memory(self._materialize().__dlpack__(**kwargs))

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._materialize().__dlpack_device__()

    def __repr__(self) -> str:
        where = f"dtype={self.dtype.name}, device={self.type.device}"
        if not self.real:
            state = "not realized" if self._value is None else "in a graph"
            return f"Tensor(shape={[str(d) for d in self.shape]}, {where}, {state})".replace(
                "'", ""
            )
        return f"Tensor({np.array2string(self._host(), separator=', ', prefix='Tensor(')}, {where})"

    def __str__(self) -> str:
        return repr(self) if self._cell is None else str(self._host())

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if spec else str(self)
