"""Eager tensors: operations are recorded, and run as one fused program where a value is needed.

::

    from max.experimental.tensor import Tensor

    x = Tensor.ones((2, 3))
    y = x * 2 + 1           # recorded; shapes and dtypes are checked here
    print(y)                # compiled (once for each structure and then found again) and run

A value is needed by `Tensor.realize`, `Tensor.item`, printing, DLPack, NumPy and Python's control flow. Sizes that vary
from one execution to the next become symbols, so that a sequence that grows is compiled a few times, not at each step.
"""

# cells are shared by the modules of this package
# pyright: reportPrivateUsage=false

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterator
from typing import Any, cast

import numpy as np

from max import driver
from max._names import keyword_aliases, lazy_names
from max.driver import CPU, Device, DLPackArray
from max.dtype import DType
from max.experimental.programs.lazy_values import Cell
from max.experimental.programs.tensor_class import TENSOR
from max.experimental.programs.value_types import type_of
from max.experimental.record.dispatch import apply, in_graph
from max.experimental.replay.pending_tensors import PENDING
from max.experimental.tensors import creation, indexing, mutation
from max.experimental.tensors.compute_graph import GRAPH, ComputeGraph
from max.experimental.tensors.defaults import (
    contextvar_context,
    default_device,
    default_dtype,
    defaults,
    defaults_like,
)
from max.experimental.tensors.operations import Operations
from max.experimental.tensors.parts import OneDevice
from max.experimental.tensors.placement import OnDevice
from max.graph import (
    BufferType,
    BufferValue,
    DeviceRef,
    Dim,
    DimLike,
    Graph,
    Shape,
    ShapeLike,
    TensorType,
    TensorValue,
    TensorValueLike,
    Value,
    ops,
)  # fmt: skip

__all__ = [
    "GRAPH",
    "ComputeGraph",
    "Tensor",
    "TensorType",
    "contextvar_context",
    "default_device",
    "default_dtype",
    "defaults",
    "defaults_like",
    "driver_tensor_type",
]


def driver_tensor_type(t: driver.Tensor) -> TensorType:
    """The type of a tensor of the driver.

    Args:
        t: The tensor.
    """
    return TensorType(t.dtype, t.shape, DeviceRef.from_device(t.device))


class Tensor(Operations, OneDevice):
    """A multi-dimensional array. Operations are recorded, and run where a value is needed.

    ``Tensor([[1.0, 2.0]])`` makes one from numbers as :meth:`constant` does; see also :meth:`ones`, :meth:`zeros`,
    :meth:`full`, :meth:`arange` and :meth:`from_dlpack`. In a graph that is being built (``with Graph(...)``,
    `Module.compile`) operations are staged, and the tensor stands for a value of the graph.

    Arithmetic, comparison, indexing and broadcasting are those of `max.graph`.

    Args:
        data: Numbers, nested lists or an array, as for :meth:`constant`.
        dtype: The element type, as for :meth:`constant`.
        device: The device, as for :meth:`constant`.
        storage: A tensor of the driver, used where it is.
        value: A value of a graph.

    Raises:
        TypeError: Not exactly one of `data`, `storage` and `value` is given.
    """

    __slots__ = ("__weakref__", "_cell", "_value")

    __array_ufunc__ = None
    """Leaves ``array + tensor`` to this class."""

    def __init__(
        self,
        data: Any = None,
        *,
        dtype: DType | None = None,
        device: Device | OnDevice | None = None,
        storage: driver.Tensor | None = None,
        value: BufferValue | TensorValue | None = None,
    ) -> None:
        if sum([data is not None, storage is not None, value is not None]) != 1:
            raise TypeError("Tensor: expected one of data, storage and value")
        self._cell, self._value = None, value
        if data is not None:
            tensor = Tensor.constant(data, dtype=dtype, device=device)
            if tensor._cell is not None:
                # a cell that is not computed has one tensor
                tensor._materialize()
            self._cell, self._value = tensor._cell, tensor._value
        elif storage is not None:
            if not isinstance(storage, driver.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(f"Tensor: storage is {storage!r}, expected a max.driver.Tensor")
            self._cell = Cell(type_of(storage), storage)

    @classmethod
    def _of_cell(cls, cell: Cell) -> Tensor:
        tensor = cls.__new__(cls)
        tensor._cell, tensor._value = cell, None
        if cell.storage is None:
            PENDING.add(cell, tensor)
        return tensor

    @classmethod
    def from_graph_value(cls, value: Value[Any]) -> Tensor:
        """The tensor that stands for a value of a graph.

        Args:
            value: A tensor or buffer of a graph. An eager tensor, which ops return within
                `max.experimental.functional.ensure_context`, is itself.

        Raises:
            TypeError: The value is neither.
        """
        if isinstance(value, Tensor):
            return value
        if not isinstance(value, TensorValue | BufferValue):
            raise TypeError(f"from_graph_value: {value!r} is neither a tensor nor a buffer")
        tensor = cls.__new__(cls)
        tensor._cell, tensor._value = None, value
        return tensor

    @classmethod
    def from_dlpack(cls, array: DLPackArray) -> Tensor:
        """A tensor on the memory of an array of NumPy, torch, JAX or another library with DLPack.

        Args:
            array: The array. Memory that its library writes to later is seen by computations that run later.

        Raises:
            TypeError: It is no DLPack array.
            BufferError: A dtype or device that cannot be shared.
        """
        if isinstance(array, Tensor):
            return array
        storage = driver.Tensor.from_dlpack(array)
        return cls(storage=storage if storage.is_contiguous else storage.contiguous())

    @classmethod
    def constant(
        cls,
        value: Any,
        *,
        dtype: DType | None = None,
        device: Device | OnDevice | None = None,
    ) -> Tensor:
        """A tensor of given values.

        Args:
            value: A number, nested lists of numbers, or an array.
            dtype: The element type; that of an array, or the default (`defaults`).
            device: The device; the default if None.

        Raises:
            ValueError: Lists that are not rectangular, or an array of another dtype.
        """
        if isinstance(value, Tensor):
            return value if dtype is None else value.cast(dtype)
        dtype, device = defaults(creation.dtype_of(value) if dtype is None else dtype, device)
        if in_graph():
            return cls.from_graph_value(ops.constant(value, dtype, DeviceRef.from_device(device)))
        return cls(storage=creation.constant(value, dtype, device))

    @classmethod
    def full(
        cls,
        shape: ShapeLike,
        value: float | np.number[Any],
        *,
        dtype: DType | None = None,
        device: Device | OnDevice | None = None,
    ) -> Tensor:
        """A tensor with one value everywhere.

        Args:
            shape: The shape.
            value: The value.
            dtype: The element type; the default (`defaults`) if None.
            device: The device; the default if None.

        Raises:
            ValueError: A size is negative, or a symbol outside of a graph.
        """
        dtype, device = defaults(dtype, device)
        number = cls.constant(value, dtype=dtype, device=device)
        if in_graph():
            return apply(ops.broadcast_to, (number, Shape(shape)), {})
        return cls(storage=creation.full(shape, number.driver_tensor))

    @classmethod
    def zeros(
        cls,
        shape: ShapeLike,
        *,
        dtype: DType | None = None,
        device: Device | OnDevice | None = None,
    ) -> Tensor:
        """A tensor of zeros; see :meth:`full`."""
        return cls.full(shape, 0, dtype=dtype, device=device)

    @classmethod
    def ones(
        cls,
        shape: ShapeLike,
        *,
        dtype: DType | None = None,
        device: Device | OnDevice | None = None,
    ) -> Tensor:
        """A tensor of ones; see :meth:`full`."""
        return cls.full(shape, 1, dtype=dtype, device=device)

    @classmethod
    @keyword_aliases(input="type")
    def full_like(cls, type: TensorType | Tensor, value: float | np.number[Any]) -> Tensor:
        """A tensor of a given type with one value everywhere.

        Args:
            type: The shape, dtype and device; or a tensor that has them.
            value: The value.
        """
        type = _type_like(type)
        return cls.full(type.shape, value, dtype=type.dtype, device=type.device.to_device())

    @classmethod
    @keyword_aliases(input="type")
    def zeros_like(cls, type: TensorType | Tensor) -> Tensor:
        """A tensor of zeros of a given type."""
        return cls.full_like(type, 0)

    @classmethod
    @keyword_aliases(input="type")
    def ones_like(cls, type: TensorType | Tensor) -> Tensor:
        """A tensor of ones of a given type."""
        return cls.full_like(type, 1)

    @classmethod
    def arange(
        cls,
        start: float | Dim = 0,
        stop: float | Dim | None = None,
        step: float | Dim = 1,
        out_dim: DimLike | None = None,
        *,
        dtype: DType | None = None,
        device: Device | OnDevice | None = None,
    ) -> Tensor:
        """The values from `start` to before `stop`, `step` apart: a tensor of rank 1.

        Args:
            start: The first value; where `stop` is None the end, and the first value is 0. In a graph it may be a
                dimension that is a symbol, as the others.
            stop: The end.
            step: The distance of values; negative to count down.
            out_dim: The number of values, which is checked; in a graph it may be a symbol of it.
            dtype: The element type; the default (`defaults`) if None.
            device: The device; the default if None.

        Raises:
            ValueError: The step is 0, or `out_dim` is another number.
        """
        dtype, device = defaults(dtype, device)
        if stop is None:
            start, stop = 0, start
        if step == 0:
            raise ValueError("arange: the step is 0")
        bounds = (start, stop, step)
        if any(isinstance(bound, Dim) and not bound.expr.is_static for bound in bounds):
            return apply(ops.range, (*bounds, out_dim), {"dtype": dtype, "device": device})
        values = creation.evenly_spaced(start, stop, step)
        result = cls.constant(values, dtype=dtype, device=device).reshape((len(values),))
        return result if out_dim is None else apply(ops.rebind, (result, [out_dim]), {})

    @classmethod
    def from_dim(cls, dim: DimLike) -> Tensor:
        """A dimension as a tensor of int64 and rank 0 on the CPU, which control flow can compare and `F.cond` takes.

        Args:
            dim: An int, or in a graph also a name or an expression of names.

        Raises:
            ValueError: The size is not known, as no graph is being built or none of its inputs has the name.
        """
        if in_graph():
            return cls.from_graph_value(TensorValue(Dim(dim)))
        if not Dim(dim).expr.is_static:
            raise ValueError(f"from_dim: the size of {Dim(dim)} is not known outside of a graph")
        return cls.constant(int(Dim(dim)), dtype=DType.int64, device=CPU())

    @classmethod
    @keyword_aliases(input="type")
    def range_like(cls, type: TensorType | Tensor) -> Tensor:
        """The indices along the last axis, for each row: a tensor of a given type.

        Args:
            type: The shape, dtype and device; or a tensor that has them.
        """
        type = _type_like(type)
        device = DeviceRef.from_device(type.device)
        counted = apply(ops.range, (0, type.shape[-1], 1), {"dtype": type.dtype, "device": device})
        return apply(ops.broadcast_to, (counted, list(type.shape)), {})

    # values

    @property
    def realize(self) -> RealizedTensor:
        """The tensor, computed if it was not: one on the same memory, which is a coroutine too.

        ``await x.realize``, ``asyncio.run(x.realize)`` and tasks of it give `x`; nothing is waited for.

        Raises:
            TypeError: The tensor stands for a value of a graph.
        """
        self._materialize()
        return RealizedTensor(self)

    def __iter__(self) -> Iterator[Tensor]:
        return iter([self[index] for index in range(len(self))])

    def __copy__(self) -> Tensor:
        """Another tensor on the same memory, for which it is computed; in a graph, on the same value."""
        if self._cell is None:
            return self.from_graph_value(self._graph_value())
        self._materialize()
        return self._of_cell(self._cell)

    def __deepcopy__(self, memo: object) -> Tensor:
        return Tensor(storage=self._materialize().copy())

    def __reduce__(self) -> tuple[Any, ...]:
        """Its elements, for which it is computed."""
        return _of_storage, (self._materialize(),)

    # as an operand of a graph

    def __buffervalue__(self) -> BufferValue:
        """This tensor as an operand that an op changes.

        In a graph it is a buffer: that of a tensor which is one; for the result of an op a new buffer with its
        elements, which the tensor is from then on; for a tensor in memory one buffer of the graph, which begins with
        its elements in each execution, while the memory stays. An eager tensor is itself, for
        `max.experimental.functional.inplace_custom`.
        """
        if self._cell is not None:
            if not in_graph():
                return cast("BufferValue", self)
            graph = Graph.current
            for each in (graph.root, graph):
                if (buffer := _graph_buffers.get(each, {}).get(self._cell)) is not None:
                    return buffer
            buffer = _buffer_of(TensorValue(self))
            _graph_buffers.setdefault(graph, {})[self._cell] = buffer
            return buffer
        value = self._graph_value()
        if not isinstance(value, BufferValue):
            self._value = value = _buffer_of(value)
        return value

    # operations

    def __getitem__(self, index: Any) -> Tensor:
        """Elements by NumPy's indexing: integers, slices, ``None``, ``...``, masks and arrays of integers.

        A list is no index, as MAX reads it as a tuple. Integers of arrays are checked when the result is computed.

        Raises:
            IndexError: An index is out of range, or a mask has other sizes than its axes.
            TypeError: An index is of another kind; or a mask while a graph is being built.
        """
        indices = cast("tuple[Any, ...]", index) if isinstance(index, tuple) else (index,)
        if indexing.is_advanced(indices):
            return indexing.index_by_arrays(self, indices)
        return apply(ops.slice_tensor, (self, indices), {})

    def __setitem__(self, index: Any, value: TensorValueLike) -> None:
        """Replaces elements, see `__getitem__`, at once; what was recorded before has the elements before."""
        indices = cast("tuple[Any, ...]", index) if isinstance(index, tuple) else (index,)
        if self._cell is None:
            if indexing.is_advanced(indices):
                raise TypeError(
                    "a graph writes no elements by masks or arrays; make new tensors by F.where(mask, new, x) or "
                    "F.scatter_nd(x, new, indices)"
                )
            ops.buffer_store_slice(BufferValue(self), value, indices)
        else:
            mutation.store(self, value, indices)


class RealizedTensor(Tensor):
    """A tensor as `Tensor.realize` returns it. `asyncio` takes it for a coroutine, whose result is the tensor.

    Args:
        tensor: The computed tensor.
    """

    __slots__ = ("_tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self._cell, self._value, self._tensor = tensor._cell, tensor._value, tensor

    @property
    def realize(self) -> RealizedTensor:
        """The tensor itself."""
        return self

    def __await__(self) -> Generator[Any, None, Tensor]:
        yield from ()  # makes this a generator; there is nothing to wait for
        return self._tensor

    def send(self, value: object, /) -> Any:
        """Ends the coroutine.

        Args:
            value: None.

        Raises:
            StopIteration: Always; its value is the tensor.
        """
        raise StopIteration(self._tensor)

    def throw(self, exception: Any, value: Any = None, traceback: Any = None, /) -> Any:
        """Raises an exception in the coroutine, which does not catch it.

        Args:
            exception: The exception, or its class.
            value: The exception if `exception` is a class.
            traceback: Its traceback.
        """
        error = exception
        if not isinstance(exception, BaseException):
            error = exception() if value is None else value
        raise error if traceback is None else error.with_traceback(traceback)

    def close(self) -> None:
        """Ends the coroutine, which has nothing to release."""


_graph_buffers: weakref.WeakKeyDictionary[Graph, dict[Cell, BufferValue]] = (
    weakref.WeakKeyDictionary()
)
"""The buffers that graphs have for tensors in memory."""


def _buffer_of(value: TensorValue) -> BufferValue:
    """A new buffer of the current graph with the elements of a value."""
    buffer = ops.buffer_create(BufferType(value.dtype, value.shape, value.device))
    ops.buffer_store(buffer, value)
    return buffer


def _of_storage(storage: driver.Tensor) -> Tensor:
    return Tensor(storage=storage)


def _type_like(like: TensorType | Tensor) -> TensorType:
    return like.type if isinstance(like, Tensor) else like


TENSOR.type = Tensor
TENSOR.of_cell, TENSOR.of_value = Tensor._of_cell, Tensor.from_graph_value

__getattr__ = lazy_names(__name__)
