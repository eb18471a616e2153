"""Element types, value types and parameter annotations of the kernel language."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# values of the user's program are Any: these functions check their types

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import ml_dtypes
import numpy as np

from max._dataclass import dataclass


class ScalarType:
    """An element type. Calling it converts a value: ``k.f32(x)``.

    Attributes:
        name: The short name, such as ``f32``.
        long_name: The name in NumPy, such as ``float32``.
        kind: ``i`` signed, ``u`` unsigned, ``f`` float, ``b`` bool.
        bits: The number of bits of an element.
        numpy: The dtype of NumPy or ml_dtypes.
    """

    __slots__ = ("bits", "kind", "long_name", "name", "numpy")

    #: How a call converts a value in plain Python; set by ``max.kernel.language.values``.
    convert: Callable[[Any, ScalarType], Any]

    def __init__(self, name: str, long_name: str, kind: str, bits: int, numpy: Any) -> None:
        self.name = name
        self.long_name = long_name
        self.kind = kind
        self.bits = bits
        self.numpy = np.dtype(numpy)

    def __call__(self, x: Any) -> Any:
        return ScalarType.convert(x, self)

    def __repr__(self) -> str:
        return f"k.{self.name}"

    @property
    def size(self) -> int:
        """Bytes of one element in memory."""
        return max(self.bits // 8, 1)

    @property
    def is_float(self) -> bool:
        """Whether elements are floating-point numbers."""
        return self.kind == "f"

    @property
    def is_integer(self) -> bool:
        """Whether elements are signed or unsigned integers; bool is neither."""
        return self.kind in "iu"

    @property
    def is_narrow_float(self) -> bool:
        """Whether arithmetic widens the type to ``f32``."""
        return self.kind == "f" and self.bits < 32


i8 = ScalarType("i8", "int8", "i", 8, np.int8)
i16 = ScalarType("i16", "int16", "i", 16, np.int16)
i32 = ScalarType("i32", "int32", "i", 32, np.int32)
i64 = ScalarType("i64", "int64", "i", 64, np.int64)
u8 = ScalarType("u8", "uint8", "u", 8, np.uint8)
u16 = ScalarType("u16", "uint16", "u", 16, np.uint16)
u32 = ScalarType("u32", "uint32", "u", 32, np.uint32)
u64 = ScalarType("u64", "uint64", "u", 64, np.uint64)
f8e4m3fn = ScalarType("f8e4m3fn", "float8_e4m3fn", "f", 8, ml_dtypes.float8_e4m3fn)
f8e4m3fnuz = ScalarType("f8e4m3fnuz", "float8_e4m3fnuz", "f", 8, ml_dtypes.float8_e4m3fnuz)
f8e5m2 = ScalarType("f8e5m2", "float8_e5m2", "f", 8, ml_dtypes.float8_e5m2)
f8e5m2fnuz = ScalarType("f8e5m2fnuz", "float8_e5m2fnuz", "f", 8, ml_dtypes.float8_e5m2fnuz)
f4e2m1fn = ScalarType("f4e2m1fn", "float4_e2m1fn", "f", 8, ml_dtypes.float4_e2m1fn)
f6e2m3fn = ScalarType("f6e2m3fn", "float6_e2m3fn", "f", 8, ml_dtypes.float6_e2m3fn)
f6e3m2fn = ScalarType("f6e3m2fn", "float6_e3m2fn", "f", 8, ml_dtypes.float6_e3m2fn)
f16 = ScalarType("f16", "float16", "f", 16, np.float16)
bf16 = ScalarType("bf16", "bfloat16", "f", 16, ml_dtypes.bfloat16)
f32 = ScalarType("f32", "float32", "f", 32, np.float32)
f64 = ScalarType("f64", "float64", "f", 64, np.float64)
bool_ = ScalarType("bool", "bool", "b", 1, np.bool_)

SCALAR_TYPES: tuple[ScalarType, ...] = (
    i8,
    i16,
    i32,
    i64,
    u8,
    u16,
    u32,
    u64,
    f8e4m3fn,
    f8e4m3fnuz,
    f8e5m2,
    f8e5m2fnuz,
    f4e2m1fn,
    f6e2m3fn,
    f6e3m2fn,
    f16,
    bf16,
    f32,
    f64,
    bool_,
)
_BY_NAME = {name: t for t in SCALAR_TYPES for name in (t.name, t.long_name)}


def scalar_type(dtype: Any) -> ScalarType:
    """The element type that ``dtype`` stands for.

    Args:
        dtype: a kernel type, its name (``"f32"`` or ``"float32"``), a ``max.dtype.DType`` or a NumPy dtype.

    Raises:
        TypeError: the kernel language has no such element type.
    """
    if isinstance(dtype, ScalarType):
        return dtype
    name = dtype if isinstance(dtype, str) else getattr(dtype, "name", None)
    if name not in _BY_NAME and dtype is not None:
        try:
            name = np.dtype(dtype).name
        except (TypeError, ValueError):
            name = None
    if name not in _BY_NAME:
        names = ", ".join(t.name for t in SCALAR_TYPES)
        raise TypeError(f"{dtype!r} is no element type of the kernel language; it has {names}")
    return _BY_NAME[name]


@dataclass(frozen=True, slots=True, eq=False)
class Type:
    """The type of a run-time value; interned, so that types compare by identity."""

    dtype: ScalarType
    width: int  # 0: scalar, -1: pointer, else lanes

    @property
    def is_vector(self) -> bool:
        return self.width > 0

    def with_dtype(self, dtype: ScalarType) -> Type:
        """The type with the same lanes and another element type."""
        return _types[dtype, self.width]

    def __str__(self) -> str:
        if self.width == 0:
            return self.dtype.name
        return "ptr" if self.width < 0 else f"{self.dtype.name}x{self.width}"

    def describe(self) -> str:
        """The type as users write it."""
        return f"SIMD[{self.dtype.name}, {self.width}]" if self.width > 0 else str(self)


class _Interned(dict[tuple[ScalarType, int], Type]):
    def __missing__(self, key: tuple[ScalarType, int]) -> Type:
        interned = self[key] = Type(*key)
        return interned


_types = _Interned()
POINTER = _types[u8, -1]
INDEX = _types[i64, 0]
BOOL = _types[bool_, 0]


def scalar(dtype: ScalarType) -> Type:
    """The type of one ``dtype`` value."""
    return _types[dtype, 0]


def vector(dtype: ScalarType, width: int) -> Type:
    """The type of ``width`` lanes of ``dtype``."""
    return _types[dtype, width]


def arithmetic_dtype(dtype: ScalarType) -> ScalarType:
    """The type in which arithmetic on ``dtype`` is done."""
    return f32 if dtype.is_narrow_float else dtype


def common_dtype(a: ScalarType, b: ScalarType) -> ScalarType | None:
    """The smaller of both types that holds every value of the other one, or None."""
    if a is b:
        return a
    if a.kind == "b" or b.kind == "b":
        return None
    if a.is_float and b.is_float:
        if a.bits == b.bits:  # bf16 with f16, two 8-bit formats
            return f32
        return a if a.bits > b.bits else b
    if a.is_float or b.is_float:
        return None
    if a.kind == b.kind:
        return a if a.bits > b.bits else b
    signed, unsigned = (a, b) if a.kind == "i" else (b, a)
    return signed if signed.bits > unsigned.bits else None


@dataclass(frozen=True, slots=True)
class Access:
    """The annotation of a tensor parameter: ``k.Input[k.f32, 2]``."""

    kind: str  # "input", "output" or "inout"
    dtype: ScalarType | None = None
    rank: int | None = None

    @property
    def writable(self) -> bool:
        return self.kind != "input"


def _access(kind: str, parameters: Any) -> Access:
    """The access of an annotation such as `k.Input[dtype, rank]`."""
    if not isinstance(parameters, tuple):
        parameters = (parameters,)
    if not 1 <= len(parameters) <= 2:
        raise TypeError(
            f"k.{kind.capitalize()} takes [dtype] or [dtype, rank], got {len(parameters)} parameters"
        )
    dtype = None if parameters[0] is None else scalar_type(parameters[0])
    rank = parameters[1] if len(parameters) == 2 else None
    if rank is not None and (not isinstance(rank, int) or rank < 0):
        raise TypeError(f"k.{kind.capitalize()}[dtype, rank]: a rank is an integer, got {rank!r}")
    return Access(kind, dtype, rank)


class Value(Protocol):
    """A scalar or a vector: one of run time, or a Python number. It annotates a parameter of a function that kernels
    call, for readers and type checkers; the compiler takes what the caller passes.
    """

    if TYPE_CHECKING:  # see `View`

        def __add__(self, other: Any, /) -> Any: ...
        def __radd__(self, other: Any, /) -> Any: ...
        def __sub__(self, other: Any, /) -> Any: ...
        def __rsub__(self, other: Any, /) -> Any: ...
        def __mul__(self, other: Any, /) -> Any: ...
        def __rmul__(self, other: Any, /) -> Any: ...
        def __truediv__(self, other: Any, /) -> Any: ...
        def __rtruediv__(self, other: Any, /) -> Any: ...
        def __floordiv__(self, other: Any, /) -> Any: ...
        def __rfloordiv__(self, other: Any, /) -> Any: ...
        def __mod__(self, other: Any, /) -> Any: ...
        def __rmod__(self, other: Any, /) -> Any: ...
        def __eq__(self, other: Any, /) -> Any: ...
        def __ne__(self, other: Any, /) -> Any: ...
        def __lt__(self, other: Any, /) -> Any: ...
        def __le__(self, other: Any, /) -> Any: ...
        def __gt__(self, other: Any, /) -> Any: ...
        def __ge__(self, other: Any, /) -> Any: ...
        def __neg__(self) -> Any: ...
        def __pos__(self) -> Any: ...
        def __abs__(self) -> Any: ...


class Mask(Protocol):
    """A condition of each lane, or one for all. An annotation like `Value`."""

    if TYPE_CHECKING:  # see `View`

        def __and__(self, other: Any, /) -> Any: ...
        def __rand__(self, other: Any, /) -> Any: ...
        def __or__(self, other: Any, /) -> Any: ...
        def __ror__(self, other: Any, /) -> Any: ...
        def __xor__(self, other: Any, /) -> Any: ...
        def __rxor__(self, other: Any, /) -> Any: ...
        def __invert__(self) -> Any: ...


class Integer(Value, Mask, Protocol):
    """A `Value` of integers: a size, an index, bits."""

    if TYPE_CHECKING:  # see `View`

        def __lshift__(self, other: Any, /) -> Any: ...
        def __rlshift__(self, other: Any, /) -> Any: ...
        def __rshift__(self, other: Any, /) -> Any: ...
        def __rrshift__(self, other: Any, /) -> Any: ...
        def __index__(self) -> int: ...


class View:
    """A tensor, a part of one, scratch memory or a tile. An annotation like `Value`."""

    # the methods of views in kernels, which `max.kernel.frontend.views.methods` and the interpreter carry out
    if TYPE_CHECKING:
        shape: tuple[Any, ...]
        strides: tuple[Any, ...]
        rank: int
        size: Any
        dtype: ScalarType
        is_contiguous: bool

        def __getitem__(self, index: Any) -> Any: ...
        def __setitem__(self, index: Any, value: Any) -> None: ...
        def load(
            self, *indices: Any, width: Any = None, mask: Any = None, axis: int = -1, other: Any = 0
        ) -> Any: ...
        def store(self, *indices: Any, value: Any, mask: Any = None, axis: int = -1) -> None: ...
        def gather(self, indices: Any, mask: Any = None, other: Any = 0) -> Any: ...
        def scatter(self, indices: Any, value: Any, mask: Any = None) -> None: ...
        def atomic_add(self, *indices: Any, value: Any) -> Any: ...
        def prefetch(self, *indices: Any, write: bool = False, locality: int = 3) -> None: ...
        def reshape(self, *shape: Any) -> Any: ...
        def view(self, dtype: Any) -> Any: ...
        def transpose(self, *axes: Any) -> Any: ...


class Input(View):
    """A tensor operand that the kernel reads. ``k.Input[dtype, rank]`` fixes dtype and rank."""

    access = Access("input")

    def __class_getitem__(cls, parameters: Any) -> Access:
        return _access("input", parameters)


class Output(View):
    """A tensor result that the kernel writes. ``k.Output[dtype, rank]`` fixes dtype and rank."""

    access = Access("output")

    def __class_getitem__(cls, parameters: Any) -> Access:
        return _access("output", parameters)


class InOut(View):
    """A mutable operand (a buffer) that the kernel reads and writes."""

    access = Access("inout")

    def __class_getitem__(cls, parameters: Any) -> Access:
        return _access("inout", parameters)


@dataclass(frozen=True, slots=True)
class SIMDAnnotation:
    """``k.SIMD[dtype, width]`` as an annotation."""

    dtype: ScalarType
    width: int


class SIMD(Integer):
    """A vector type for annotations: ``k.SIMD[k.f32, 16]``. Bare, any scalar or vector of run time."""

    if TYPE_CHECKING:  # see `View`
        dtype: ScalarType
        width: int

        def __getitem__(self, lane: Any, /) -> Any: ...

    def __class_getitem__(cls, parameters: Any) -> SIMDAnnotation:
        dtype, width = parameters
        return SIMDAnnotation(scalar_type(dtype), width)


class Context:
    """The annotation of the parameter that gives workers, barriers, scratch memory and the target."""

    if TYPE_CHECKING:  # see `_View`
        target: Any
        worker: Any
        num_workers: Any

        def parallel(self, shape: Any, grain: Any = 0) -> Iterator[Any]: ...
        def chunks(
            self, total: Any, grain: Any = 0, multiple: int = 1
        ) -> Iterator[tuple[Any, Any]]: ...
        def barrier(self) -> None: ...
        def scratch(self, dtype: Any, shape: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What is known at compile time about a tensor argument.

    Args:
        dtype: the element type (anything ``scalar_type`` takes).
        shape: one entry an axis: an int (static), None (run time) or a string (run time; equal names are equal sizes).
        strides: in elements, one entry an axis, None for run time; None for a contiguous tensor.
    """

    dtype: ScalarType
    shape: tuple[int | str | None, ...]
    strides: tuple[int | None, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", scalar_type(self.dtype))
        object.__setattr__(self, "shape", tuple(self.shape))
        if self.strides is not None:
            object.__setattr__(self, "strides", tuple(self.strides))
            if len(self.strides) != len(self.shape):
                raise ValueError(
                    f"TensorSpec: {len(self.strides)} strides for {len(self.shape)} dims"
                )

    @property
    def rank(self) -> int:
        """The number of dimensions."""
        return len(self.shape)
