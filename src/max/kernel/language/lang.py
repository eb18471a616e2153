"""The functions of the kernel language with their semantics: the code runs in plain Python.

In a kernel that is compiled, ``max.kernel.frontend.functions`` emits them instead.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from max.kernel import types
from max.kernel.language import values as v
from max.kernel.language.limits import tile_error, unroll_error, width_error
from max.kernel.language.tile_values import MatrixTiles
from max.kernel.language.values import Tile, Value
from max.kernel.targets.cpu import host_target
from max.kernel.targets.target import Target
from max.kernel.types import ScalarType, bool_, f32, scalar_type


def _checked_value(error: str | None, value: Any) -> Any:
    """A value that is known at compile time, if there is no error.

    Raises:
        ValueError: There is one.
    """
    if error is not None:
        raise ValueError(error)
    return value


# ***** making vectors *****
def splat(x: types.Value, width: int) -> Any:
    """A vector whose ``width`` lanes all are ``x``."""
    return v.value(x).widen(_checked_value(width_error(width, str(width)), width))


def iota(dtype: Any, width: int) -> Any:
    """The vector ``0, 1, 2, …`` of ``width`` lanes."""
    dtype = scalar_type(dtype)
    _checked_value(width_error(width, str(width)), width)
    return Value(np.arange(width).astype(dtype.numpy), dtype)


def tile(
    dtype: Any, shape: int | tuple[int, ...], width: int | None = None, fill: Any = None
) -> Any:
    """An array of scalars, or of vectors with ``width`` lanes, in registers or on the worker's stack.

    Args:
        dtype: the element type.
        shape: the sizes, known at compile time.
        width: lanes of an element; None for scalars.
        fill: what all elements are set to; without it they are undefined.

    Raises:
        ValueError: It has more than 64 KiB, or the tiles of the kernel have more than 1 MiB together.
    """
    dtype, sizes = scalar_type(dtype), (shape,) if isinstance(shape, int) else tuple(shape)
    if width is not None:
        _checked_value(width_error(width, str(width)), width)
    _checked_value(tile_error(sizes, dtype.size * (width or 1)), sizes)
    return Tile(dtype, sizes, width, fill)


def matrix_tiles(shapes: Any) -> Any:
    """Tiles that are multiplied as matrices: registers of AMX where the target has it, else memory with the same
    behavior.

    - ``tiles.configure()`` takes them into use (each worker for itself), all zero; ``tiles.release()`` gives them back
      before the kernel ends.
    - ``tiles.zero(t)``, ``tiles.load(t, x, i, j)``, ``tiles.store(t, x, i, j)``: rows lie along the last axis of a
      view, without gaps, and next to each other along the last but one, or ``stride`` elements apart.
    - ``tiles.dot(c, a, b, k.bf16)`` adds to ``c`` the products of rows of ``a`` with columns of ``b``, whose rows hold
      pairs of neighbors in k side by side; sums are f32. ``tiles.dot(c, a, b, k.u8, k.i8)`` does so with four bytes
      and sums in i32.

    Args:
        shapes: For each of up to 8 tiles the rows (up to 16) and the bytes of a row (4, 8, … 64), known at compile
            time.

    Raises:
        ValueError: The shapes do not fit.
    """
    return MatrixTiles(shapes)


# ***** conversions *****
def cast(x: types.Value, dtype: Any) -> Any:
    """Converts elements: floats round to nearest even; to integers they truncate and saturate, NaN gives 0."""
    return v.convert(x, scalar_type(dtype))


def cast_unchecked(x: types.Value, dtype: Any) -> Any:
    """``cast`` for floats that are known to fit into the integer type: one instruction."""
    return v.convert(x, scalar_type(dtype))


def bitcast(x: types.Value, dtype: Any) -> Any:
    """The same bits with another element type; between sizes the number of lanes changes."""
    return v.bitcast(v.value(x), scalar_type(dtype))


# ***** lanes *****
def select(mask: Any, a: Any, b: Any) -> Any:
    """``a`` where ``mask`` holds, else ``b``, lane by lane. Of two views, with a condition that is a scalar, the one or
    the other.
    """
    if hasattr(a, "strides") and hasattr(b, "strides"):
        return a if mask else b
    return v.select(mask, a, b)


def shuffle(a: Any, b: Any, indices: Iterable[int]) -> Any:
    """The lanes of ``a`` and ``b``, one after the other, at known ``indices``. ``b`` may be None."""
    lanes = a.data if b is None else np.concatenate([a.data, b.data])
    return Value(lanes[list(indices)], a.dtype)


def interleave(a: Any, b: Any) -> Any:
    """``a[0], b[0], a[1], b[1], …``, twice as wide."""
    return Value(np.stack([a.data, b.data], axis=1).reshape(-1), a.dtype)


def deinterleave(x: Any) -> tuple[Any, Any]:
    """The lanes with even and with odd numbers."""
    return Value(x.data[0::2], x.dtype), Value(x.data[1::2], x.dtype)


def concat(a: Any, b: Any) -> Any:
    """The lanes of ``a``, then those of ``b``."""
    return Value(np.concatenate([a.data, b.data]), a.dtype)


def lookup(table: Any, index: Any) -> Any:
    """``table[index & 15]``, byte by byte: ``vpermb``, ``vpshufb`` or ``tbl`` where the target has it.

    Args:
        table: ``SIMD[u8, 16]``.
        index: ``SIMD[u8, n]``; its upper four bits are ignored.
    """
    return Value(table.data[index.data & 15], table.dtype)


def permute(a: Any, b: Any, index: Any) -> Any:
    """The lanes of ``a`` and ``b``, taken as one vector, at indices of run time: ``vpermi2ps`` where the target has it.

    Args:
        a: ``SIMD[f32, n]``; ``n`` is a power of two.
        b: Another one.
        index: ``SIMD[i32, n]``; only as many of its lower bits count as ``2 * n`` lanes need.
    """
    lanes = np.concatenate([a.data, b.data])
    return Value(lanes[index.data & (len(lanes) - 1)], a.dtype)


def reduce_add(x: Any) -> Any:
    """The sum of all lanes, in any order; bf16 and f16 in f32."""
    return v.reduce(np.add, x)


def reduce_mul(x: Any) -> Any:
    """The product of all lanes, in any order."""
    return v.reduce(np.multiply, x)


def reduce_max(x: Any) -> Any:
    """The greatest lane; NaN if there is one."""
    return v.reduce(np.maximum, x)


def reduce_min(x: Any) -> Any:
    """The smallest lane; NaN if there is one."""
    return v.reduce(np.minimum, x)


def any(mask: types.Mask) -> Any:
    """Whether a lane of the mask holds."""
    return Value(np.asarray(np.any(v.value(mask).data)), bool_)


def all(mask: types.Mask) -> Any:
    """Whether all lanes of the mask hold."""
    return Value(np.asarray(np.all(v.value(mask).data)), bool_)


# ***** arithmetic *****
def fma(a: types.Value, b: types.Value, c: types.Value) -> Any:
    """``a * b + c``, rounded once where the target has the instruction."""
    return v.fma(a, b, c)


def min(*xs: Any) -> Any:
    """The smallest of the operands; NaN if one is NaN."""
    return v.fold("min", xs)


def max(*xs: Any) -> Any:
    """The greatest of the operands; NaN if one is NaN."""
    return v.fold("max", xs)


def abs(x: types.Value) -> Any:
    """The absolute value."""
    return v.unary("abs", x)


def sqrt(x: types.Value) -> Any:
    """The square root, correctly rounded."""
    return v.unary("sqrt", x)


def floor(x: types.Value) -> Any:
    """The next integer below, as a float."""
    return v.unary("floor", x)


def ceil(x: types.Value) -> Any:
    """The next integer above, as a float."""
    return v.unary("ceil", x)


def trunc(x: types.Value) -> Any:
    """The integer part, as a float."""
    return v.unary("trunc", x)


def round(x: types.Value) -> Any:
    """The nearest integer, as a float; halves go to the even one."""
    return v.unary("round", x)


def copysign(x: types.Value, sign: types.Value) -> Any:
    """``x`` with the sign of ``sign``."""
    return v.copysign(x, sign)


def scale_by_power(x: types.Value, n: types.Value) -> Any:
    """``x * 2**n`` for integral floats ``n``, with gradual underflow (an instruction of AVX-512)."""
    return v.scale_by_power(x, n)


def isnan(x: types.Value) -> Any:
    """Whether the value is NaN."""
    return v.unary("isnan", x)


def isinf(x: types.Value) -> Any:
    """Whether the value is infinite."""
    return v.unary("isinf", x)


def popcount(x: types.Value) -> Any:
    """The number of bits that are set, in the type of ``x``."""
    return v.bits("popcount", x)


def count_leading_zeros(x: types.Value) -> Any:
    """The number of zero bits above the highest bit that is set."""
    return v.bits("ctlz", x)


def count_trailing_zeros(x: types.Value) -> Any:
    """The number of zero bits below the lowest bit that is set."""
    return v.bits("cttz", x)


def ceildiv(a: Any, b: Any) -> Any:
    """``a / b`` rounded up, for ``a >= 0`` and ``b > 0``."""
    return (a + (b - 1)) // b


def dot_bf16(acc: Any, a: Any, b: Any) -> Any:
    """``acc[i] + a[2i] * b[2i] + a[2i+1] * b[2i+1]``: f32 accumulators, bf16 pairs; ``vdpbf16ps`` or ``bfdot`` where
    the target has it.
    """
    x, y = a.data.astype(np.float32), b.data.astype(np.float32)
    # odd elements first, as vdpbf16ps adds them
    return Value(acc.data + x[1::2] * y[1::2] + x[0::2] * y[0::2], f32)


def dot_i8(acc: Any, a: Any, b: Any, narrow: bool = False) -> Any:
    """``acc[i] + sum(a[4i+j] * b[4i+j])`` in i32: ``vpdpbusd``, ``usdot`` or ``sdot`` where the target has it.

    With lanes of i16, ``acc[i] + a[2i] * b[2i] + a[2i+1] * b[2i+1]``; the result must fit.

    Args:
        acc: ``SIMD[i32, n]``, or ``SIMD[i16, 2n]``.
        a: ``SIMD[u8, 4n]`` or ``SIMD[i8, 4n]``.
        b: ``SIMD[i8, 4n]``.
        narrow: Promises that no element of ``a`` exceeds 128 and that none of ``b`` is -128, where the target lacks
            these
            instructions: sums of two products then fit in 16 bits.
    """
    products = a.data.astype(np.int32) * b.data.astype(np.int32)
    # 4 products per lane of i32, 2 per lane of i16
    count = products.size // acc.data.size
    sums = products.reshape(-1, count).sum(1, dtype=np.int32)
    return Value(acc.data + sums.astype(acc.data.dtype), acc.dtype)


def dot_i16(acc: Any, a: Any, b: Any) -> Any:
    """``acc[i] + a[2i] * b[2i] + a[2i+1] * b[2i+1]`` in i32: ``vpmaddwd`` where the target has it.

    Args:
        acc: ``SIMD[i32, n]``.
        a: ``SIMD[i16, 2n]``.
        b: ``SIMD[i16, 2n]``.
    """
    products = a.data.astype(np.int32) * b.data.astype(np.int32)
    return Value(acc.data + products.reshape(-1, 2).sum(1, dtype=np.int32), acc.dtype)


# ***** control *****
def vectors(*args: Any) -> Iterator[tuple[int, Any]]:
    """``for j, mask in k.vectors(n, width)``: full vectors with ``mask`` None, then one masked tail.

    ``k.vectors(start, stop, width)`` starts elsewhere. The body is compiled once for each of the two; there is no tail
    where the number of elements is known to be a multiple of the width.
    """
    start, stop, width = (0, *args) if len(args) == 2 else args
    start, stop = int(start), int(stop)
    full = start + (builtins.max(stop - start, 0) // width) * width
    for j in range(start, full, width):
        with v.tail(None):
            yield j, None
    if full < stop:
        mask = Value(np.arange(width) < stop - full, bool_)
        with v.tail(mask):
            yield full, mask


def static_range(*args: int) -> range:
    """A range that is unrolled at compile time."""
    items = range(*[int(a) for a in args])
    return _checked_value(unroll_error(items), items)


def unroll(items: Iterable[Any]) -> tuple[Any, ...]:
    """The items of a sequence known at compile time, for a loop that is unrolled."""
    if isinstance(items, range):
        _checked_value(unroll_error(items), items)
    return tuple(items)


def assume(cond: Any) -> None:
    """Promises the compiler that a condition holds; checked in plain Python."""
    if not cond:
        raise AssertionError("k.assume: the condition does not hold")


def brief() -> None:
    """Promises that the enclosing loop ends within microseconds: it does not poll for interrupts.

    Other ``while`` loops poll in each iteration, long counted loops now and then (Ctrl-C, an event).
    """


def run_time(x: Any) -> Any:
    """An integer or a view whose value or sizes the compiler forgets: they are known at run time only.

    For arguments of an outlined function, so that calls with other sizes share its code. Strides of 1 stay known.
    """
    return x


def opaque(x: Any) -> Any:
    """An integer that no optimization sees through; loads are neither moved across it nor shared with earlier ones.

    It takes no instruction. In unrolled code the compiler otherwise keeps in registers what several pieces load, and
    spills it where there are too few of them.
    """
    return x


def static_assert(cond: Any, message: str = "") -> None:
    """Stops the compilation where a condition known at compile time does not hold."""
    if not cond:
        raise AssertionError(f"k.static_assert: {message}")


def print(text: str, *xs: Any) -> None:
    """Prints from inside a kernel; ``{}`` stands for the values."""
    v.write(text.format(*xs) + "\n")


_targets: list[Target] = []


def push_target(result: Target) -> None:
    """Sets the result of ``target()`` in plain Python."""
    _targets.append(result)


def pop_target() -> None:
    """Ends the innermost ``push_target``."""
    _targets.pop()


def target() -> Target:
    """The target at compile time; in plain Python the host."""
    return _targets[-1] if _targets else host_target()


def floating(x: types.Value) -> types.SIMD:
    """A float value: literals and narrow floats as f32."""
    number: Any = x
    if not isinstance(x, Value):
        number = v.convert(x, f32)
    if not number.dtype.is_float:
        raise TypeError(f"expected a float, got {number.dtype.name}; convert it, as in k.f32(x)")
    wide: Any = v.convert(number, f32) if number.dtype.is_narrow_float else number
    return wide


def _pow(x: Any, y: Any) -> Any:
    """C's ``pow``; NumPy takes the square root for one power of 0.5, also of -0.0 and -inf."""
    result: np.ndarray[Any, Any] = np.array(np.power(x, y))
    root = (y == 0.5) & ((x == 0) | np.isinf(x))
    result[root] = np.abs(x)[root]
    return result


def libm(name: str, *xs: Any) -> Any:
    """A function of the C library (``"exp"``, ``"log"``, …) on f64 values, lane by lane."""
    table = {"pow": _pow, "erf": np.vectorize(math.erf, otypes=[np.float64])}
    fn = table.get(name) or getattr(np, {"acos": "arccos", "atanh": "arctanh"}.get(name, name))
    arrays = [v.value(x).data.astype(np.float64) for x in xs]
    with np.errstate(all="ignore"):
        return Value(np.asarray(fn(*arrays), dtype=np.float64), scalar_type("f64"))


__all__ = ["ScalarType"]
