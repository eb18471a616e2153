"""Reductions, scans and selections along axes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from max.dtype import DType
from max.graph import TensorValue, ops
from max.importers.errors import Unsupported
from max.importers.functions.reductions import Reduction, drop_axes, over, reversed_along
from max.importers.node import Node
from max.importers.onnx.table import op

_AXES_OPERAND = {"ReduceSum": 13}
"""The versions since which the axes are an operand; 18 of other ops."""


def _axes(node: Node, rank: int) -> list[int] | None:
    """The reduced axes; None: nothing is reduced."""
    axes = node.attr("axes")
    if node.version >= _AXES_OPERAND.get(node.op, 18):
        axes = node.ints(1) if node.has(1) else []
        if not axes and node.attr("noop_with_empty_axes", 0):
            return None
    return node.axes(axes, rank) if axes else list(range(rank))


def _reduce(node: Node, x: TensorValue, reduction: Reduction) -> TensorValue:
    axes = _axes(node, x.rank)
    if axes is None:
        return x
    result = over(x, axes, reduction)
    return result if node.attr("keepdims", 1) else drop_axes(result, axes)


def _maximum(x: TensorValue, axis: int) -> TensorValue:
    return ops.max(x, axis=axis)


def _minimum(x: TensorValue, axis: int) -> TensorValue:
    return ops.min(x, axis=axis)


_REDUCTIONS: dict[str, Reduction] = {
    "ReduceSum": ops.sum, "ReduceMean": ops.mean, "ReduceProd": ops.prod, "ReduceMax": _maximum, "ReduceMin": _minimum,
}  # fmt: skip


@op(*_REDUCTIONS)
def reduce(node: Node) -> TensorValue:
    x = node.tensor(0)
    if node.op in ("ReduceMax", "ReduceMin"):
        return _reduce(node, _with_limit(node, x), _REDUCTIONS[node.op])
    if node.op == "ReduceMean" and x.dtype.is_integral():
        # the mean is rounded to 0, by the cast
        total = ops.cast(_reduce(node, ops.cast(x, DType.float64), ops.mean), x.dtype)
        return total
    return _reduce(node, x, _REDUCTIONS[node.op])


def _with_limit(node: Node, x: TensorValue) -> TensorValue:
    """The operand of an extremum; an empty axis gets the least, or the greatest, number of the type."""
    axes = _axes(node, x.rank)
    if axes is None or not any(x.shape[axis] == 0 for axis in axes):
        return x
    dtype = x.dtype
    if dtype is DType.bool:
        limit: Any = node.op == "ReduceMin"
    elif dtype.is_float():
        limit = math.inf if node.op == "ReduceMin" else -math.inf
    else:
        info = np.iinfo(dtype.to_numpy())
        limit = info.max if node.op == "ReduceMin" else info.min
    shape = [1 if axis in axes else dim for axis, dim in enumerate(x.shape)]
    return ops.broadcast_to(ops.constant(np.array(limit, dtype.to_numpy())), shape)


@op("ReduceL1")
def reduce_l1(node: Node) -> TensorValue:
    x = node.tensor(0)
    return _reduce(node, x if x.dtype.is_unsigned_integral() else ops.abs(x), ops.sum)


@op("ReduceL2")
def reduce_l2(node: Node) -> TensorValue:
    x = node.tensor(0)
    if x.dtype.is_integral():
        # squares of integers would wrap in their own type
        wide = ops.cast(x, DType.float64)
        return ops.cast(ops.sqrt(_reduce(node, wide * wide, ops.sum)), x.dtype)
    wide = ops.cast(x, DType.float32) if x.dtype.size_in_bytes < 4 else x
    return ops.cast(ops.sqrt(_reduce(node, wide * wide, ops.sum)), x.dtype)


@op("ReduceSumSquare")
def reduce_sum_square(node: Node) -> TensorValue:
    x = node.tensor(0)
    return _reduce(node, x * x, ops.sum)


@op("ReduceLogSum")
def reduce_log_sum(node: Node) -> TensorValue:
    return _floating(node, lambda x: ops.log(_reduce(node, x, ops.sum)))


@op("ReduceLogSumExp")
def reduce_log_sum_exp(node: Node) -> TensorValue:
    def result(x: TensorValue) -> TensorValue:
        axes = _axes(node, x.rank)
        if axes is None:
            return x
        if any(x.shape[axis] == 0 for axis in axes):
            # without elements there is no maximum
            return ops.log(_reduce(node, ops.exp(x), ops.sum))
        top = over(x, axes, _maximum)
        # a maximum that is not finite is no shift
        shift = ops.where(ops.is_inf(top), 0.0, top)
        total = ops.log(over(ops.exp(x - shift), axes, ops.sum)) + shift
        return total if node.attr("keepdims", 1) else drop_axes(total, axes)

    return _floating(node, result)


def _floating(node: Node, function: Callable[[TensorValue], TensorValue]) -> TensorValue:
    x = node.tensor(0)
    if x.dtype.is_float():
        return function(x)
    return ops.cast(function(ops.cast(x, DType.float64)), x.dtype)


@op("ArgMax", "ArgMin")
def arg_extremum(node: Node, x: TensorValue) -> TensorValue:
    axis = node.axis("axis", x.rank, 0)
    function = ops.argmax if node.op == "ArgMax" else ops.argmin
    if node.attr("select_last_index", 0):
        last = x.shape[axis] - 1
        # the first in the reversed axis is the last one
        index = last - function(reversed_along(x, axis), axis)
    else:
        index = function(x, axis)
    return index if node.attr("keepdims", 1) else drop_axes(index, [axis])


@op("CumSum")
def cumsum(node: Node) -> TensorValue:
    x = node.tensor(0)
    axis = node.checked_axis(int(node.number(1)), x.rank)
    return ops.cumsum(
        x, axis, exclusive=bool(node.attr("exclusive", 0)), reverse=bool(node.attr("reverse", 0))
    )


@op("CumProd")
def cumprod(node: Node) -> TensorValue:
    """The products of prefixes, by doubling their length."""
    x = node.tensor(0)
    axis = node.checked_axis(int(node.number(1)), x.rank)
    size = node.static(x.shape[axis])
    if node.attr("reverse", 0):
        x = reversed_along(x, axis)
    if node.attr("exclusive", 0) and size:
        # exclusive: the product of the elements before each one
        x = _shift(x, axis, 1, size)
    step = 1
    while step < size:
        # before each round, an element is the product of the `step` elements up to it
        x = x * _shift(x, axis, step, size)
        step *= 2
    return reversed_along(x, axis) if node.attr("reverse", 0) else x


def _shift(x: TensorValue, axis: int, step: int, size: int) -> TensorValue:
    """The elements `step` places before each one; ones before the first."""
    index: list[Any] = [slice(None)] * x.rank
    index[axis] = slice(0, size - step)
    shape = [step if i == axis else dim for i, dim in enumerate(x.shape)]
    ones = ops.broadcast_to(ops.constant(np.ones((), x.dtype.to_numpy())), shape)
    return ops.concat([ones, x[tuple(index)]], axis)


@op("TopK")
def top_k(node: Node) -> Any:
    x = node.tensor(0)
    k = node.attr("k") if node.version < 10 else int(node.number(1))
    axis = node.axis("axis", x.rank, -1)
    size = node.static(x.shape[axis])
    if not 0 <= k <= size:
        raise Unsupported(f"k is {k}, the axis has {size} elements")
    if k == 0:
        index: list[Any] = [slice(None)] * x.rank
        index[axis] = slice(0, 0)
        none = x[tuple(index)]
        return none, ops.cast(none, DType.int64)
    select = ops.top_k if node.attr("largest", 1) else ops.bottom_k
    return select(x, k, axis)


@op("LpNormalization")
def lp_normalization(node: Node, x: TensorValue) -> TensorValue:
    axis, p = node.axis("axis", x.rank, -1), node.attr("p", 2)
    if p == 1:
        norm = ops.sum(ops.abs(x), axis)
    elif p == 2:
        norm = ops.sqrt(ops.sum(x * x, axis))
    else:
        raise Unsupported(f"p is {p}, expected 1 or 2")
    return ops.where(ops.equal(norm, 0.0), 0.0, x / norm)
