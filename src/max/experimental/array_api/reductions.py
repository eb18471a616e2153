"""Reductions and cumulative functions."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable
from typing import Any

from max.dtype import DType
from max.experimental import functional as F
from max.experimental.array_api.arguments import Axis, axes_of, shape_of
from max.experimental.array_api.data_types import UNSIGNED, astype
from max.experimental.array_api.manipulation import permute_dims
from max.experimental.tensor import Tensor

__all__ = [
    "all",
    "any",
    "count_nonzero",
    "cumulative_prod",
    "cumulative_sum",
    "diff",
    "max",
    "mean",
    "min",
    "prod",
    "std",
    "sum",
    "var",
]


def _reduce_axes(op: Callable[..., Any], x: Tensor, axis: Axis, keepdims: builtins.bool) -> Tensor:
    """A reduction over several axes: they become one."""
    axes = axes_of(x, axis)
    shape = shape_of(x)
    kept = [a for a in range(x.rank) if a not in axes]
    sizes = [shape[a] for a in kept]
    # [kept axes, elements of a result]
    flat = permute_dims(x, (*kept, *axes)).reshape([*sizes, math.prod(shape[a] for a in axes)])
    result = op(flat, axis=-1)
    return result.reshape(
        [1 if a in axes else shape[a] for a in range(x.rank)] if keepdims else sizes
    )


def _widen_integers(x: Tensor, dtype: DType | None) -> Tensor:
    """For sums: small integers become 64-bit ones."""
    if dtype is None:
        wide = DType.uint64 if x.dtype in UNSIGNED else DType.int64
        dtype = x.dtype if x.dtype.is_float() else wide
    return astype(x, dtype, copy=False)


def sum(
    x: Tensor, /, *, axis: Axis = None, dtype: DType | None = None, keepdims: builtins.bool = False
) -> Tensor:
    """Sums over axes; small integers are summed in 64 bits."""
    return _reduce_axes(F.sum, _widen_integers(x, dtype), axis, keepdims)


def mean(x: Tensor, /, *, axis: Axis = None, keepdims: builtins.bool = False) -> Tensor:
    """Means over axes."""
    return _reduce_axes(F.mean, x, axis, keepdims)


def max(x: Tensor, /, *, axis: Axis = None, keepdims: builtins.bool = False) -> Tensor:
    """The greatest elements over axes."""
    return _reduce_axes(F.max, x, axis, keepdims)


def min(x: Tensor, /, *, axis: Axis = None, keepdims: builtins.bool = False) -> Tensor:
    """The smallest elements over axes."""
    return _reduce_axes(F.min, x, axis, keepdims)


def var(
    x: Tensor, /, *, axis: Axis = None, correction: float = 0.0, keepdims: builtins.bool = False
) -> Tensor:
    """Variances over axes, divided by the number of elements less `correction`."""
    count = math.prod(shape_of(x)[a] for a in axes_of(x, axis))
    apart = x - mean(x, axis=axis, keepdims=True)
    squares = sum(apart * apart, axis=axis, keepdims=keepdims)
    if count:
        # the sum of the deviations is the rounding of the mean times their number
        rest = sum(apart, axis=axis, keepdims=keepdims)
        exact = F.max(squares - rest * (rest / count), 0)
        squares = F.where(F.is_inf(squares), squares, exact)
    return squares / (count - correction)


def std(
    x: Tensor, /, *, axis: Axis = None, correction: float = 0.0, keepdims: builtins.bool = False
) -> Tensor:
    """Standard deviations over axes."""
    return F.sqrt(var(x, axis=axis, correction=correction, keepdims=keepdims))


def prod(
    x: Tensor, /, *, axis: Axis = None, dtype: DType | None = None, keepdims: builtins.bool = False
) -> Tensor:
    """Products over axes, of halves with halves; small integers are multiplied in 64 bits."""

    def over_last(flat: Tensor, axis: int) -> Tensor:
        size = shape_of(flat)[-1]
        if not size:
            return Tensor.full([*shape_of(flat)[:-1], 1], 1, dtype=flat.dtype)
        while size > 1:
            half = size // 2
            product = flat[..., :half] * flat[..., half : 2 * half]
            # an odd last element waits for the next round
            flat = product if size % 2 == 0 else F.concat([product, flat[..., -1:]], axis=-1)
            size = half + size % 2
        return flat

    return _reduce_axes(over_last, _widen_integers(x, dtype), axis, keepdims)


def cumulative_prod(
    x: Tensor,
    /,
    *,
    axis: int | None = None,
    dtype: DType | None = None,
    include_initial: builtins.bool = False,
) -> Tensor:
    """The products of the elements up to each, in steps of 1, 2, 4, …; `include_initial` begins with 1."""
    axis = 0 if axis is None else axis % x.rank
    x = _widen_integers(x, dtype)
    size, step = shape_of(x)[axis], 1

    def part(start: int, stop: int) -> Tensor:
        return x[tuple(slice(start, stop) if a == axis else slice(None) for a in range(x.rank))]

    while step < size:
        # each element is the product of the `step` elements up to it, or of all up to it
        x = F.concat([part(0, step), part(step, size) * part(0, size - step)], axis=axis)
        step *= 2
    if not include_initial:
        return x
    return F.concat([_initial(x, axis, 1), x], axis=axis)


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
    x = _widen_integers(x, dtype)
    sums = F.cumsum(x, axis)
    if not include_initial:
        return sums
    return F.concat([_initial(sums, axis, 0), sums], axis=axis)


def _initial(x: Tensor, axis: int, value: int) -> Tensor:
    """What `include_initial` puts in front."""
    sizes = list(shape_of(x))
    sizes[axis] = 1
    return Tensor.full(sizes, value, dtype=x.dtype)


def diff(
    x: Tensor,
    /,
    *,
    axis: int = -1,
    n: int = 1,
    prepend: Tensor | None = None,
    append: Tensor | None = None,
) -> Tensor:
    """The differences of neighbors along an axis, `n` times.

    Args:
        x: The elements.
        axis: The axis.
        n: How often differences are taken; 0 leaves the elements as they are.
        prepend: What comes before the elements along the axis.
        append: What comes behind them.

    Raises:
        ValueError: `n` is negative.
    """
    if n < 0:
        raise ValueError(f"diff: n is {n}, expected 0 or more")
    if n and (prepend is not None or append is not None):
        x = F.concat([part for part in (prepend, x, append) if part is not None], axis=axis)
    for _ in range(n):
        size = shape_of(x)[axis]
        if not size:
            break
        ends = [
            x[tuple(part if a == axis % x.rank else slice(None) for a in range(x.rank))]
            for part in (slice(1, size), slice(0, size - 1))
        ]
        x = ends[0] - ends[1]
    return x


def count_nonzero(x: Tensor, /, *, axis: Axis = None, keepdims: builtins.bool = False) -> Tensor:
    """The number of elements that are not 0."""
    return sum(_truth(x).cast(DType.int64), axis=axis, keepdims=keepdims)
