"""Scalars, vectors and tiles in plain Python, over NumPy."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# values of the user's program are Any: these functions check their types

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from max.dtype.rounding import convert_rounding_once
from max.kernel.types import (
    ScalarType,
    arithmetic_dtype,
    bool_,
    common_dtype,
    f32,
    f64,
    i64,
    scalar_type,
    u64,
)

Array = np.ndarray[Any, np.dtype[Any]]


class Value:
    """A scalar (``data`` has rank 0) or a vector (rank 1) with the semantics of the language."""

    __slots__ = ("data", "dtype")
    # operators of NumPy's scalars leave the operation to a value
    __array_priority__ = 1000

    def __init__(self, data: Any, dtype: ScalarType) -> None:
        self.data: Array = np.asarray(data, dtype=dtype.numpy)
        self.dtype = dtype

    @property
    def width(self) -> int:
        """Lanes; 1 for a scalar."""
        return self.data.size

    @property
    def is_vector(self) -> bool:
        return self.data.ndim == 1

    def widen(self, width: int) -> Value:
        """A scalar in all lanes of a vector."""
        return self if self.is_vector else Value(np.full(width, self.data), self.dtype)

    def _scalar(self) -> Any:
        if self.is_vector:
            raise TypeError("a condition or an index is a scalar; use k.select, k.any or k.all")
        return self.data[()]

    def __bool__(self) -> bool:
        return bool(self._scalar())

    def __index__(self) -> int:
        if not self.dtype.is_integer:
            raise TypeError(f"an index is an integer, got {self.dtype.name}")
        return int(self._scalar())

    def __int__(self) -> int:
        return int(self._scalar())

    def __float__(self) -> float:
        return float(self._scalar())

    def __getitem__(self, lane: Any) -> Value:
        if not self.is_vector or not 0 <= int(lane) < self.width:
            raise IndexError(f"lane {lane} of {self}")
        return Value(self.data[int(lane)], self.dtype)

    def __repr__(self) -> str:
        kind = f"SIMD[{self.dtype.name}, {self.width}]" if self.is_vector else self.dtype.name
        return f"{kind}({self.data.tolist()})"

    def __format__(self, spec: str) -> str:
        return format(self.data.tolist(), spec)

    def __hash__(self) -> int:
        return hash(self.data.tobytes())

    def __neg__(self) -> Value:
        return unary("neg", self)

    def __pos__(self) -> Value:
        return self

    def __abs__(self) -> Value:
        return unary("abs", self)

    def __invert__(self) -> Value:
        return Value(~self.data, self.dtype)


def _method(op: str, swapped: bool) -> Callable[[Any, Any], Any]:
    if swapped:
        return lambda a, b: binary(op, b, a)
    return lambda a, b: binary(op, a, b)


def _operators() -> None:
    """Defines the operators of `Value`."""
    names = {
        "add": "add",
        "sub": "sub",
        "mul": "mul",
        "truediv": "div",
        "floordiv": "floordiv",
        "mod": "mod",
        "and": "and",
        "or": "or",
        "xor": "xor",
        "lshift": "shl",
        "rshift": "shr",
        "pow": "pow",
    }
    for python, op in names.items():
        setattr(Value, f"__{python}__", _method(op, False))
        setattr(Value, f"__r{python}__", _method(op, True))
    for op in ("eq", "ne", "lt", "le", "gt", "ge"):
        setattr(Value, f"__{op}__", _method(op, False))


_operators()


def value(x: Any) -> Value:
    """A Python number as a value: an int is i64, a float f32."""
    if isinstance(x, Value):
        return x
    if isinstance(x, (bool, np.bool_)):
        return Value(x, bool_)
    if isinstance(x, (int, np.integer)):
        return Value(int(x), i64)
    return Value(x, f32)


def promote_together(*xs: Any) -> tuple[list[Array], ScalarType]:
    """Operands as arrays of one type: literals take the type of the others, smaller types widen."""
    dtype: ScalarType | None = None
    for x in xs:
        if isinstance(x, Value):
            x_dtype = arithmetic_dtype(x.dtype)
            common = x_dtype if dtype is None else common_dtype(dtype, x_dtype)
            if common is None:
                raise TypeError(
                    f"{dtype} and {x_dtype} do not mix; convert one of them, as in k.f32(x)"
                )
            dtype = common
    if dtype is None:
        dtype = f32 if any(isinstance(x, float) for x in xs) else value(xs[0]).dtype
    arrays: list[Array] = []
    for x in xs:
        if isinstance(x, Value):
            arrays.append(x.data.astype(dtype.numpy))
        elif isinstance(x, float) and not dtype.is_float and x % 1 != 0:
            raise TypeError(
                f"{dtype.name} with the literal {x!r}; convert the integer, as in k.f32(x)"
            )
        else:
            arrays.append(np.asarray(x).astype(dtype.numpy))
    return arrays, dtype


class _Tails(threading.local):
    """The masks of the enclosing vector loops of this thread; None for a loop that is not in its tail."""

    def __init__(self) -> None:
        self.masks: list[Array | None] = []


_tails = _Tails()


def begin_run() -> None:
    """Clears the masks of vector loops that an earlier run in this thread may have left."""
    _tails.masks = []


@contextmanager
def tail(mask: Value | None) -> Generator[None]:
    """The body of a vector loop; in its tail the lanes that the mask leaves out do not count as divisors."""
    masks = _tails.masks
    masks.append(None if mask is None else mask.data)
    try:
        yield
    finally:
        masks.pop()


def _check_divisor(a: Array, b: Array, sign: str, operation: str) -> None:
    """Raises ZeroDivisionError if an active lane of an integer division has a divisor of 0."""
    zero = b == 0
    if b.ndim and _tails.masks and (mask := _tails.masks[-1]) is not None:
        zero = zero & mask if mask.shape == zero.shape else zero
    if zero.any():
        if np.broadcast(a, b).ndim:
            raise ZeroDivisionError(f"integer {operation} by zero in a vector")
        raise ZeroDivisionError(f"{a} {sign} 0: integer {operation} by zero")


def _mod(a: Array, b: Array) -> Array:
    if a.dtype.kind == "f":
        return a - np.floor(a / b) * b
    _check_divisor(a, b, "%", "modulo")
    return np.mod(a, b)


def _floordiv(a: Array, b: Array) -> Array:
    if a.dtype.kind == "f":
        return np.floor(a / b)
    _check_divisor(a, b, "//", "division")
    return np.floor_divide(a, b)


def _shift(fn: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    # modulo the width, as in compiled code
    return lambda a, b: fn(a, b & (a.dtype.itemsize * 8 - 1))


_BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "floordiv": _floordiv,
    "mod": _mod,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "shl": _shift(np.left_shift),
    "shr": _shift(np.right_shift),
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "min": np.minimum,
    "max": np.maximum,
}
_COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
#: ``a ** b`` on floats, from ``max.kernel.language.mathlib``.
_float_power: list[Callable[[Any, Any], Any]] = []


def set_float_power(function: Callable[[Any, Any], Any]) -> None:
    """Sets the function of ``a ** b`` on floats."""
    _float_power[:] = [function]


def binary(op: str, a: Any, b: Any) -> Any:
    """A Python operator on values and literals."""
    if not all(isinstance(x, (Value, int, float, np.number, np.bool_)) for x in (a, b)):
        return NotImplemented
    if op == "pow":
        return _power(a, b)
    (x, y), dtype = promote_together(a, b)
    if op == "div" and not dtype.is_float:
        raise TypeError("'/' does not take integers; use '//', or convert with k.f32(...)")
    with np.errstate(all="ignore"):
        result = _BINARY[op](x, y)
    return Value(result, bool_ if op in _COMPARISONS else dtype)


def _power(a: Any, b: Any) -> Any:
    """`a ** b`: repeated products for small constant exponents, else a power of floats."""
    if isinstance(b, int) and 0 <= b <= 16:
        result: Any = None
        square = a
        while b:
            if b & 1:
                result = square if result is None else result * square
            b >>= 1
            if b:
                square = square * square
        return Value(np.ones_like(a.data), a.dtype) if result is None else result
    return _float_power[0](a, b)


_UNARY: dict[str, Callable[[Array], Array]] = {
    "neg": np.negative,
    "abs": np.abs,
    "sqrt": np.sqrt,
    "floor": np.floor,
    "ceil": np.ceil,
    "trunc": np.trunc,
    "round": np.rint,
    "isnan": np.isnan,
    "isinf": np.isinf,
}


def unary(op: str, x: Any) -> Value:
    """An operation on one value."""
    (array,), dtype = promote_together(x)
    if op in ("floor", "ceil", "trunc", "round") and not dtype.is_float:
        return Value(array, dtype)
    with np.errstate(all="ignore"):
        return Value(_UNARY[op](array), bool_ if op.startswith("is") else dtype)


def fold(op: str, xs: tuple[Any, ...]) -> Value:
    """``min`` or ``max`` of several operands."""
    result = xs[0]
    for x in xs[1:]:
        (a, b), dtype = promote_together(result, x)
        result = Value(_BINARY[op](a, b), dtype)
    return value(result)


def select(mask: Any, a: Any, b: Any) -> Value:
    """``a`` where ``mask`` holds, else ``b``."""
    if isinstance(a, Value) and isinstance(b, Value) and a.dtype is b.dtype:
        x, y, dtype = a.data, b.data, a.dtype  # no arithmetic: narrow floats stay as they are
    else:
        (x, y), dtype = promote_together(a, b)
    return Value(np.where(value(mask).data, x, y), dtype)


def fma(a: Any, b: Any, c: Any) -> Value:
    """Rounded once: f32 through f64; f64 as two operations."""
    (x, y, z), dtype = promote_together(a, b, c)
    # f64 holds the product of two f32 exactly
    wide = np.float64 if dtype is f32 else dtype.numpy
    with np.errstate(all="ignore"):
        return Value((x.astype(wide) * y.astype(wide) + z.astype(wide)).astype(dtype.numpy), dtype)


def copysign(x: Any, sign: Any) -> Value:
    """``x`` with the sign of ``sign``."""
    (a, b), dtype = promote_together(x, sign)
    return Value(np.copysign(a, b), dtype)


def scale_by_power(x: Any, n: Any) -> Value:
    """``x * 2**n``."""
    (a, b), dtype = promote_together(x, n)
    with np.errstate(all="ignore"):
        # far beyond the exponents of float64: the result is 0 or infinite anyway
        exponent = np.clip(np.nan_to_num(b), -4000, 4000).astype(np.int32)
        return Value(np.where(np.isnan(b), b, np.ldexp(a, exponent)), dtype)


def convert(x: Any, dtype: ScalarType) -> Value:
    """Converts elements as a cast does."""
    if not isinstance(x, Value):
        if dtype is u64 and isinstance(x, int) and x >> 63:  # beyond i64, which a bare literal is
            return Value(x, dtype)
        x = Value(x, f64) if isinstance(x, float) else value(x)
    if x.dtype is dtype:
        return x
    data = x.data
    if dtype.kind == "b":
        return Value(data != 0, dtype)
    if dtype.is_integer and x.dtype.is_float:
        info = np.iinfo(dtype.numpy)
        wide = np.nan_to_num(
            np.trunc(data.astype(np.float64)), nan=0.0, posinf=np.inf, neginf=-np.inf
        )
        # numbers out of range take the limit, NaN is 0
        low, high = wide <= float(info.min), wide >= float(info.max)
        safe = np.where(low | high, 0.0, wide).astype(dtype.numpy)
        return Value(np.where(low, info.min, np.where(high, info.max, safe)), dtype)
    if dtype.is_narrow_float and x.dtype is not f32 and x.dtype is not f64:
        data = data.astype(np.float32)
    with np.errstate(all="ignore"):
        return Value(convert_rounding_once(data, dtype.numpy), dtype)


def bitcast(x: Value, dtype: ScalarType) -> Value:
    """The same bits as another type."""
    data = x.data
    if x.dtype.kind == "b":
        # lane i is bit i
        packed = np.packbits(np.atleast_1d(data), bitorder="little")
        return Value(packed.view(dtype.numpy)[0], dtype)
    if not x.is_vector:
        return Value(data.reshape(1).view(dtype.numpy).reshape(()), dtype)
    return Value(np.ascontiguousarray(data).view(dtype.numpy), dtype)


def reduce(fn: np.ufunc, x: Value) -> Value:
    """All lanes by one operation."""
    dtype = arithmetic_dtype(x.dtype)
    with np.errstate(all="ignore"):
        return Value(fn.reduce(x.data.astype(dtype.numpy), dtype=dtype.numpy), dtype)


def bits(op: str, x: Any) -> Value:
    """Bit counts."""
    x = value(x)
    width = x.dtype.bits
    # negative numbers as two's complement
    flat = [_count_bits(op, int(n) & (1 << width) - 1, width) for n in np.atleast_1d(x.data)]
    return Value(np.array(flat).reshape(x.data.shape), x.dtype)


def _count_bits(op: str, n: int, width: int) -> int:
    if op == "popcount":
        return n.bit_count()
    if op == "ctlz":
        return width - n.bit_length()
    return width if n == 0 else (n & -n).bit_length() - 1


def write(text: str) -> None:
    """The output stream of ``k.print``."""
    sys.stdout.write(text)


class Tile:
    """``k.tile`` in plain Python."""

    def __init__(
        self, dtype: ScalarType, shape: tuple[int, ...], width: int | None, fill: Any
    ) -> None:
        self.dtype, self.shape, self.width = dtype, shape, width or 0
        lanes = () if width is None else (width,)
        self.data: Array = np.zeros((*shape, *lanes), dtype.numpy)
        if fill is not None:
            self.data[...] = convert(fill, dtype).data

    def _index(self, index: Any) -> tuple[int, ...]:
        """The indices of an element, checked against the shape."""
        indices = tuple(int(i) for i in (index if isinstance(index, tuple) else (index,)))
        if len(indices) != len(self.shape) or any(
            not 0 <= i < n for i, n in zip(indices, self.shape, strict=True)
        ):
            raise IndexError(f"index {indices} out of range for a tile {list(self.shape)}")
        return indices

    def __getitem__(self, index: Any) -> Value:
        return Value(self.data[self._index(index)].copy(), self.dtype)

    def __setitem__(self, index: Any, x: Any) -> None:
        self.data[self._index(index)] = convert(x, self.dtype).data

    def __iter__(self) -> Iterator[Any]:
        raise TypeError("a tile is indexed, not iterated")


ScalarType.convert = staticmethod(convert)  # type: ignore[assignment]

__all__ = ["scalar_type"]
