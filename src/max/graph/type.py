"""Types of graph values (tensors, buffers, chains, opaque values), device references and layouts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from max import mlir
from max._errors import ArgumentError
from max._host.process_caches import cached_results
from max._lazy import lazy_module
from max.driver import CPU, Accelerator, Device
from max.dtype import DType
from max.graph.dim import SymbolicDim
from max.graph.shape import Shape, ShapeLike

if TYPE_CHECKING:
    from max import _html
else:
    # for notebooks
    _html = lazy_module("max._html")

__all__ = [
    "BufferType",
    "ConvInputLayout",
    "DeviceKind",
    "DeviceRef",
    "FilterLayout",
    "TensorType",
    "Type",
]

MlirType = TypeVar("MlirType", bound="mlir.Attribute", covariant=True)


class FilterLayout(StrEnum):
    """The axis order of a convolution filter: F output and C input channels, Q depth, R height, S width."""

    CFRS = "CFRS"
    FCQRS = "FCQRS"
    FCRS = "FCRS"
    QRSCF = "QRSCF"
    RSCF = "RSCF"

    @staticmethod
    def from_mlir(attr: mlir.StringAttr) -> FilterLayout:
        """The layout of an MLIR attribute."""
        return FilterLayout(attr.data)

    def to_mlir(self) -> mlir.StringAttr:
        """The MLIR attribute of the layout."""
        return mlir.StringAttr(self.value)


class ConvInputLayout(StrEnum):
    """The axis order of a convolution's input."""

    NHWC = "NHWC"
    NCHW = "NCHW"

    @staticmethod
    def from_mlir(attr: mlir.StringAttr) -> ConvInputLayout:
        """The layout of an MLIR attribute."""
        return ConvInputLayout(attr.data)

    def to_mlir(self) -> mlir.StringAttr:
        """The MLIR attribute of the layout."""
        return mlir.StringAttr(self.value)


class DeviceKind(StrEnum):
    """A kind of device."""

    CPU = "cpu"
    GPU = "gpu"

    @staticmethod
    def from_string(txt: str) -> DeviceKind:
        """Parses a kind: ``cpu`` or ``gpu``.

        Raises:
            ValueError: The name is unknown.
        """
        try:
            return DeviceKind(txt)
        except ValueError:
            kinds = ", ".join(kind.value for kind in DeviceKind)
            raise ValueError(f"{txt!r} is not a kind of device; expected {kinds}") from None

    def __str__(self) -> str:
        return self.value


class DeviceRef:
    """A device by kind and id. The device need not exist on the machine.

    Args:
        device_type: The kind of the device.
        id: The id among devices of the kind; -1, as in ``DeviceSpec.cpu()``, means 0.

    Raises:
        ValueError: The kind is unknown, or the id is less than -1.
    """

    __slots__ = ("device_type", "id")

    device_type: DeviceKind
    id: int

    def __init__(self, device_type: DeviceKind | str, id: int = 0) -> None:
        if id < -1:
            raise ValueError(f"DeviceRef: the id is {id}, expected 0 or more")
        self.device_type = DeviceKind.from_string(device_type)
        # -1 is the driver's default device, the first one
        self.id = max(id, 0)

    @staticmethod
    def CPU(id: int = 0) -> DeviceRef:
        """A CPU device."""
        return DeviceRef(DeviceKind.CPU, id)

    @staticmethod
    def GPU(id: int = 0) -> DeviceRef:
        """A GPU device."""
        return DeviceRef(DeviceKind.GPU, id)

    @staticmethod
    def from_device(device: Device | DeviceRef) -> DeviceRef:
        """The reference to a device of the driver; a reference is returned unchanged.

        Raises:
            TypeError: The argument is not a device.
        """
        if isinstance(device, DeviceRef):
            return device
        if not isinstance(getattr(device, "label", None), str):
            raise TypeError(
                f"the device is {device!r}, expected a DeviceRef such as DeviceRef.CPU(), or a Device of max.driver"
            )
        return DeviceRef(DeviceKind.from_string(device.label), max(device.id, 0))

    def to_device(self) -> Device:
        """The device of the driver.

        Raises:
            ValueError: The machine does not have the device.
        """
        return CPU(self.id) if self.is_cpu() else Accelerator(self.id)

    def is_cpu(self) -> bool:
        """Whether this is a CPU."""
        return self.device_type is DeviceKind.CPU

    def is_gpu(self) -> bool:
        """Whether this is a GPU."""
        return self.device_type is DeviceKind.GPU

    @staticmethod
    def from_mlir(attr: mlir.DeviceRefAttr) -> DeviceRef:
        """The device of an MLIR attribute."""
        return _device_from_mlir(attr)

    def to_mlir(self) -> mlir.DeviceRefAttr:
        """The MLIR attribute of the device."""
        return mlir.DeviceRefAttr.get(self.device_type.value, self.id)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DeviceRef):
            return NotImplemented
        return self.device_type is other.device_type and self.id == other.id

    def __hash__(self) -> int:
        return hash((self.device_type.value, self.id))

    def __str__(self) -> str:
        return f"{self.device_type.value}:{self.id}"

    __repr__ = __str__


@cached_results(256)
def _device_from_mlir(attr: mlir.DeviceRefAttr) -> DeviceRef:
    return DeviceRef(DeviceKind(attr.label), attr.id)


class Type(Generic[MlirType]):
    """The type of a value in a graph. Types compare and hash by structure."""

    def to_mlir(self) -> MlirType:
        """The MLIR type."""
        raise NotImplementedError(f"{type(self).__name__} is abstract")

    @staticmethod
    def from_mlir(t: mlir.Attribute) -> Type[Any]:
        """Converts an MLIR type.

        Raises:
            TypeError: It is not a value type of the `mo` dialect.
        """
        if isinstance(t, mlir.TensorType):
            return TensorType.from_mlir(t)
        if isinstance(t, mlir.BufferType):
            return BufferType.from_mlir(t)
        if isinstance(t, mlir.ChainType):
            return _ChainType()
        if isinstance(t, mlir.OpaqueType):
            return _OpaqueType.from_mlir(t)
        raise TypeError(f"{t} is not a type of a graph's value")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Type):
            return NotImplemented
        return bool(self.to_mlir() == cast("Type[Any]", other).to_mlir())

    def __hash__(self) -> int:
        return hash(self.to_mlir())


class _ShapedType(Type[MlirType]):
    dtype: DType
    shape: Shape
    device: DeviceRef

    def __init__(
        self, dtype: DType, shape: ShapeLike, device: Device | DeviceRef | None = None
    ) -> None:
        if not isinstance(dtype, DType):  # pyright: ignore[reportUnnecessaryIsInstance]
            # a dtype of NumPy or torch, or a name
            word = getattr(dtype, "__name__", str(dtype)).rpartition(".")[2]
            near = f"such as DType.{word}" if word in DType.__members__ else "a member of max.dtype"
            raise TypeError(
                f"{type(self).__name__}: the dtype is {dtype!r}, expected a DType, {near}; a type is "
                "made from dtype, shape, device, in this order"
            )
        self.dtype = dtype
        self.shape = Shape(shape)
        self.device = DeviceRef.CPU() if device is None else DeviceRef.from_device(device)
        for axis, dim in enumerate(self.shape):
            if dim.expr.is_static and dim.expr.value < 0:
                raise ArgumentError(
                    f"{type(self).__name__}: axis {axis} has size {dim}, expected 0 or more"
                )

    @property
    def rank(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    def num_elements(self) -> int:
        """The product of the dimensions.

        Raises:
            RuntimeError: A dimension is symbolic.
        """
        if not Shape.is_static(self.shape):
            raise RuntimeError(f"{self} has no fixed number of elements: a dimension is symbolic")
        return math.prod(dim.dim for dim in self.shape)

    def _repr_html_(self) -> str:
        dims = ", ".join(map(str, self.shape))
        return _html.text_html(f"{type(self).__name__} {self.dtype.name}[{dims}] on {self.device}")

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(dtype={self.dtype}, shape={self.shape}, device={self.device})"
        )

    @property
    def parameters(self) -> Iterable[SymbolicDim]:
        """The symbolic dimensions on which the shape depends."""
        return self.shape.parameters


class TensorType(_ShapedType["mlir.TensorType"]):
    """The type of an immutable tensor: element type, shape, device.

    Args:
        dtype: The element type.
        shape: The dimensions: ints, names of symbols, `Dim` objects.
        device: The device of the elements; the CPU by default.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: A dimension is negative or its name not an identifier.
    """

    _layout: FilterLayout | None

    def __init__(
        self,
        dtype: DType,
        shape: ShapeLike,
        device: Device | DeviceRef | None = None,
        _layout: FilterLayout | None = None,
    ) -> None:
        super().__init__(dtype, shape, device)
        self._layout = _layout

    def cast(self, dtype: DType) -> TensorType:
        """This type with another element type."""
        return TensorType(dtype, self.shape, self.device, self._layout)

    def as_buffer(self) -> BufferType:
        """The buffer type of this element type, shape and device."""
        return BufferType(self.dtype, self.shape, self.device)

    @classmethod
    def from_mlir(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls, type: mlir.TensorType
    ) -> TensorType:
        """The tensor type of an MLIR type."""
        result = cls.__new__(cls)
        result.dtype = type.dtype
        result.shape = Shape.from_exprs(type.shape)
        result.device = _device_from_mlir(type.device)
        result._layout = FilterLayout(type.layout) if type.layout else None
        return result

    def to_mlir(self) -> mlir.TensorType:
        """The MLIR type."""
        layout = "" if self._layout is None else self._layout.value
        return mlir.TensorType.get(self.dtype, self.shape.exprs, self.device.to_mlir(), layout)


class BufferType(_ShapedType["mlir.BufferType"]):
    """The type of a mutable tensor: element type, shape, device.

    Args:
        dtype: The element type.
        shape: The dimensions: ints, names of symbols, `Dim` objects.
        device: The device of the elements; the CPU by default.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: A dimension is negative or its name not an identifier.
    """

    def cast(self, dtype: DType) -> BufferType:
        """This type with another element type."""
        return BufferType(dtype, self.shape, self.device)

    def as_tensor(self) -> TensorType:
        """The tensor type of this element type, shape and device."""
        return TensorType(self.dtype, self.shape, self.device)

    @classmethod
    def from_mlir(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls, type: mlir.BufferType
    ) -> BufferType:
        """The buffer type of an MLIR type."""
        result = cls.__new__(cls)
        result.dtype = type.dtype
        result.shape = Shape.from_exprs(type.shape)
        result.device = _device_from_mlir(type.device)
        return result

    def to_mlir(self) -> mlir.BufferType:
        """The MLIR type."""
        return mlir.BufferType.get(self.dtype, self.shape.exprs, self.device.to_mlir())


class _ChainType(Type["mlir.ChainType"]):
    """The type of a chain, the order of side effects."""

    def to_mlir(self) -> mlir.ChainType:
        return mlir.ChainType.get()

    def __repr__(self) -> str:
        return "_ChainType()"


class _OpaqueType(Type["mlir.OpaqueType"]):
    """The type of a value that only custom ops interpret.

    Args:
        name: The name of the type.
        parameters: The parameters of the type; ``size`` and ``dtype`` describe the memory of its values.
    """

    def __init__(
        self, name: str, parameters: Mapping[str, bool | int | str | DType] | None = None
    ) -> None:
        self.name = name
        self.parameters = dict(parameters or {})

    def to_mlir(self) -> mlir.OpaqueType:
        # in one order, so that equal types are equal attributes
        pairs = sorted((key, mlir.to_attr(value)) for key, value in self.parameters.items())
        return mlir.OpaqueType((self.name, tuple(pairs)))

    @classmethod
    def from_mlir(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls, type: mlir.OpaqueType
    ) -> _OpaqueType:
        return cls(
            type.type_name, {key: mlir.from_attr(value) for key, value in type.parameters.items()}
        )

    def __repr__(self) -> str:
        return f"_OpaqueType(name={self.name!r}, parameters={self.parameters!r})"
