"""The types of `mo` values (tensors, buffers, chains, opaque values) and the attributes that they contain."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from xdsl.ir import Attribute, Data, TypeAttribute

from max._host.process_caches import cached_results
from max.dtype import DType
from max.mlir.builtin import from_xdsl
from max.mlir.dim_parser import parse_expression
from max.mlir.dims import DimExpr

if TYPE_CHECKING:
    from xdsl.parser import AttrParser
    from xdsl.printer import Printer

__all__ = [
    "BufferType",
    "ChainType",
    "DTypeAttr",
    "DeviceRefAttr",
    "DimAttr",
    "OpaqueType",
    "ShapeAttr",
    "ShapedType",
    "TensorType",
    "dtype_from_text",
    "dtype_text",
]

_DTYPE_TEXT = {
    DType.bool: "bool",
    DType.int8: "si8",
    DType.int16: "si16",
    DType.int32: "si32",
    DType.int64: "si64",
    DType.uint8: "ui8",
    DType.uint16: "ui16",
    DType.uint32: "ui32",
    DType.uint64: "ui64",
    DType.float4_e2m1fn: "f4e2m1fn",
    DType.float6_e2m3fn: "f6e2m3fn",
    DType.float6_e3m2fn: "f6e3m2fn",
    DType.float8_e8m0fnu: "f8e8m0fnu",
    DType.float8_e4m3fn: "f8e4m3fn",
    DType.float8_e4m3fnuz: "f8e4m3fnuz",
    DType.float8_e5m2: "f8e5m2",
    DType.float8_e5m2fnuz: "f8e5m2fnuz",
    DType.float16: "f16",
    DType.bfloat16: "bf16",
    DType.float32: "f32",
    DType.float64: "f64",
}
_DTYPE_FROM_TEXT = {text: dtype for dtype, text in _DTYPE_TEXT.items()}


def dtype_text(dtype: DType) -> str:
    """The name of an element type in MLIR text, such as ``si64``, ``bf16``."""
    return _DTYPE_TEXT[dtype]


def dtype_from_text(text: str) -> DType:
    """Parses the name of an element type in MLIR text.

    Raises:
        ValueError: No element type has this name.
    """
    if (dtype := _DTYPE_FROM_TEXT.get(text)) is None:
        raise ValueError(f"{text!r} is not an element type; expected {', '.join(_DTYPE_FROM_TEXT)}")
    return dtype


class _ParserSource:
    """A `TokenSource` on an xDSL parser."""

    def __init__(self, parser: AttrParser) -> None:
        self._parser = parser

    def name(self) -> str | None:
        return self._parser.parse_optional_identifier()

    def integer(self) -> int | None:
        return self._parser.parse_optional_integer(allow_boolean=False, allow_negative=False)

    def accept(self, token: str) -> bool:
        if token == "//":
            return self._parser.parse_optional_keyword("floordiv") is not None
        if token in ("+", "-", "*", "(", ")"):
            return self._parser.parse_optional_punctuation(token) is not None
        return False

    def fail(self, message: str) -> Exception:
        self._parser.raise_error(message)


def _parse_dim(parser: AttrParser) -> DimExpr:
    return parse_expression(_ParserSource(parser))


def _parse_dims(parser: AttrParser) -> tuple[DimExpr, ...]:
    return tuple(
        parser.parse_comma_separated_list(parser.Delimiter.SQUARE, lambda: _parse_dim(parser))
    )


def _parse_dtype(parser: AttrParser) -> DType:
    """Parses the name of an element type."""
    position = parser.pos
    text = parser.parse_identifier(" (an element type)")
    try:
        return dtype_from_text(text)
    except ValueError as error:
        parser.raise_error(str(error), position)


def dims_text(dims: Iterable[DimExpr]) -> str:
    """Formats dimensions as MLIR text: ``[batch, n floordiv 2, 10]``."""
    return f"[{', '.join([dim.text('floordiv') for dim in dims])}]"


class DeviceRefAttr(Data[tuple[str, int]]):
    """A device by kind (``cpu``, ``gpu``) and id: ``#mo.device<cpu:0>``."""

    name = "mo.device"

    @staticmethod
    @cached_results(256)
    def get(  # pyright: ignore[reportIncompatibleMethodOverride]
        label: str, id: int = 0
    ) -> DeviceRefAttr:
        """The attribute of device `id` of kind `label`."""
        return DeviceRefAttr((label, id))

    @property
    def label(self) -> str:
        """The kind of device: ``cpu`` or ``gpu``."""
        return self.data[0]

    @property
    def id(self) -> int:
        """The id of the device among those of its kind."""
        return self.data[1]

    @property
    def text(self) -> str:
        """The device as text, such as ``cpu:0``."""
        return f"{self.data[0]}:{self.data[1]}"

    @classmethod
    def parse_text(cls, parser: AttrParser) -> DeviceRefAttr:
        """Parses ``cpu:0``."""
        label = parser.parse_identifier(" (a device)")
        parser.parse_punctuation(":")
        return cls.get(label, parser.parse_integer(allow_boolean=False, allow_negative=False))

    @classmethod
    def parse_parameter(cls, parser: AttrParser) -> tuple[str, int]:
        with parser.in_angle_brackets():
            return cls.parse_text(parser).data

    def print_parameter(self, printer: Printer) -> None:
        printer.print_string(f"<{self.text}>")


class DimAttr(Data[DimExpr]):
    """One dimension: ``#mo.dim<batch * 5>``."""

    name = "mo.dim"

    @classmethod
    def parse_parameter(cls, parser: AttrParser) -> DimExpr:
        with parser.in_angle_brackets():
            return _parse_dim(parser)

    def print_parameter(self, printer: Printer) -> None:
        printer.print_string(f"<{self.data.text('floordiv')}>")


class ShapeAttr(Data[tuple[DimExpr, ...]]):
    """A list of dimensions: ``#mo.shape<[batch, 10]>``."""

    name = "mo.shape"

    @staticmethod
    def of(dims: Iterable[int | str | DimExpr]) -> ShapeAttr:
        """The attribute of `dims`: ints, names of symbols, expressions."""
        return ShapeAttr(tuple([DimExpr.of(dim) for dim in dims]))

    @classmethod
    def parse_parameter(cls, parser: AttrParser) -> tuple[DimExpr, ...]:
        with parser.in_angle_brackets():
            return _parse_dims(parser)

    def print_parameter(self, printer: Printer) -> None:
        printer.print_string(f"<{dims_text(self.data)}>")


class DTypeAttr(Data[DType]):
    """An element type as a parameter: ``#mo.dtype<bf16>``."""

    name = "mo.dtype"

    @classmethod
    def parse_parameter(cls, parser: AttrParser) -> DType:
        with parser.in_angle_brackets():
            return _parse_dtype(parser)

    def print_parameter(self, printer: Printer) -> None:
        printer.print_string(f"<{dtype_text(self.data)}>")


class _Shaped(NamedTuple):
    """The data of tensor and buffer types."""

    shape: tuple[DimExpr, ...]
    dtype: DType
    device: DeviceRefAttr
    layout: str


class ShapedType(Data[_Shaped], TypeAttribute):
    """The base of tensor and buffer types: shape, element type, device."""

    @property
    def shape(self) -> tuple[DimExpr, ...]:
        """The dimensions."""
        return self.data.shape

    @property
    def rank(self) -> int:
        """The number of dimensions."""
        return len(self.data.shape)

    @property
    def dtype(self) -> DType:
        """The element type."""
        return self.data.dtype

    @property
    def device(self) -> DeviceRefAttr:
        """The device of the elements."""
        return self.data.device

    @property
    def layout(self) -> str:
        """The layout of a convolution filter, such as ``RSCF``; empty for other tensors."""
        return self.data.layout

    @property
    def static_shape(self) -> tuple[int, ...] | None:
        """The shape as ints, or None if a dimension is symbolic."""
        shape = self.data.shape
        return tuple([d.value for d in shape]) if all(d.is_static for d in shape) else None

    @property
    def num_elements(self) -> DimExpr:
        """The product of the dimensions."""
        product = DimExpr.constant(1)
        for dim in self.data.shape:
            product = product * dim
        return product

    def with_shape(self, shape: Iterable[DimExpr | int]) -> TensorType:
        """The tensor type of another shape, with this element type and device."""
        return TensorType.get(self.data.dtype, shape, self.data.device)

    def with_dtype(self, dtype: DType) -> TensorType:
        """The tensor type of another element type, with this shape and device."""
        return _tensor_type(dtype, self.data.shape, self.data.device, "")

    @property
    def short(self) -> str:
        """The type for messages: ``f32[batch, 10]``, with the device unless it is ``cpu:0``."""
        where = "" if self.device.data == ("cpu", 0) else f" on {self.device.text}"
        dims = ", ".join([dim.text() for dim in self.shape])
        return f"{dtype_text(self.dtype)}[{dims}]{where}"

    @classmethod
    def parse_parameter(cls, parser: AttrParser) -> _Shaped:
        """Parses `<[dims], dtype, device>`, with an optional layout at the end."""
        with parser.in_angle_brackets():
            shape = _parse_dims(parser)
            parser.parse_punctuation(",")
            dtype = _parse_dtype(parser)
            parser.parse_punctuation(",")
            device = DeviceRefAttr.parse_text(parser)
            layout = ""
            if parser.parse_optional_punctuation(",") is not None:
                layout = parser.parse_identifier(" (a layout)")
        return _Shaped(shape, dtype, device, layout)

    def print_parameter(self, printer: Printer) -> None:
        shape, dtype, device, layout = self.data
        suffix = f", {layout}" if layout else ""
        printer.print_string(f"<{dims_text(shape)}, {dtype_text(dtype)}, {device.text}{suffix}>")


class TensorType(ShapedType):
    """An immutable tensor: ``!mo.tensor<[batch, 10], f32, cpu:0>``."""

    name = "mo.tensor"

    @staticmethod
    def get(  # pyright: ignore[reportIncompatibleMethodOverride]
        dtype: DType,
        shape: Iterable[DimExpr | int | str],
        device: DeviceRefAttr | None = None,
        layout: str = "",
    ) -> TensorType:
        """The tensor type of `dtype`, `shape` (ints, names, expressions) and `device` (``cpu:0``)."""
        dims = tuple([d if type(d) is DimExpr else DimExpr.of(d) for d in shape])
        return _tensor_type(dtype, dims, device or _CPU, layout)

    def as_buffer(self) -> BufferType:
        """The buffer type of this shape, element type and device."""
        return BufferType(self.data)


class BufferType(ShapedType):
    """A mutable tensor: ``!mo.buffer<[batch, 10], f32, cpu:0>``."""

    name = "mo.buffer"

    @staticmethod
    def get(  # pyright: ignore[reportIncompatibleMethodOverride]
        dtype: DType,
        shape: Iterable[DimExpr | int | str],
        device: DeviceRefAttr | None = None,
    ) -> BufferType:
        """The buffer type of `dtype`, `shape` (ints, names, expressions) and `device` (``cpu:0``)."""
        return BufferType(TensorType.get(dtype, shape, device).data)

    @property
    def short(self) -> str:
        """The type for messages: ``buffer f32[batch, 10]``."""
        return f"buffer {super().short}"

    def as_tensor(self) -> TensorType:
        """The tensor type of this shape, element type and device."""
        return _tensor_type(*_reorder(self.data))


def _reorder(data: _Shaped) -> tuple[DType, tuple[DimExpr, ...], DeviceRefAttr, str]:
    return data.dtype, data.shape, data.device, data.layout


class ChainType(Data[None], TypeAttribute):
    """A token that orders side effects: ``!mo.chain``."""

    name = "mo.chain"

    @staticmethod
    @cached_results(1)
    def get() -> ChainType:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The chain type."""
        return ChainType(None)

    @classmethod
    def parse_parameter(cls, parser: AttrParser) -> None:
        return None

    def print_parameter(self, printer: Printer) -> None:
        pass


class OpaqueType(Data[tuple[str, tuple[tuple[str, Attribute], ...]]], TypeAttribute):
    """A value that only custom ops interpret: ``!mo.opaque<"name">``, with optional parameters."""

    name = "mo.opaque"

    @property
    def type_name(self) -> str:
        """The name of the type."""
        return self.data[0]

    @property
    def parameters(self) -> dict[str, Attribute]:
        """The parameters of the type."""
        return dict(self.data[1])

    @classmethod
    def parse_parameter(cls, parser: AttrParser) -> tuple[str, tuple[tuple[str, Attribute], ...]]:
        """Parses `<"name">`, with an optional dictionary of parameters."""
        with parser.in_angle_brackets():
            name = parser.parse_str_literal(" (the name of an opaque type)")
            parameters: dict[str, Attribute] = {}
            if parser.parse_optional_punctuation(",") is not None:
                parameters = parser.parse_optional_dictionary_attr_dict()
        return name, tuple([(key, from_xdsl(attr)) for key, attr in sorted(parameters.items())])

    def print_parameter(self, printer: Printer) -> None:
        with printer.in_angle_brackets():
            printer.print_string_literal(self.data[0])
            if self.data[1]:
                printer.print_string(", ")
                printer.print_attr_dict(dict(self.data[1]))


@cached_results(8192)
def _tensor_type(
    dtype: DType, shape: tuple[DimExpr, ...], device: DeviceRefAttr, layout: str
) -> TensorType:
    return TensorType(_Shaped(shape, dtype, device, layout))


_CPU = DeviceRefAttr.get("cpu", 0)


def short_types(types: Sequence[Attribute]) -> str:
    """Formats types for messages, separated by commas."""
    return ", ".join(
        t.short if isinstance(t, ShapedType) else str(t).removeprefix("!mo.") for t in types
    )
