"""Values of a graph: tensors, buffers, chains, opaque values."""

# the documented names of chains and opaque values start with an underscore
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast, runtime_checkable

import numpy as np

from max import mlir
from max._host.process_caches import cached_results
from max.driver import Device, DLPackArray
from max.dtype import DType
from max.graph._operators import Operators, missing_method, ops
from max.graph.dim import Dim
from max.graph.shape import Shape, ShapeLike
from max.graph.staging.truth import truth_of
from max.graph.type import BufferType, DeviceRef, TensorType, Type, _OpaqueType

__all__ = [
    "BufferValue",
    "BufferValueLike",
    "HasBufferValue",
    "HasTensorValue",
    "StrongTensorValueLike",
    "TensorValue",
    "TensorValueLike",
    "Value",
]

MlirType = TypeVar("MlirType", covariant=True)
_ShapedType = TypeVar("_ShapedType", bound="mlir.TensorType | mlir.BufferType", covariant=True)


@runtime_checkable
class HasTensorValue(Protocol):
    """An object that converts to a tensor of the graph, such as a layer's parameter."""

    def __tensorvalue__(self) -> TensorValue:
        """Returns the tensor."""
        ...


@runtime_checkable
class HasBufferValue(Protocol):
    """An object that converts to a buffer of the graph."""

    def __buffervalue__(self) -> BufferValue:
        """Returns the buffer."""
        ...


class Value(Generic[MlirType]):
    """A value in a graph: an input, or the result of an op. Abstract; see its subclasses."""

    __slots__ = ("_mlir_value",)

    _mlir_value: mlir.SSAValue

    def __init__(self, value: Value[Any] | mlir.SSAValue) -> None:
        raise TypeError("Value is abstract; use TensorValue or BufferValue")

    @classmethod
    def from_mlir(cls, value: mlir.SSAValue) -> Value[Any]:
        """Wraps an MLIR value in the class of its type.

        Raises:
            TypeError: The type is not that of a graph value, or belongs to another class.
        """
        result = value_of(value)
        if not isinstance(result, cls):
            raise TypeError(f"{mlir.short_types([value.type])} is not a {cls.__name__}")
        return result

    def to_mlir(self) -> mlir.SSAValue:
        """The MLIR value."""
        return self._mlir_value

    @property
    def type(self) -> Type[Any]:
        """The type of the value."""
        return Type.from_mlir(self._mlir_value.type)

    @property
    def tensor(self) -> TensorValue:
        """The value as a tensor.

        Raises:
            TypeError: The value is not a tensor.
        """
        return self._checked_value(TensorValue)

    @property
    def buffer(self) -> BufferValue:
        """The value as a buffer.

        Raises:
            TypeError: The value is not a buffer.
        """
        return self._checked_value(BufferValue)

    @property
    def opaque(self) -> _OpaqueValue:
        """The value as an opaque value.

        Raises:
            TypeError: The value is not opaque.
        """
        return self._checked_value(_OpaqueValue)

    def _checked_value(self, cls: type[_V]) -> _V:
        if not isinstance(self, cls):
            raise TypeError(f"the value is a {type(self).__name__}, expected a {cls.__name__}")
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}({mlir.short_types([self.to_mlir().type])})"


_V = TypeVar("_V", bound=Value[Any])


class _ChainValue(Value["mlir.ChainType"]):
    """A token that orders side effects."""

    __slots__ = ()

    def __init__(self, value: Value[Any] | mlir.SSAValue) -> None:
        self._mlir_value = _ssa(value, mlir.ChainType, "a chain")


class _OpaqueValue(Value["mlir.OpaqueType"]):
    """A value that only custom ops interpret."""

    __slots__ = ()

    def __init__(self, value: Value[Any] | mlir.SSAValue) -> None:
        self._mlir_value = _ssa(value, mlir.OpaqueType, "an opaque value")

    @property
    def type(self) -> _OpaqueType:
        """The type of the value."""
        return _OpaqueType.from_mlir(self.mlir_type)

    @property
    def mlir_type(self) -> mlir.OpaqueType:
        ir_type = self._mlir_value.type
        assert isinstance(ir_type, mlir.OpaqueType)
        return ir_type


class _ShapedValue(Value[_ShapedType]):
    """A tensor or a buffer: elements of one dtype on a device."""

    __slots__ = ()

    @property
    def mlir_type(self) -> _ShapedType:
        """The MLIR type; the constructors check its class."""
        return cast("_ShapedType", self._mlir_value.type)

    @property
    def shape(self) -> Shape:
        """The dimensions."""
        return Shape.from_exprs(self.mlir_type.shape)

    @property
    def dtype(self) -> DType:
        """The element type."""
        return self.mlir_type.dtype

    @property
    def rank(self) -> int:
        """The number of dimensions."""
        return self.mlir_type.rank

    @property
    def device(self) -> DeviceRef:
        """The device of the elements."""
        return DeviceRef.from_mlir(self.mlir_type.device)


class BufferValue(_ShapedValue["mlir.BufferType"]):
    """A mutable tensor of the graph.

    ``buffer[...]`` loads the elements as a tensor, ``buffer[1:3] = x`` stores them. Loads and stores execute in the
    order in which they are staged.

    Args:
        value: A buffer value, its MLIR value, or an object with ``__buffervalue__``.

    Raises:
        TypeError: The value is not a buffer.
    """

    __slots__ = ()

    # internal code makes values without arguments
    def __new__(cls, *args: Any, **kwargs: Any) -> BufferValue:
        """The value; an eager tensor outside of a graph is a buffer itself: its elements are loaded and stored."""
        value: Any = args[0] if args else kwargs.get("value")
        if not isinstance(value, Value | mlir.SSAValue) and hasattr(value, "__buffervalue__"):
            own = value.__buffervalue__()
            if own is value:
                return own
        return super().__new__(cls)

    def __init__(self, value: Value[Any] | mlir.SSAValue | HasBufferValue) -> None:
        if not isinstance(value, Value | mlir.SSAValue):
            if not hasattr(value, "__buffervalue__"):
                raise TypeError(f"{type(value).__name__} {value!r} is not a buffer")
            value = value.__buffervalue__()
        self._mlir_value = _ssa(value, mlir.BufferType, "a buffer")

    @property
    def type(self) -> BufferType:
        """The type of the buffer."""
        return BufferType.from_mlir(self.mlir_type)

    def print(self, label: str = "debug_buffer") -> None:
        """Prints the elements at this point; see `max.graph.ops.print`.

        Args:
            label: The start of the line.
        """
        ops.print(self, label)

    def __getitem__(self, index: Any) -> TensorValue:
        loaded = ops.buffer_load(self)
        return loaded if index is Ellipsis else loaded[index]

    def __setitem__(self, index: Any, value: TensorValueLike) -> None:
        if index is Ellipsis:
            ops.buffer_store(self, value)
        else:
            indices = cast("tuple[Any, ...]", index) if isinstance(index, tuple) else (index,)
            ops.buffer_store_slice(self, value, indices)


def _staged_value(result: Any) -> mlir.SSAValue:
    """The value of a graph that an op made; outside of a graph it made an eager tensor, which has none."""
    return (result if isinstance(result, Value) else result.__tensorvalue__()).to_mlir()


class TensorValue(_ShapedValue["mlir.TensorType"], Operators["TensorValueLike"]):
    """A tensor of the graph.

    Arithmetic, comparison and indexing work as on NumPy arrays, and stage ops into the current graph.

    Args:
        value: A tensor value, its MLIR value, or an object with ``__tensorvalue__``; a `Dim` or `Shape`, which becomes
            int64; a number or an array, which becomes a constant on the CPU.

    Raises:
        TypeError: The value is none of these.
    """

    __slots__ = ()

    __array_ufunc__ = None
    """Makes NumPy defer ``array + tensor`` to this class."""

    def __init__(self, value: TensorValueLike | mlir.SSAValue) -> None:
        if isinstance(value, TensorValue):
            self._mlir_value = value.to_mlir()
        elif isinstance(value, Value | mlir.SSAValue):
            self._mlir_value = _ssa(value, mlir.TensorType, "a tensor")
        elif hasattr(value, "__tensorvalue__"):
            # hasattr instead of isinstance: checks against protocols are slow
            self._mlir_value = value.__tensorvalue__().to_mlir()  # type: ignore[union-attr]
        elif isinstance(value, Dim):
            self._mlir_value = _staged_value(ops.shape_to_tensor([value]).reshape([]))
        elif isinstance(value, Shape):
            self._mlir_value = _staged_value(ops.shape_to_tensor(value))
        else:
            self._mlir_value = _staged_value(ops.constant(value, device=DeviceRef.CPU()))

    @property
    def type(self) -> TensorType:
        """The type of the tensor."""
        return TensorType.from_mlir(self.mlir_type)

    def print(self, label: str = "debug_tensor") -> None:
        """Prints the tensor each time the graph runs; see `max.graph.ops.print`.

        Args:
            label: The start of the line.
        """
        ops.print(self, label)

    # Shapes

    @property
    def T(self) -> TensorValue:
        """The transpose of the last two axes."""
        return self.transpose(-1, -2)

    def reshape(self, shape: ShapeLike) -> TensorValue:
        """Changes the shape; see `max.graph.ops.reshape`.

        Args:
            shape: The new shape, with at most one -1.
        """
        return ops.reshape(self, shape)

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> TensorValue:
        """Merges axes into one; see `max.graph.ops.flatten`.

        Args:
            start_dim: The first axis to merge.
            end_dim: The last axis to merge.
        """
        return ops.flatten(self, start_dim, end_dim)

    def broadcast_to(self, shape: ShapeLike) -> TensorValue:
        """Broadcasts to a shape; see `max.graph.ops.broadcast_to`.

        Args:
            shape: The shape of the result.
        """
        return ops.broadcast_to(self, shape)

    def rebind(self, shape: ShapeLike, message: str = "") -> TensorValue:
        """Asserts a shape, checked at run time; see `max.graph.ops.rebind`.

        Args:
            shape: The asserted shape.
            message: The message of the error raised if the check fails.
        """
        return ops.rebind(self, shape, message)

    def permute(self, dims: list[int]) -> TensorValue:
        """Permutes the axes; see `max.graph.ops.permute`.

        Args:
            dims: For each axis of the result, the axis of this tensor.
        """
        return ops.permute(self, dims)

    def transpose(self, dim_1: int, dim_2: int) -> TensorValue:
        """Swaps two axes; see `max.graph.ops.transpose`.

        Args:
            dim_1: One axis.
            dim_2: The other axis.
        """
        return ops.transpose(self, dim_1, dim_2)

    # Conversions

    def cast(self, dtype: DType) -> TensorValue:
        """Converts the elements; see `max.graph.ops.cast`.

        Args:
            dtype: The new element type.
        """
        return ops.cast(self, dtype)

    def to(self, device: Device | DeviceRef) -> TensorValue:
        """Transfers the tensor to a device; see `max.graph.ops.transfer_to`.

        Args:
            device: The target device.
        """
        return ops.transfer_to(self, device)

    # Reductions

    def max(self, axis: int = -1) -> TensorValue:
        """The maximum along an axis, which stays with size 1.

        Args:
            axis: The axis to reduce; negative counts from the last.
        """
        return ops.max(self, axis=axis)

    def min(self, axis: int = -1) -> TensorValue:
        """The minimum along an axis, which stays with size 1.

        Args:
            axis: The axis to reduce; negative counts from the last.
        """
        return ops.min(self, axis=axis)

    def mean(self, axis: int = -1) -> TensorValue:
        """The mean along an axis, which stays with size 1.

        Args:
            axis: The axis to reduce; negative counts from the last.
        """
        return ops.mean(self, axis)

    def argmax(self, axis: int = -1) -> TensorValue:
        """The index (int64) of the maximum along an axis, which stays with size 1.

        Args:
            axis: The axis to reduce; negative counts from the last.
        """
        return ops.argmax(self, axis)

    def var(self, axis: int = -1) -> TensorValue:
        """The population variance along an axis, which stays with size 1.

        Args:
            axis: The axis to reduce; negative counts from the last.
        """
        centered = self - self.mean(axis)
        return (centered * centered).mean(axis)

    def stdev(self, axis: int = -1) -> TensorValue:
        """The population standard deviation along an axis, which stays with size 1.

        Args:
            axis: The axis to reduce; negative counts from the last.
        """
        return ops.sqrt(self.var(axis))

    # Operators

    # `value == None` is False without staging an op: programs test for None in this way
    def __eq__(self, rhs: object) -> TensorValue:  # type: ignore[override]
        return NotImplemented if rhs is None else super().__eq__(rhs)

    def __ne__(self, rhs: object) -> TensorValue:  # type: ignore[override]
        return NotImplemented if rhs is None else super().__ne__(rhs)

    __hash__ = object.__hash__

    def __getitem__(self, index: Any) -> TensorValue:
        indices = cast("tuple[Any, ...]", index) if isinstance(index, tuple) else (index,)
        return ops.slice_tensor(self, indices)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise missing_method(self, name, "max.graph.ops")

    def __iter__(self) -> Iterator[TensorValue]:
        shape = self.mlir_type.shape
        if not shape or not shape[0].is_static:
            raise TypeError(f"cannot iterate over {self!r}: the size of axis 0 is not static")
        return (self[i] for i in range(shape[0].value))

    def __bool__(self) -> bool:
        return truth_of(self)

    def __round__(self) -> TensorValue:
        return ops.round(self)

    def __trunc__(self) -> TensorValue:
        return ops.trunc(self)

    def __floor__(self) -> TensorValue:
        return ops.floor(self)


def _ssa(value: Value[Any] | mlir.SSAValue, cls: type[Any], expected: str) -> mlir.SSAValue:
    ssa = value.to_mlir() if isinstance(value, Value) else value
    if not isinstance(ssa.type, cls):
        raise TypeError(f"the value of type {mlir.short_types([ssa.type])} is not {expected}")
    return ssa


@cached_results()
def _value_classes() -> dict[type[Any], type[Value[Any]]]:
    """The class of values for each class of MLIR types."""
    return {
        mlir.TensorType: TensorValue,
        mlir.BufferType: BufferValue,
        mlir.ChainType: _ChainValue,
        mlir.OpaqueType: _OpaqueValue,
    }


def value_of(value: mlir.SSAValue) -> Value[Any]:
    cls = _value_classes().get(type(value.type))
    if cls is None:
        raise TypeError(f"{value.type} is not the type of a graph's value")
    result = cls.__new__(cls)
    result._mlir_value = value
    return result


def tensor_of(value: mlir.SSAValue) -> TensorValue:
    """Wraps an MLIR value of tensor type, without a check."""
    tensor = TensorValue.__new__(TensorValue)
    tensor._mlir_value = value
    return tensor


Numeric = int | float | np.integer[Any] | np.floating[Any] | DLPackArray
StrongTensorValueLike = Value["mlir.TensorType"] | TensorValue | Shape | Dim | HasTensorValue
"""What converts to a tensor and determines its dtype."""
TensorValueLike = StrongTensorValueLike | Numeric
"""What ops accept as a tensor operand."""
BufferValueLike = Value["mlir.BufferType"] | BufferValue | HasBufferValue
"""What ops accept as a buffer operand."""
