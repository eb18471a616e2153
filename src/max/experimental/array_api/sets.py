"""Sets: the different elements of a tensor, and membership."""

from __future__ import annotations

import builtins
from typing import Any, NamedTuple

import numpy as np

from max.dtype import DType
from max.experimental import functional as F
from max.experimental.array_api.reductions import any as some
from max.experimental.array_api.searching import argsort, nonzero, take
from max.experimental.tensor import Tensor

__all__ = ["isin", "unique_all", "unique_counts", "unique_inverse", "unique_values"]


class _All(NamedTuple):
    values: Tensor
    indices: Tensor
    inverse_indices: Tensor
    counts: Tensor


class _Counts(NamedTuple):
    values: Tensor
    counts: Tensor


class _Inverse(NamedTuple):
    values: Tensor
    inverse_indices: Tensor


def unique_all(x: Tensor, /) -> _All:
    """The different elements in order, the index of the first of each, where each element went, and how many there are.

    Each NaN is an element of its own. The number of results depends on the elements, so they are computed at once.
    """
    flat = x.reshape((-1,))
    size = int(flat.shape[0])
    if not size:
        empty = Tensor.from_dlpack(np.zeros(0, np.int64))
        return _All(flat, empty, empty.reshape(list(x.shape)), empty)
    order = argsort(flat.cast(DType.uint8) if flat.dtype is DType.bool else flat)
    ordered = take(flat, order)
    start = Tensor.constant([True], dtype=DType.bool)
    starts = F.concat([start, F.not_equal(ordered[1:], ordered[:-1])]) if size > 1 else start
    (firsts,) = nonzero(starts)
    # a run of equal elements ends where the next one starts
    ends = F.concat([firsts, Tensor.constant([size], dtype=DType.int64)])
    numbers = F.cumsum(starts.cast(DType.int64), 0) - 1
    # the place of each element in the order is the inverse permutation
    inverse = take(numbers, argsort(order))
    return _All(
        take(ordered, firsts),
        take(order, firsts),
        inverse.reshape(list(x.shape)),
        ends[1:] - ends[:-1],
    )


def unique_counts(x: Tensor, /) -> _Counts:
    """The different elements in order, and how often each occurs; see `unique_all`."""
    result = unique_all(x)
    return _Counts(result.values, result.counts)


def unique_inverse(x: Tensor, /) -> _Inverse:
    """The different elements in order, and the index among them of each element; see `unique_all`."""
    result = unique_all(x)
    return _Inverse(result.values, result.inverse_indices)


def unique_values(x: Tensor, /) -> Tensor:
    """The different elements in order; see `unique_all`."""
    return unique_all(x).values


def isin(x1: Any, x2: Any, /, *, invert: builtins.bool = False) -> Tensor:
    """Whether each element of `x1` is one of `x2` (or none, with `invert`): all pairs are compared."""
    tensor = x1 if isinstance(x1, Tensor) else x2
    x1, x2 = (
        x if isinstance(x, Tensor) else Tensor.constant(x, dtype=tensor.dtype) for x in (x1, x2)
    )
    result = some(F.equal(x1.unsqueeze(-1), x2.reshape((-1,))), axis=-1)
    return F.logical_not(result) if invert else result
