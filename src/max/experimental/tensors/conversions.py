"""Tensors as Python numbers, NumPy arrays, DLPack capsules, constants of a graph and text; each is computed first."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Self, TypeVar

import numpy as np

from max import driver
from max._html import array_html, text_html
from max.driver import CPU
from max.experimental.record import recorder
from max.experimental.record.called_graph import CalledGraph
from max.experimental.record.dispatch import in_graph
from max.experimental.tensors.properties import Properties, handed_out
from max.graph import BufferValue, Graph, TensorValue, ops
from max.graph.staging.current import RETRIES, GraphNeeded

__all__ = ["Conversions"]

_Export = TypeVar("_Export")


class Conversions(Properties):
    """The methods of `Tensor` that read its elements; a base of it."""

    __slots__ = ()

    def _materialize(self) -> driver.Tensor:
        cell = self._cell
        if cell is None:
            raise TypeError(
                "the tensor is a value of a graph that is being built, so it has no elements yet"
            )
        if cell.storage is None:
            recorder.materialize([cell])
        storage = cell.storage
        assert storage is not None
        return storage

    def __await__(self) -> Generator[Any, None, Self]:
        self._materialize()
        yield from ()  # makes this a generator; there is nothing to wait for
        return self

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
        """Returns an array or capsule on the memory, through which others may write from now on."""
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

    def __complex__(self) -> complex:
        value = float(self.item())
        # as the array API standard has it, for NaN both parts are
        return complex(value, value if value != value else 0.0)

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

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A DLPack capsule on the memory, for which the tensor is computed; as `max.driver.Tensor.__dlpack__`."""
        storage = self._materialize()
        return self._on_memory(
            storage.__dlpack__(
                stream=stream, max_version=max_version, dl_device=dl_device, copy=copy
            )
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._materialize().__dlpack_device__()

    def __tensorvalue__(self) -> TensorValue:
        """The value of a graph; a tensor in memory becomes a constant of the graph that is being built."""
        if self._cell is None:
            value = self._graph_value()
            return value[...] if isinstance(value, BufferValue) else value
        if not in_graph():
            if RETRIES.get():
                raise GraphNeeded
            raise TypeError(
                "an eager tensor met an op of max.graph outside of a graph; use max.experimental.functional"
            )
        graph: Any = Graph.current.root
        if isinstance(graph, CalledGraph):
            return graph.input_of(self._cell)
        return ops.constant(self._host(), self.dtype, self._cell.type.device)

    def numpy(self) -> np.ndarray[Any, Any]:
        """The elements as a NumPy array, as `to_numpy`: the name of PyTorch and TensorFlow."""
        return self.to_numpy()

    def _repr_html_(self) -> str:
        if self._cell is None:
            return text_html(repr(self))
        caption = f"Tensor {[int(d) for d in self.shape]} {self.dtype.name}, {self.type.device}"
        return array_html(self._host(), caption)

    def __repr__(self) -> str:
        where = f"dtype={self.dtype.name}, device={self.type.device}"
        if self._cell is None:
            return f"Tensor(shape={[str(d) for d in self.shape]}, {where}, in a graph)".replace(
                "'", ""
            )
        # a recorded tensor is computed to be shown, as it is to be printed
        return f"Tensor({np.array2string(self._host(), separator=', ', prefix='Tensor(')}, {where})"

    def __str__(self) -> str:
        return repr(self) if self._cell is None else str(self._host())

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if spec else str(self)
