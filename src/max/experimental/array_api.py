"""The Python array API standard (2024.12) on eager tensors, as far as the ops express it.

``x.__array_namespace__()`` is this module. Functions take and return `Tensor`; names and arguments are those of the
standard, which also says what each computes. What is absent is listed in docs/eager.md.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from max.driver import Device
from max.dtype import DType
from max.experimental import functional as F
from max.experimental.tensor import Tensor, defaults

__all__ = [
    "abs", "acos", "add", "all", "any", "arange", "argmax", "argmin", "argsort", "asarray",
    "astype", "atanh", "bool", "broadcast_arrays", "broadcast_shapes", "broadcast_to", "can_cast",
    "ceil", "clip", "concat", "cos", "cosh", "count_nonzero", "cumulative_sum", "diff", "divide",
    "e", "empty", "empty_like", "equal", "exp", "expand_dims", "eye", "finfo", "flip", "float32",
    "float64", "floor", "floor_divide", "from_dlpack", "full", "full_like", "greater",
    "greater_equal", "iinfo", "inf", "int16", "int32", "int64", "int8", "isdtype", "isfinite",
    "isinf", "isnan", "less", "less_equal", "linspace", "log", "log10", "log1p", "log2",
    "logaddexp", "logical_and", "logical_not", "logical_or", "logical_xor", "matmul",
    "matrix_transpose", "max", "maximum", "mean", "meshgrid", "min", "minimum", "moveaxis",
    "multiply", "nan", "negative", "newaxis", "not_equal", "ones", "ones_like", "permute_dims",
    "pi", "positive", "pow", "reciprocal", "remainder", "repeat", "reshape", "result_type", "roll",
    "round", "sign", "sin", "sort", "sqrt", "square", "squeeze", "stack", "std", "subtract", "sum",
    "take", "take_along_axis", "tan", "tanh", "tensordot", "tile", "tril", "triu", "trunc",
    "uint16", "uint32", "uint64", "uint8", "unstack", "var", "vecdot", "where", "zeros",
    "zeros_like",
]  # fmt: skip

__array_api_version__ = "2024.12"

e, inf, nan, pi, newaxis = math.e, math.inf, math.nan, math.pi, None
bool = DType.bool
int8, int16, int32, int64 = DType.int8, DType.int16, DType.int32, DType.int64
uint8, uint16, uint32, uint64 = DType.uint8, DType.uint16, DType.uint32, DType.uint64
float32, float64 = DType.float32, DType.float64

Axis = int | tuple[int, ...] | None
Scalar = int | float | builtins.bool

# creation


def asarray(
    obj: Any,
    /,
    *,
    dtype: DType | None = None,
    device: Device | None = None,
    copy: builtins.bool | None = None,
) -> Tensor:
    """A tensor of a number, nested lists, or an array; a copy only where `copy` or a conversion needs one."""
    if isinstance(obj, Tensor):
        result = obj if dtype in (None, obj.dtype) else obj.cast(dtype)
    elif hasattr(obj, "__dlpack__"):
        result = Tensor.from_dlpack(obj)
        result = result if dtype in (None, result.dtype) else result.cast(dtype)
    else:
        array = np.asarray(obj)
        # Python's floats have the default dtype, integers and bools their own
        if dtype is None and array.dtype.kind in "biu":
            dtype = DType.from_numpy(array.dtype)
        return Tensor.constant(obj, dtype=dtype, device=device)
    if device is not None and device != result.device:
        result = result.to(device)
    if copy and result is obj:
        return Tensor.from_dlpack(np.array(result.to_numpy()))
    if copy is False and result is not obj and dtype not in (None, getattr(obj, "dtype", None)):
        raise ValueError(f"asarray: a conversion to {dtype} copies, and copy is False")
    return result


def from_dlpack(
    x: Any, /, *, device: Device | None = None, copy: builtins.bool | None = None
) -> Tensor:
    """A tensor on the memory of an array of another library."""
    return asarray(Tensor.from_dlpack(x), device=device, copy=copy)


def full(
    shape: int | tuple[int, ...],
    fill_value: Scalar,
    *,
    dtype: DType | None = None,
    device: Device | None = None,
) -> Tensor:
    """A tensor with one value everywhere; its dtype follows the value's kind."""
    if dtype is None:
        kinds = {builtins.bool: DType.bool, int: DType.int64}
        dtype = kinds.get(type(fill_value))
    return Tensor.full(
        shape if isinstance(shape, tuple) else (shape,), fill_value, dtype=dtype, device=device
    )


def zeros(
    shape: int | tuple[int, ...], *, dtype: DType | None = None, device: Device | None = None
) -> Tensor:
    """A tensor of zeros, of the default dtype if none is given."""
    return full(shape, 0.0, dtype=dtype, device=device)


def ones(
    shape: int | tuple[int, ...], *, dtype: DType | None = None, device: Device | None = None
) -> Tensor:
    """A tensor of ones, of the default dtype if none is given."""
    return full(shape, 1.0, dtype=dtype, device=device)


empty = zeros


def full_like(
    x: Tensor, /, fill_value: Scalar, *, dtype: DType | None = None, device: Device | None = None
) -> Tensor:
    """A tensor of the shape and dtype of another one, with one value everywhere."""
    return full(_shape(x), fill_value, dtype=dtype or x.dtype, device=device or x.device)


def zeros_like(x: Tensor, /, *, dtype: DType | None = None, device: Device | None = None) -> Tensor:
    """A tensor of zeros of the shape and dtype of another one."""
    return full_like(x, 0, dtype=dtype, device=device)


def ones_like(x: Tensor, /, *, dtype: DType | None = None, device: Device | None = None) -> Tensor:
    """A tensor of ones of the shape and dtype of another one."""
    return full_like(x, 1, dtype=dtype, device=device)


empty_like = zeros_like


def arange(
    start: float,
    /,
    stop: float | None = None,
    step: float = 1,
    *,
    dtype: DType | None = None,
    device: Device | None = None,
) -> Tensor:
    """Values from `start` to before `stop`, `step` apart; int64 where all three are integers."""
    start, stop = (0, start) if stop is None else (start, stop)
    integers = builtins.all(isinstance(value, int) for value in (start, stop, step))
    if dtype is None:
        dtype = DType.int64 if integers else defaults()[0]
    values = np.arange(start, stop, step, dtype=None if integers else np.float64)
    return Tensor.constant(values.astype(dtype.to_numpy()), device=device)


def linspace(
    start: float,
    stop: float,
    /,
    num: int,
    *,
    dtype: DType | None = None,
    device: Device | None = None,
    endpoint: builtins.bool = True,
) -> Tensor:
    """`num` values at equal distances."""
    dtype = dtype or defaults()[0]
    values = np.linspace(start, stop, num, endpoint=endpoint)
    return Tensor.constant(values.astype(dtype.to_numpy()), device=device)


def eye(
    n_rows: int,
    n_cols: int | None = None,
    /,
    *,
    k: int = 0,
    dtype: DType | None = None,
    device: Device | None = None,
) -> Tensor:
    """Ones on the k-th diagonal."""
    dtype = dtype or defaults()[0]
    return Tensor.constant(np.eye(n_rows, n_cols, k).astype(dtype.to_numpy()), device=device)


def meshgrid(*arrays: Tensor, indexing: str = "xy") -> list[Tensor]:
    """The coordinates of a grid, of axes of rank 1."""
    if indexing not in ("xy", "ij"):
        raise ValueError(f"meshgrid: indexing is {indexing!r}, expected 'xy' or 'ij'")
    rank = len(arrays)
    sizes = [_shape(a)[0] for a in arrays]
    grids = [
        F.broadcast_to(a.reshape([-1 if j == i else 1 for j in range(rank)]), sizes)
        for i, a in enumerate(arrays)
    ]
    return [g.transpose(0, 1) for g in grids] if indexing == "xy" and rank > 1 else grids


def tril(x: Tensor, /, *, k: int = 0) -> Tensor:
    """The part of matrices on and below the k-th diagonal."""
    return _part(x, lambda row, column: column - row <= k)


def triu(x: Tensor, /, *, k: int = 0) -> Tensor:
    """The part of matrices on and above the k-th diagonal."""
    return _part(x, lambda row, column: column - row >= k)


def _part(x: Tensor, inside: Callable[[Any, Any], Any]) -> Tensor:
    rows, columns = _shape(x)[-2:]
    mask = inside(np.arange(rows)[:, None], np.arange(columns))
    return F.where(Tensor.constant(mask), x, zeros_like(x))


# dtypes


class _FInfo(NamedTuple):
    bits: int
    eps: float
    max: float
    min: float
    smallest_normal: float
    dtype: DType


class _IInfo(NamedTuple):
    bits: int
    max: int
    min: int
    dtype: DType


def finfo(type: DType | Tensor, /) -> _FInfo:
    """The limits of a float dtype."""
    dtype = type.dtype if isinstance(type, Tensor) else type
    info = ml_dtypes.finfo(dtype.to_numpy())
    eps, top, bottom = float(info.eps), float(info.max), float(info.min)
    return _FInfo(info.bits, eps, top, bottom, float(info.smallest_normal), dtype)


def iinfo(type: DType | Tensor, /) -> _IInfo:
    """The limits of an integer dtype."""
    dtype = type.dtype if isinstance(type, Tensor) else type
    info = np.iinfo(dtype.to_numpy())
    return _IInfo(info.bits, int(info.max), int(info.min), dtype)


_SIGNED = (DType.int8, DType.int16, DType.int32, DType.int64)
_UNSIGNED = (DType.uint8, DType.uint16, DType.uint32, DType.uint64)
_FLOATING = (DType.float32, DType.float64, DType.float16, DType.bfloat16)
_KINDS: dict[str, tuple[DType, ...]] = {
    "bool": (DType.bool,),
    "signed integer": _SIGNED,
    "unsigned integer": _UNSIGNED,
    "integral": _SIGNED + _UNSIGNED,
    "real floating": _FLOATING,
    "complex floating": (),
    "numeric": _SIGNED + _UNSIGNED + _FLOATING,
}


def isdtype(dtype: DType, kind: DType | str | tuple[DType | str, ...]) -> builtins.bool:
    """Whether a dtype is another one, or of a kind such as ``"integral"``."""
    if isinstance(kind, tuple):
        return builtins.any(isdtype(dtype, one) for one in kind)
    if isinstance(kind, DType):
        return dtype == kind
    if kind not in _KINDS:
        raise ValueError(
            f"isdtype: kind is {kind!r}, expected a DType or one of {', '.join(_KINDS)}"
        )
    return dtype in _KINDS[kind]


def result_type(*arrays_and_dtypes: Tensor | DType | Scalar) -> DType:
    """The dtype of a computation with tensors, dtypes and Python's numbers."""
    types = [a.dtype if isinstance(a, Tensor) else a for a in arrays_and_dtypes]
    dtypes = [t for t in types if isinstance(t, DType)]
    if not dtypes:
        raise ValueError("result_type: expected a tensor or dtype among the arguments")
    operands = [Tensor.zeros((), dtype=d) for d in dtypes]
    numbers = [t for t in types if not isinstance(t, DType)]
    total = operands[0]
    for operand in [*operands[1:], *numbers]:
        total = F.where(Tensor.constant(True, dtype=DType.bool), total, operand)
    return total.dtype


def can_cast(from_: DType | Tensor, to: DType, /) -> builtins.bool:
    """Whether the promotion of both dtypes is `to`."""
    dtype = from_.dtype if isinstance(from_, Tensor) else from_
    if dtype == to:
        return True
    if (dtype == DType.bool) != (to == DType.bool) or (dtype in _FLOATING and to not in _FLOATING):
        return False
    return np.can_cast(dtype.to_numpy(), to.to_numpy())


def astype(
    x: Tensor, dtype: DType, /, *, copy: builtins.bool = True, device: Device | None = None
) -> Tensor:
    """The elements in another dtype; tensors do not change in place by ops, so none is copied without need."""
    result = x if x.dtype == dtype else x.cast(dtype)
    return result if device is None else result.to(device)


def broadcast_to(x: Tensor, /, shape: tuple[int, ...]) -> Tensor:
    """The elements repeated along axes of size 1 and new leading axes."""
    return F.broadcast_to(x, list(shape))


def broadcast_shapes(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape to which shapes broadcast."""
    return np.broadcast_shapes(*shapes)


def broadcast_arrays(*arrays: Tensor) -> list[Tensor]:
    """Tensors in the shape to which they broadcast."""
    shape = np.broadcast_shapes(*(_shape(a) for a in arrays))
    return [F.broadcast_to(a, list(shape)) for a in arrays]


# element-wise functions


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(int(dim) for dim in x.shape)


def _same_kind(name: str, op: Callable[..., Any]) -> Callable[..., Tensor]:
    """A function of one tensor that leaves integers as they are."""

    def on_tensor(x: Tensor, /) -> Tensor:
        return op(x) if x.dtype.is_float() else x

    on_tensor.__name__ = on_tensor.__qualname__ = name
    on_tensor.__doc__ = f"`max.graph.ops.{name}` of floats; integers stay as they are."
    return on_tensor


abs, exp, log, log1p, sqrt = F.abs, F.exp, F.log, F.log1p, F.sqrt
acos, cos, sin, tanh, atanh = F.acos, F.cos, F.sin, F.tanh, F.atanh
negative = F.negate
floor, round, trunc = (_same_kind(n, getattr(F, n)) for n in ("floor", "round", "trunc"))
add, subtract, multiply, divide, pow = F.add, F.sub, F.mul, F.div, F.pow
floor_divide, remainder = F.floor_div, F.mod
equal, not_equal, greater, greater_equal = F.equal, F.not_equal, F.greater, F.greater_equal
logical_and, logical_or, logical_xor, logical_not = (
    F.logical_and,
    F.logical_or,
    F.logical_xor,
    F.logical_not,
)


def less(x1: Any, x2: Any, /) -> Tensor:
    """``x1 < x2``."""
    return F.greater(x2, x1)


def less_equal(x1: Any, x2: Any, /) -> Tensor:
    """``x1 <= x2``."""
    return F.greater_equal(x2, x1)


def maximum(x1: Any, x2: Any, /) -> Tensor:
    """The greater of two elements; NaN where one is."""
    return F.max(x1, x2)


def minimum(x1: Any, x2: Any, /) -> Tensor:
    """The smaller of two elements; NaN where one is."""
    return F.min(x1, x2)


def positive(x: Tensor, /) -> Tensor:
    """The elements."""
    return +x


def square(x: Tensor, /) -> Tensor:
    """``x * x``."""
    return x * x


def reciprocal(x: Tensor, /) -> Tensor:
    """``1 / x``."""
    return 1 / x


def ceil(x: Tensor, /) -> Tensor:
    """The smallest integers that are not smaller; integers stay as they are."""
    return -F.floor(-x) if x.dtype.is_float() else x


def sign(x: Tensor, /) -> Tensor:
    """-1, 0 or 1; NaN of NaN."""
    zero = zeros_like(x)
    signs = (x > zero).cast(x.dtype)
    signs = signs - (zero > x).cast(x.dtype) if x.dtype not in _UNSIGNED else signs
    return F.where(F.is_nan(x), x, signs) if x.dtype.is_float() else signs


def clip(x: Tensor, /, min: Any = None, max: Any = None) -> Tensor:
    """The elements, not below `min` and not above `max`."""
    dtype = x.dtype
    x = x if min is None else F.max(x, min)
    x = x if max is None else F.min(x, max)
    return astype(x, dtype)


def isnan(x: Tensor, /) -> Tensor:
    """Whether elements are NaN."""
    return F.is_nan(x) if x.dtype.is_float() else full_like(x, False, dtype=DType.bool)


def isinf(x: Tensor, /) -> Tensor:
    """Whether elements are infinite."""
    return F.is_inf(x) if x.dtype.is_float() else full_like(x, False, dtype=DType.bool)


def isfinite(x: Tensor, /) -> Tensor:
    """Whether elements are neither NaN nor infinite."""
    return ~(isnan(x) | isinf(x))


def log2(x: Tensor, /) -> Tensor:
    """The logarithm to base 2."""
    return F.log(x) * (1 / math.log(2))


def log10(x: Tensor, /) -> Tensor:
    """The logarithm to base 10."""
    return F.log(x) * (1 / math.log(10))


def logaddexp(x1: Tensor, x2: Tensor, /) -> Tensor:
    """``log(exp(x1) + exp(x2))``, without overflow."""
    top, apart = F.max(x1, x2), F.abs(x1 - x2)
    # infinities of one sign have no difference
    same = F.equal(x1, x2)
    return top + F.log1p(F.exp(-F.where(same, zeros_like(apart), apart)))


def tan(x: Tensor, /) -> Tensor:
    """The tangent."""
    return F.sin(x) / F.cos(x)


def cosh(x: Tensor, /) -> Tensor:
    """The hyperbolic cosine."""
    half = F.exp(F.abs(x) - math.log(2))
    return half + 0.25 / half


def where(condition: Tensor, x1: Any, x2: Any, /) -> Tensor:
    """Elements of `x1` where the condition holds, else of `x2`."""
    return F.where(condition, x1, x2)


# linear algebra

matmul = F.matmul


def matrix_transpose(x: Tensor, /) -> Tensor:
    """The last two axes swapped."""
    return x.transpose(-1, -2)


def vecdot(x1: Tensor, x2: Tensor, /, *, axis: int = -1) -> Tensor:
    """The sums of products along an axis."""
    return sum(x1 * x2, axis=axis)


def tensordot(
    x1: Tensor, x2: Tensor, /, *, axes: int | tuple[Sequence[int], Sequence[int]] = 2
) -> Tensor:
    """The sums of products over pairs of axes."""
    if isinstance(axes, int):
        of_x1 = [*range(x1.rank - axes, x1.rank)]
        of_x2 = [*range(axes)]
    else:
        of_x1, of_x2 = ([a % x.rank for a in part] for part, x in zip(axes, (x1, x2), strict=True))
    free1 = [a for a in range(x1.rank) if a not in of_x1]
    free2 = [a for a in range(x2.rank) if a not in of_x2]
    shape1, shape2 = _shape(x1), _shape(x2)
    inner = math.prod(shape1[a] for a in of_x1)
    rows = math.prod(shape1[a] for a in free1)
    columns = math.prod(shape2[a] for a in free2)
    left = permute_dims(x1, (*free1, *of_x1)).reshape((rows, inner))
    right = permute_dims(x2, (*of_x2, *free2)).reshape((inner, columns))
    return (left @ right).reshape([*(shape1[a] for a in free1), *(shape2[a] for a in free2)])


# shapes


def reshape(x: Tensor, /, shape: tuple[int, ...], *, copy: builtins.bool | None = None) -> Tensor:
    """The elements in another shape."""
    return x.reshape(list(shape))


def permute_dims(x: Tensor, /, axes: tuple[int, ...]) -> Tensor:
    """The axes in another order."""
    return x.permute(list(axes)) if x.rank else x


def moveaxis(
    x: Tensor, source: int | tuple[int, ...], destination: int | tuple[int, ...], /
) -> Tensor:
    """Axes moved to other places."""
    sources = [a % x.rank for a in (source if isinstance(source, tuple) else (source,))]
    places = [
        a % x.rank for a in (destination if isinstance(destination, tuple) else (destination,))
    ]
    order = [a for a in range(x.rank) if a not in sources]
    for place, axis in sorted(zip(places, sources, strict=True)):
        order.insert(place, axis)
    return permute_dims(x, tuple(order))


def expand_dims(x: Tensor, /, *, axis: int = 0) -> Tensor:
    """With a new axis of size 1."""
    return x.unsqueeze(axis)


def squeeze(x: Tensor, /, axis: int | tuple[int, ...]) -> Tensor:
    """Without axes of size 1."""
    axes = axis if isinstance(axis, tuple) else (axis,)
    for one in sorted((a % x.rank for a in axes), reverse=True):
        x = x.squeeze(one)
    return x


def concat(arrays: Sequence[Tensor], /, *, axis: int | None = 0) -> Tensor:
    """Tensors behind each other along an axis; None flattens them."""
    if axis is None:
        return F.concat([a.reshape((-1,)) for a in arrays], axis=0)
    return F.concat(list(arrays), axis=axis)


def stack(arrays: Sequence[Tensor], /, *, axis: int = 0) -> Tensor:
    """Tensors behind each other along a new axis."""
    return F.stack(list(arrays), axis=axis)


def unstack(x: Tensor, /, *, axis: int = 0) -> tuple[Tensor, ...]:
    """The parts of a tensor along an axis, without it."""
    return tuple(moveaxis(x, axis, 0)[i] for i in range(_shape(x)[axis]))


def flip(x: Tensor, /, *, axis: Axis = None) -> Tensor:
    """The elements in reverse order along axes."""
    axes = _axes(x, axis)
    return x[tuple(slice(None, None, -1) if a in axes else slice(None) for a in range(x.rank))]


def roll(x: Tensor, /, shift: int | tuple[int, ...], *, axis: Axis = None) -> Tensor:
    """The elements moved along axes; those that leave at one end come in at the other."""
    if axis is None:
        assert isinstance(shift, int)
        return roll(x.reshape((-1,)), shift, axis=0).reshape(list(_shape(x)))
    axes = axis if isinstance(axis, tuple) else (axis,)
    shifts = shift if isinstance(shift, tuple) else (shift,) * len(axes)
    for by, one in zip(shifts, axes, strict=True):
        size = _shape(x)[one]
        if size and by % size:
            cut = size - by % size
            head, tail = x.split([cut, size - cut], one)
            x = F.concat([tail, head], axis=one)
    return x


def repeat(x: Tensor, repeats: int, /, *, axis: int | None = None) -> Tensor:
    """Each element a number of times."""
    return F.repeat_interleave(x, repeats, axis)


def tile(x: Tensor, repetitions: tuple[int, ...], /) -> Tensor:
    """The whole tensor a number of times along each axis."""
    rank = builtins.max(x.rank, len(repetitions))
    x = x.reshape([1] * (rank - x.rank) + list(_shape(x)))
    return F.tile(x, [1] * (rank - len(repetitions)) + list(repetitions))


# indexing, searching, sorting


def take(x: Tensor, indices: Tensor, /, *, axis: int | None = None) -> Tensor:
    """The parts of a tensor at indices along an axis."""
    return F.gather(x, indices, axis=0 if axis is None else axis)


def take_along_axis(x: Tensor, indices: Tensor, /, *, axis: int = -1) -> Tensor:
    """For each place of the other axes its own indices along an axis."""
    last = x.rank - 1
    values, places = moveaxis(x, axis, last), moveaxis(indices, axis, last)
    taken = F.gather_nd(values, places.unsqueeze(-1), batch_dims=last)
    return moveaxis(taken, last, axis)


def argmax(x: Tensor, /, *, axis: int | None = None, keepdims: builtins.bool = False) -> Tensor:
    """The indices of the first greatest elements."""
    return _index(F.argmax, x, axis, keepdims)


def argmin(x: Tensor, /, *, axis: int | None = None, keepdims: builtins.bool = False) -> Tensor:
    """The indices of the first smallest elements."""
    return _index(F.argmin, x, axis, keepdims)


def _index(op: Callable[..., Any], x: Tensor, axis: int | None, keepdims: builtins.bool) -> Tensor:
    if axis is None:
        result = op(x.reshape((-1,)), 0).reshape(())
        return result.reshape([1] * x.rank) if keepdims else result
    result = op(x, axis)
    return result if keepdims else result.squeeze(axis)


def count_nonzero(x: Tensor, /, *, axis: Axis = None, keepdims: builtins.bool = False) -> Tensor:
    """The number of elements that are not 0."""
    return sum(_truth(x).cast(DType.int64), axis=axis, keepdims=keepdims)


def argsort(
    x: Tensor, /, *, axis: int = -1, descending: builtins.bool = False, stable: builtins.bool = True
) -> Tensor:
    """The indices that sort along an axis."""
    # the op sorts along the first axis
    order = F.argsort(moveaxis(x, axis, 0), ascending=not descending)
    return moveaxis(order, 0, axis)


def sort(
    x: Tensor, /, *, axis: int = -1, descending: builtins.bool = False, stable: builtins.bool = True
) -> Tensor:
    """The elements in order along an axis."""
    return take_along_axis(x, argsort(x, axis=axis, descending=descending), axis=axis)


# reductions


def _axes(x: Tensor, axis: Axis) -> tuple[int, ...]:
    if axis is None:
        return tuple(range(x.rank))
    return tuple(a % x.rank for a in (axis if isinstance(axis, tuple) else (axis,)))


def _reduced(op: Callable[..., Any], x: Tensor, axis: Axis, keepdims: builtins.bool) -> Tensor:
    """A reduction over several axes: they become one."""
    axes = _axes(x, axis)
    shape = _shape(x)
    kept = [a for a in range(x.rank) if a not in axes]
    sizes = [shape[a] for a in kept]
    flat = permute_dims(x, (*kept, *axes)).reshape([*sizes, math.prod(shape[a] for a in axes)])
    result = op(flat, axis=-1)
    return result.reshape(
        [1 if a in axes else shape[a] for a in range(x.rank)] if keepdims else sizes
    )


def _widened(x: Tensor, dtype: DType | None) -> Tensor:
    """For sums: small integers become 64-bit ones."""
    if dtype is None:
        wide = DType.uint64 if x.dtype in _UNSIGNED else DType.int64
        dtype = x.dtype if x.dtype.is_float() else wide
    return astype(x, dtype)


def sum(
    x: Tensor, /, *, axis: Axis = None, dtype: DType | None = None, keepdims: builtins.bool = False
) -> Tensor:
    """Sums over axes; small integers are summed in 64 bits."""
    return _reduced(F.sum, _widened(x, dtype), axis, keepdims)


def mean(x: Tensor, /, *, axis: Axis = None, keepdims: builtins.bool = False) -> Tensor:
    """Means over axes."""
    return _reduced(F.mean, x, axis, keepdims)


def max(x: Tensor, /, *, axis: Axis = None, keepdims: builtins.bool = False) -> Tensor:
    """The greatest elements over axes."""
    return _reduced(F.max, x, axis, keepdims)


def min(x: Tensor, /, *, axis: Axis = None, keepdims: builtins.bool = False) -> Tensor:
    """The smallest elements over axes."""
    return _reduced(F.min, x, axis, keepdims)


def var(
    x: Tensor, /, *, axis: Axis = None, correction: float = 0.0, keepdims: builtins.bool = False
) -> Tensor:
    """Variances over axes, divided by the number of elements less `correction`."""
    count = math.prod(_shape(x)[a] for a in _axes(x, axis))
    apart = x - mean(x, axis=axis, keepdims=True)
    return sum(apart * apart, axis=axis, keepdims=keepdims) / (count - correction)


def std(
    x: Tensor, /, *, axis: Axis = None, correction: float = 0.0, keepdims: builtins.bool = False
) -> Tensor:
    """Standard deviations over axes."""
    return F.sqrt(var(x, axis=axis, correction=correction, keepdims=keepdims))


def _truth(x: Tensor) -> Tensor:
    return x if x.dtype == DType.bool else F.not_equal(x, 0)


def any(x: Tensor, /, *, axis: Axis = None, keepdims: builtins.bool = False) -> Tensor:
    """Whether some element over axes is not 0."""
    return count_nonzero(x, axis=axis, keepdims=keepdims) > 0


def all(x: Tensor, /, *, axis: Axis = None, keepdims: builtins.bool = False) -> Tensor:
    """Whether no element over axes is 0."""
    return F.equal(count_nonzero(~_truth(x), axis=axis, keepdims=keepdims), 0)


def cumulative_sum(
    x: Tensor,
    /,
    *,
    axis: int | None = None,
    dtype: DType | None = None,
    include_initial: builtins.bool = False,
) -> Tensor:
    """The sums of the elements up to each; `include_initial` begins with 0."""
    axis = 0 if axis is None else axis
    x = _widened(x, dtype)
    sums = F.cumsum(x, axis)
    if not include_initial:
        return sums
    first = zeros_like(
        sums[tuple(slice(0, 1) if a == axis % x.rank else slice(None) for a in range(x.rank))]
    )
    return F.concat([first, sums], axis=axis)


def diff(x: Tensor, /, *, axis: int = -1, n: int = 1) -> Tensor:
    """The differences of neighbours along an axis, `n` times."""
    for _ in range(n):
        size = _shape(x)[axis]
        ends = [
            x[tuple(part if a == axis % x.rank else slice(None) for a in range(x.rank))]
            for part in (slice(1, size), slice(0, size - 1))
        ]
        x = ends[0] - ends[1]
    return x
