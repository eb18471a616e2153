"""Reductions, scans, sorts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from max.dtype import DType
from max.graph import Dim, TensorValue, ops
from max.importers.errors import Unsupported
from max.importers.functions.indexing import gather_along
from max.importers.functions.reductions import drop_axes, over
from max.importers.torch.ops.arithmetic import convert, tensor_of
from max.importers.torch.ops.shape import is_known
from max.importers.torch.table import Call, op

Axes = int | list[int] | None


def _maximum(x: TensorValue, axis: int) -> TensorValue:
    return ops.max(x, axis=axis)


def _minimum(x: TensorValue, axis: int) -> TensorValue:
    return ops.min(x, axis=axis)


def reduce_axes(call: Call, x: TensorValue, dim: Axes, keepdim: bool, function: Any) -> TensorValue:
    """A reduction over some axes, or all of them."""
    axes = call.axes(dim, x.rank)
    if not axes:
        return x
    result = over(x, axes, function)
    return result if keepdim else drop_axes(result, axes)


@op("aten.sum.dim_IntList", "aten.sum.default")
def sum_(
    call: Call, x: TensorValue, dim: Axes = None, keepdim: bool = False, dtype: DType | None = None
) -> TensorValue:
    return reduce_axes(call, convert(x, call.result_dtype()), dim, keepdim, ops.sum)


@op("aten.mean.dim", "aten.mean.default")
def mean(
    call: Call, x: TensorValue, dim: Axes = None, keepdim: bool = False, dtype: DType | None = None
) -> TensorValue:
    return reduce_axes(call, convert(x, call.result_dtype()), dim, keepdim, ops.mean)


@op("aten.prod.dim_int", "aten.prod.default")
def prod(
    call: Call, x: TensorValue, dim: Axes = None, keepdim: bool = False, dtype: DType | None = None
) -> TensorValue:
    return reduce_axes(call, convert(x, call.result_dtype()), dim, keepdim, ops.prod)


def _extremum(call: Call, x: TensorValue, dim: Axes, keepdim: bool, function: Any) -> TensorValue:
    if x.dtype is DType.bool:
        wide = ops.cast(x, DType.uint8)
        return convert(reduce_axes(call, wide, dim, keepdim, function), DType.bool)
    return reduce_axes(call, x, dim, keepdim, function)


@op("aten.amax.default", "aten.max.default")
def amax(call: Call, x: TensorValue, dim: Axes = None, keepdim: bool = False) -> TensorValue:
    return _extremum(call, x, dim, keepdim, _maximum)


@op("aten.amin.default", "aten.min.default")
def amin(call: Call, x: TensorValue, dim: Axes = None, keepdim: bool = False) -> TensorValue:
    return _extremum(call, x, dim, keepdim, _minimum)


@op("aten.any.dim", "aten.any.dims", "aten.any.default")
def any_(call: Call, x: TensorValue, dim: Axes = None, keepdim: bool = False) -> TensorValue:
    return _logical(call, x, dim, keepdim, _maximum, False)


@op("aten.all.dim", "aten.all.dims", "aten.all.default")
def all_(call: Call, x: TensorValue, dim: Axes = None, keepdim: bool = False) -> TensorValue:
    return _logical(call, x, dim, keepdim, _minimum, True)


def _logical(
    call: Call, x: TensorValue, dim: Axes, keepdim: bool, function: Any, of_none: bool
) -> TensorValue:
    axes = call.axes(dim, x.rank)
    truth = convert(x, DType.bool)
    # of no elements none is true, and all are
    if any(x.shape[axis] == 0 for axis in axes):
        shape = [1 if axis in axes else size for axis, size in enumerate(x.shape)]
        result = ops.broadcast_to(tensor_of(of_none, DType.bool), shape)
        return result if keepdim else drop_axes(result, axes)
    return _extremum(call, truth, dim, keepdim, function)


@op("aten.max.dim")
def max_dim(call: Call, x: TensorValue, dim: int, keepdim: bool = False) -> Any:
    return _with_index(call, x, dim, keepdim, _maximum, ops.argmax)


@op("aten.min.dim")
def min_dim(call: Call, x: TensorValue, dim: int, keepdim: bool = False) -> Any:
    return _with_index(call, x, dim, keepdim, _minimum, ops.argmin)


def _with_index(
    call: Call, x: TensorValue, dim: int, keepdim: bool, function: Any, arg: Any
) -> Any:
    if not x.rank:
        return x, ops.constant(np.array(0, np.int64))
    axis = call.axis(dim, x.rank)
    values = _extremum(call, x, axis, keepdim, function)
    if not call.node.wants(1):
        return values, None
    return values, _place(call, x, axis, keepdim, arg)


def _place(call: Call, x: TensorValue, axis: int, keepdim: bool, arg: Any) -> TensorValue:
    wide = ops.cast(x, DType.uint8) if x.dtype is DType.bool else x
    index = arg(wide, axis)
    return index if keepdim else drop_axes(index, [axis])


@op("aten.argmax.default")
def argmax(
    call: Call, x: TensorValue, dim: int | None = None, keepdim: bool = False
) -> TensorValue:
    return _arg(call, x, dim, keepdim, ops.argmax)


@op("aten.argmin.default")
def argmin(
    call: Call, x: TensorValue, dim: int | None = None, keepdim: bool = False
) -> TensorValue:
    return _arg(call, x, dim, keepdim, ops.argmin)


def _arg(call: Call, x: TensorValue, dim: int | None, keepdim: bool, arg: Any) -> TensorValue:
    if dim is None or not x.rank:
        index = _place(call, ops.reshape(x, [-1]), 0, False, arg)
        return ops.reshape(index, [1] * x.rank) if keepdim else index
    return _place(call, x, call.axis(dim, x.rank), keepdim, arg)


def variance(
    call: Call, x: TensorValue, dim: Axes, correction: float | None, keepdim: bool
) -> tuple[TensorValue, TensorValue]:
    """The variance and the mean."""
    axes = call.axes(dim, x.rank)
    count = math.prod(call.static(x.shape[axis]) for axis in axes)
    wide = ops.cast(x, DType.float32) if x.dtype.size_in_bytes < 4 else x
    center = over(wide, axes, ops.mean)
    apart = wide - center
    # as torch does: no degrees of freedom give an infinity or NaN
    freedom = max(count - (1 if correction is None else correction), 0)
    total = over(apart * apart, axes, ops.sum)
    result = ops.cast(total / tensor_of(freedom, total.dtype), x.dtype)
    center = ops.cast(center, x.dtype)
    return (result, center) if keepdim else (drop_axes(result, axes), drop_axes(center, axes))


@op("aten.var.correction")
def var(
    call: Call, x: TensorValue, dim: Axes = None, correction: Any = None, keepdim: bool = False
) -> TensorValue:
    return variance(call, x, dim, correction, keepdim)[0]


@op("aten.std.correction")
def std(
    call: Call, x: TensorValue, dim: Axes = None, correction: Any = None, keepdim: bool = False
) -> TensorValue:
    return ops.sqrt(variance(call, x, dim, correction, keepdim)[0])


@op("aten.var_mean.correction")
def var_mean(
    call: Call, x: TensorValue, dim: Axes = None, correction: Any = None, keepdim: bool = False
) -> Any:
    return variance(call, x, dim, correction, keepdim)


@op("aten.logsumexp.default")
def logsumexp(call: Call, x: TensorValue, dim: Axes, keepdim: bool = False) -> TensorValue:
    wide = convert(x, call.result_dtype())
    axes = call.axes(dim, x.rank)
    top = over(wide, axes, _maximum)
    # a maximum that is not finite is no shift
    shift = ops.where(ops.is_inf(top), 0.0, top)
    total = ops.log(over(ops.exp(wide - shift), axes, ops.sum)) + shift
    return total if keepdim else drop_axes(total, axes)


@op("aten.linalg_vector_norm.default")
def vector_norm(
    call: Call,
    x: TensorValue,
    order: float = 2,
    dim: Axes = None,
    keepdim: bool = False,
    dtype: DType | None = None,
) -> TensorValue:
    size = ops.abs(convert(x, call.result_dtype()))
    if order == math.inf:
        return reduce_axes(call, size, dim, keepdim, _maximum)
    if order == -math.inf:
        return reduce_axes(call, size, dim, keepdim, _minimum)
    if order == 1:
        return reduce_axes(call, size, dim, keepdim, ops.sum)
    if order == 2:
        return ops.sqrt(reduce_axes(call, size * size, dim, keepdim, ops.sum))
    if order == 0:
        counted = ops.cast(ops.not_equal(size, 0.0), size.dtype)
        return reduce_axes(call, counted, dim, keepdim, ops.sum)
    return ops.pow(
        reduce_axes(call, ops.pow(size, float(order)), dim, keepdim, ops.sum), 1 / float(order)
    )


@op("aten.cumsum.default")
def cumsum(call: Call, x: TensorValue, dim: int, dtype: DType | None = None) -> TensorValue:
    wide = convert(x, call.result_dtype())
    return ops.cumsum(wide, call.axis(dim, x.rank)) if x.rank else wide


@op("aten.cumprod.default")
def cumprod(call: Call, x: TensorValue, dim: int, dtype: DType | None = None) -> TensorValue:
    """The products of prefixes, by doubling their length."""
    x = convert(x, call.result_dtype())
    if not x.rank:
        return x
    axis = call.axis(dim, x.rank)
    size = call.static(x.shape[axis])
    step = 1
    while step < size:
        index: list[Any] = [slice(None)] * x.rank
        index[axis] = slice(0, size - step)
        shape = [step if i == axis else d for i, d in enumerate(x.shape)]
        ones = ops.broadcast_to(tensor_of(1, x.dtype), shape)
        x = x * ops.concat([ones, x[tuple(index)]], axis)
        step *= 2
    return x


@op("aten.topk.default")
def topk(
    call: Call, x: TensorValue, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True
) -> Any:
    if not x.rank:
        raise Unsupported("takes no tensor of rank 0")
    axis = call.axis(dim, x.rank)
    if not is_known(Dim(k)) or not is_known(x.shape[axis]):
        # a run knows the sizes: all elements are sorted, and the first ones taken
        indices = _first_places(sorting_places(x, axis, largest), Dim(k), axis)
        return gather_along(x, indices, axis), indices
    count = call.static(k)
    if count == 0:
        index: list[Any] = [slice(None)] * x.rank
        index[axis] = slice(0, 0)
        none = x[tuple(index)]
        return none, ops.cast(none, DType.int64)
    return (ops.top_k if largest else ops.bottom_k)(x, count, axis)


def sorting_places(x: TensorValue, axis: int, descending: bool) -> TensorValue:
    """The positions along an axis, of any size, in the order of the elements there; ties keep theirs."""
    order = list(range(x.rank))
    # `argsort` sorts along the first axis; a swap undoes itself
    order[0], order[axis] = order[axis], order[0]
    places = ops.argsort(ops.permute(x, order), ascending=not descending)
    return ops.permute(places, order)


def _first_places(places: TensorValue, count: Dim, axis: int) -> TensorValue:
    """The first positions along an axis; a run checks that there are as many."""
    index: list[Any] = [slice(None)] * places.rank
    index[axis] = slice(Dim(0), count)
    return places[tuple(index)]


@op("aten.sort.default")
def sort(call: Call, x: TensorValue, dim: int = -1, descending: bool = False) -> Any:
    if not x.rank:
        return x, ops.constant(np.array(0, np.int64))
    axis = call.axis(dim, x.rank)
    if is_known(x.shape[axis]):
        return topk(call, x, x.shape[axis], axis, descending)
    places = sorting_places(x, axis, descending)
    return gather_along(x, places, axis), places


@op("aten.sort.stable")
def sort_stable(
    call: Call, x: TensorValue, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> Any:
    return sort(call, x, dim, descending)


@op("aten._softmax.default", "aten.softmax.int", "aten._safe_softmax.default")
def softmax(call: Call, x: TensorValue, dim: int, half_to_float: Any = False) -> TensorValue:
    wide = convert(x, call.result_dtype())
    # of one element: 1, or NaN of NaN
    result = ops.softmax(wide, call.axis(dim, x.rank)) if x.rank else wide * 0.0 + 1.0
    if call.node.op != "aten._safe_softmax.default" or 0 in x.shape:
        return result
    # a row of -inf gives 0 instead of NaN, and one with a NaN stays as it is
    greatest = ops.max(wide, axis=call.axis(dim, x.rank)) if x.rank else wide
    return ops.where(ops.equal(greatest, -math.inf), 0.0, result)


@op("aten._log_softmax.default", "aten.log_softmax.int")
def log_softmax(call: Call, x: TensorValue, dim: int, half_to_float: Any = False) -> TensorValue:
    wide = convert(x, call.result_dtype())
    return ops.logsoftmax(wide, call.axis(dim, x.rank)) if x.rank else wide * 0.0
