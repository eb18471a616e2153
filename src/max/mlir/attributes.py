"""Attributes of `mo` ops: conversion of Python values, and constants that are never copied."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
from xdsl.ir import Attribute, Data

from max._host.process_caches import cached_results
from max.dtype import DType
from max.mlir.builtin import (
    ArrayAttr,
    BoolAttr,
    DictionaryAttr,
    FloatAttr,
    IntAttr,
    IntsAttr,
    StringAttr,
    SymbolRefAttr,
    UnitAttr,
)
from max.mlir.dims import DimExpr
from max.mlir.types import (
    DeviceRefAttr,
    DimAttr,
    DTypeAttr,
    ShapeAttr,
    dtype_from_text,
    dtype_text,
)

if TYPE_CHECKING:
    from xdsl.parser import AttrParser
    from xdsl.printer import Printer

__all__ = [
    "INLINE_LIMIT",
    "DenseAttr",
    "ResourceAttr",
    "constant_attr",
    "from_attr",
    "to_attr",
]

INLINE_LIMIT = 64
"""Constants with more elements are resources, which the text refers to by name."""

Array = npt.NDArray[Any]


class _Blob:
    """An array that compares by its contents."""

    __slots__ = ("_hash", "array")

    def __init__(self, array: Array) -> None:
        self.array = array
        self._hash: int | None = None

    def _key(self) -> tuple[np.dtype[Any], tuple[int, ...], bytes]:
        return self.array.dtype, self.array.shape, self.array.tobytes()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Blob) and self._key() == other._key()

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(self._key())
        return self._hash

    def __repr__(self) -> str:
        return f"{self.array.dtype}{list(self.array.shape)}"


class _Resource:
    """A named array that compares by name and address, not by its contents."""

    __slots__ = ("array", "key")

    def __init__(self, key: str, array: Array) -> None:
        self.key = key
        self.array = array

    def _identity(self) -> tuple[object, ...]:
        array = self.array
        return self.key, array.ctypes.data, array.shape, array.strides, array.dtype

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Resource) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def __repr__(self) -> str:
        return f"{self.key}: {self.array.dtype}{list(self.array.shape)}"


class DenseAttr(Data[_Blob]):
    """A small constant, printed inline: ``#mo.dense<f32, [2, 2], [1.0, 2.0, 3.0, 4.0]>``."""

    name = "mo.dense"

    @staticmethod
    def of(array: Array) -> DenseAttr:
        """The attribute of `array`, which must not be modified afterwards."""
        return DenseAttr(_Blob(array))

    @property
    def array(self) -> Array:
        """The elements."""
        return self.data.array

    @classmethod
    def parse_parameter(cls, parser: AttrParser) -> _Blob:
        """Parses `<dtype, [shape], [elements]>`."""
        with parser.in_angle_brackets():
            position = parser.pos
            try:
                dtype = dtype_from_text(parser.parse_identifier(" (an element type)"))
            except ValueError as error:
                parser.raise_error(str(error), position)
            parser.parse_punctuation(",")
            shape = parser.parse_comma_separated_list(
                parser.Delimiter.SQUARE,
                lambda: parser.parse_integer(allow_boolean=False, allow_negative=False),
            )
            parser.parse_punctuation(",")
            position = parser.pos
            values = parser.parse_comma_separated_list(
                parser.Delimiter.SQUARE, lambda: _parse_element(parser, dtype)
            )
        if math.prod(shape) != len(values):
            parser.raise_error(f"{len(values)} elements do not fill the shape {shape}", position)
        return _Blob(np.array(values, dtype=dtype.to_numpy()).reshape(shape))

    def print_parameter(self, printer: Printer) -> None:
        array = self.array
        dtype = DType.from_numpy(array.dtype)
        elements = ", ".join([_element_text(x, dtype) for x in array.reshape(-1)])
        printer.print_string(f"<{dtype_text(dtype)}, {list(array.shape)}, [{elements}]>")


class ResourceAttr(Data[_Resource]):
    """A large constant by name: ``#mo.resource<"constant_0">``. The array is not copied."""

    name = "mo.resource"

    @staticmethod
    def of(key: str, array: Array) -> ResourceAttr:
        """The attribute of `array` under the name `key`, which must be unique in the module."""
        return ResourceAttr(_Resource(key, array))

    @property
    def key(self) -> str:
        """The name of the constant in the module."""
        return self.data.key

    @property
    def array(self) -> Array:
        """The elements, not copied."""
        return self.data.array

    @classmethod
    def parse_parameter(cls, parser: AttrParser) -> _Resource:
        """Parses `<"key">`, the name of an array among the parser's resources."""
        with parser.in_angle_brackets():
            position = parser.pos
            key = parser.parse_str_literal(" (the name of a resource)")
        resources: Mapping[str, Array] = getattr(parser.ctx, "resources", {})
        if key not in resources:
            keys = ", ".join(resources) or "none"
            parser.raise_error(
                f'the constant "{key}" is a resource, and was not given to the parser '
                f"(parse_module(text, resources=...)); given: {keys}",
                position,
            )
        return _Resource(key, resources[key])

    def print_parameter(self, printer: Printer) -> None:
        with printer.in_angle_brackets():
            printer.print_string_literal(self.key)


def constant_attr(array: Array, key: str) -> DenseAttr | ResourceAttr:
    """The attribute of a constant: inline up to `INLINE_LIMIT` elements, else a resource named `key`."""
    return DenseAttr.of(array) if array.size <= INLINE_LIMIT else ResourceAttr.of(key, array)


def _element_text(value: Any, dtype: DType) -> str:
    """The text of an element, from which `_parse_element` restores the same bits."""
    if dtype is DType.bool:
        return "true" if value else "false"
    if not dtype.is_float():
        return str(int(value))
    number = float(value)
    if not math.isfinite(number):
        # the bit pattern preserves sign and payload of NaN
        return f'"0x{np.asarray(value).tobytes()[::-1].hex()}"'
    # the fewest digits that give the same number again
    text = str(value) if dtype is DType.float32 else repr(number)
    # the point tells it from an integer
    mantissa, exponent, power = text.partition("e")
    return text if "." in mantissa else f"{mantissa}.0{exponent}{power}"


def _parse_element(parser: AttrParser, dtype: DType) -> Any:
    """Parses an element; a string has the bits of a float that is not finite."""
    if dtype is DType.bool:
        return parser.parse_boolean(" (an element)")
    if not dtype.is_float():
        return parser.parse_integer(allow_boolean=False)
    if (bits := parser.parse_optional_str_literal()) is not None:
        raw = bytes.fromhex(bits.removeprefix("0x"))[::-1]
        return np.frombuffer(raw, dtype=dtype.to_numpy())[0]
    return parser.parse_number(allow_boolean=False)


@cached_results(4096)
def _int_attr(value: int) -> Attribute:
    return IntAttr(value)


@cached_results(1024)
def _float_attr(value: float) -> Attribute:
    return FloatAttr(value)


@cached_results(4096)
def _string_attr(value: str) -> StringAttr:
    return StringAttr(value)


@cached_results(1024)
def _ints_attr(value: tuple[int, ...]) -> Attribute:
    return IntsAttr(value)


_TRUE = BoolAttr(True)
_FALSE = BoolAttr(False)
_UNIT = UnitAttr()


def to_attr(value: Any) -> Attribute:
    """Converts a Python value to an attribute.

    Accepts bool, int, float, str, None, `DType`, `DimExpr`, a tuple or list of ints (an array), of `DimExpr` (a shape)
    or of other values, a mapping from names to values, and attributes, which are returned unchanged.

    Raises:
        TypeError: The value is of another type.
    """
    # exact types: a bool is an int too
    kind = cast(type[Any], type(value))
    if kind is bool:
        return _TRUE if value else _FALSE
    if kind is int:
        return _int_attr(value)
    if kind is float:
        # the cache compares by ==, which confuses -0.0 with 0.0 and never finds NaN
        uncacheable = value != value or (value == 0 and math.copysign(1, value) < 0)
        return FloatAttr(value) if uncacheable else _float_attr(value)
    if kind is str:
        return _string_attr(value)
    if kind is DimExpr:
        return DimAttr(value)
    if isinstance(value, Attribute):
        return value
    if value is None:
        return _UNIT
    if isinstance(value, DType):
        return DTypeAttr(value)
    if isinstance(value, tuple | list):
        items = cast("Sequence[Any]", value)
        if all(type(v) is int for v in items):
            return _ints_attr(tuple(items))
        if any(isinstance(v, DimExpr) for v in items):
            return ShapeAttr.of(items)
        return ArrayAttr(tuple([to_attr(v) for v in items]))
    if isinstance(value, Mapping):
        pairs = cast("Mapping[str, Any]", value).items()
        return DictionaryAttr(tuple([(str(k), to_attr(v)) for k, v in pairs]))
    if isinstance(value, np.generic):
        return to_attr(cast(Any, value).item())
    raise TypeError(f"{kind.__name__} {value!r} cannot be an attribute of an op")


_HOLDERS: frozenset[type[Attribute]] = frozenset(
    {
        BoolAttr, DTypeAttr, DimAttr, FloatAttr, IntAttr, IntsAttr, ShapeAttr, StringAttr, SymbolRefAttr, UnitAttr,
    }
)  # fmt: skip
"""Attributes whose data is the Python value."""


def from_attr(attr: Attribute) -> Any:
    """Converts an attribute to a Python value, the inverse of `to_attr`; constants become arrays."""
    if type(attr) in _HOLDERS:
        return cast("Data[Any]", attr).data
    if isinstance(attr, DenseAttr | ResourceAttr):
        return attr.array
    if isinstance(attr, ArrayAttr):
        return tuple([from_attr(a) for a in attr.data])
    if isinstance(attr, DictionaryAttr):
        return {k: from_attr(a) for k, a in attr.data}
    if isinstance(attr, DeviceRefAttr):
        return attr
    raise TypeError(f"attribute {attr} has no Python value")
