"""Slices, gathers and scatters."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from max.dtype import DType
from max.graph import Dim, TensorValue, ops
from max.graph.dim import StaticDim
from max.importers.errors import MissingContents, Unsupported
from max.importers.functions.indexing import gather_along, pad_axes, positive, reverse_by_length
from max.importers.functions.reductions import over
from max.importers.node import Node
from max.importers.onnx.table import op

Array = npt.NDArray[Any]

_END = 1_000_000_000
"""Exporters write bounds beyond it for the end of an axis."""


@op("Slice")
def slice_(node: Node) -> TensorValue:
    x = node.tensor(0)
    if node.version < 10:
        starts = [Dim(n) for n in node.attr("starts")]
        ends = [Dim(n) for n in node.attr("ends")]
        axes = node.attr("axes") or list(range(len(starts)))
        steps = [1] * len(starts)
    else:
        starts, ends = node.sizes(1), node.sizes(2)
        axes = node.ints(3) if node.has(3) else list(range(len(starts)))
        steps = node.ints(4) if node.has(4) else [1] * len(starts)
    index: list[Any] = [slice(None)] * x.rank
    for start, stop, axis, step in zip(starts, ends, node.axes(axes, x.rank), steps, strict=True):
        index[axis] = _bounds(node, start, stop, step, x.shape[axis])
    return x[tuple(index)] if x.rank else x


def _bounds(node: Node, start: Dim, stop: Dim, step: int, size: Dim) -> slice:
    """The slice of one axis, whose bounds are clamped to it as ONNX does."""
    if step == 0:
        raise Unsupported("the step is 0")
    if all(isinstance(dim, StaticDim) for dim in (start, stop, size)):
        first, last, _ = slice(int(start), int(stop), step).indices(int(size))
        # the first element is part of the slice
        if step < 0 and int(stop) < -int(size):
            last = -1
        if (last - first) * step <= 0:
            return slice(0, 0, 1)
        # -1 would be the last element
        return slice(first, None if last < 0 else last, step)
    if step == 1:
        return slice(_inside(node, start, size, False), _inside(node, stop, size, True))
    # the whole axis, reversed
    if step == -1 and start == -1 and isinstance(stop, StaticDim) and int(stop) <= -(1 << 31):
        return slice(None, None, -1)
    raise MissingContents(node.source.inputs[0], f"the size {size}")


def _inside(node: Node, limit: Dim, size: Dim, is_stop: bool) -> Dim:
    """A bound of an axis of symbolic size, which a run checks to lie within ``[0, size]``."""
    if isinstance(limit, StaticDim):
        if int(limit) >= _END:
            return size
        if int(limit) <= -_END:
            return Dim(0)
        if int(limit) < 0:
            return size + limit
        # a stop beyond a smaller size would have to be clamped
        if int(limit) > 0 and is_stop:
            raise MissingContents(node.source.inputs[0], f"the size {size}")
    return limit


@op("Gather")
def gather(node: Node, x: TensorValue, indices: TensorValue) -> TensorValue:
    axis = node.axis("axis", x.rank, 0)
    return ops.gather(x, positive(indices, x.shape[axis]), axis)


@op("GatherElements")
def gather_elements(node: Node, x: TensorValue, indices: TensorValue) -> TensorValue:
    axis = node.axis("axis", x.rank, 0)
    return gather_along(x, positive(indices, x.shape[axis]), axis)


@op("GatherND")
def gather_nd(node: Node, x: TensorValue, indices: TensorValue) -> TensorValue:
    batch = node.attr("batch_dims", 0)
    return ops.gather_nd(x, _positive_rows(indices, x.shape[batch:]), batch)


def _positive_rows(indices: TensorValue, sizes: Any) -> TensorValue:
    """Index vectors whose elements are counted from 0."""
    count = int(indices.shape[-1])
    limits = ops.cast(
        ops.shape_to_tensor(list(sizes[:count])), DType.int64
    )  # the size of each indexed axis
    wide = ops.cast(indices, DType.int64)
    return ops.where(wide < 0, wide + limits, wide)


_SCATTERS = {
    "none": ops.scatter, "add": ops.scatter_add, "mul": ops.scatter_mul, "max": ops.scatter_max, "min": ops.scatter_min,
}  # fmt: skip
_SCATTERS_ND = {
    "none": ops.scatter_nd, "add": ops.scatter_nd_add, "mul": ops.scatter_nd_mul, "max": ops.scatter_nd_max,
    "min": ops.scatter_nd_min,
}  # fmt: skip


def _of(table: dict[str, Any], name: str) -> Any:
    if name not in table:
        raise Unsupported(f"the reduction is {name!r}, expected {', '.join(table)}")
    return table[name]


@op("Scatter", "ScatterElements")
def scatter(node: Node, x: TensorValue, indices: TensorValue, updates: TensorValue) -> TensorValue:
    axis = node.axis("axis", x.rank, 0)
    function = _of(_SCATTERS, node.attr("reduction", "none"))
    return function(x, updates, positive(indices, x.shape[axis]), axis)


@op("ScatterND")
def scatter_nd(
    node: Node, x: TensorValue, indices: TensorValue, updates: TensorValue
) -> TensorValue:
    function = _of(_SCATTERS_ND, node.attr("reduction", "none"))
    return function(x, updates, _positive_rows(indices, x.shape))


@op("TensorScatter")
def tensor_scatter(
    node: Node, cache: TensorValue, update: TensorValue, starts: TensorValue | None = None
) -> TensorValue:
    """Writes rows of a cache at a position of each sequence."""
    axis = node.axis("axis", cache.rank, -2)
    length, size = update.shape[axis], cache.shape[axis]
    places = ops.range(0, length, 1, dtype=DType.int64, device=cache.device)
    shape = [length if i == axis else Dim(1) for i in range(cache.rank)]
    places = ops.reshape(places, shape)
    if starts is not None:
        rows = [cache.shape[0] if i == 0 else Dim(1) for i in range(cache.rank)]
        places = places + ops.reshape(
            ops.cast(starts, DType.int64), rows
        )  # one start for each sequence
    if node.attr("mode", "linear") == "circular":
        # a ring buffer: rows past the end overwrite the oldest
        places = ops.mod(places, TensorValue(size))
    return ops.scatter(cache, update, ops.broadcast_to(places, update.shape), axis)


@op("OneHot")
def one_hot(node: Node) -> TensorValue:
    indices, values = node.tensor(0), node.tensor(2)
    depth = node.sizes(1)[0] if node.dtype(1).is_integral() else Dim(int(node.number(1)))
    rank = indices.rank + 1
    axis = node.axis("axis", rank, -1)
    wide = ops.cast(indices, DType.int64)
    wide = ops.where(wide < 0, wide + depth, wide)
    line = ops.range(0, depth, 1, dtype=DType.int64, device=indices.device)
    line = ops.reshape(line, [depth if i == axis else Dim(1) for i in range(rank)])
    hot = ops.equal(ops.unsqueeze(wide, axis), line)
    return ops.where(hot, values[1], values[0])


@op("NonZero")
def non_zero(node: Node, x: TensorValue) -> TensorValue:
    mask = x if x.rank else ops.reshape(x, [1])
    # only a run knows their number
    places = ops.nonzero(mask, node.new_size("nonzero"))
    return ops.permute(places, [1, 0])


@op("Compress")
def compress(node: Node, x: TensorValue, condition: TensorValue) -> TensorValue:
    axis = node.attr("axis")
    if axis is None:
        x, axis = ops.reshape(x, [-1]), 0
    else:
        axis = node.checked_axis(axis, x.rank)
    places = ops.reshape(ops.nonzero(condition, node.new_size("selected")), [-1])
    return ops.gather(x, places, axis)


@op("ReverseSequence")
def reverse_sequence(node: Node, x: TensorValue, lengths: TensorValue) -> TensorValue:
    time, batch = node.attr("time_axis", 0), node.attr("batch_axis", 1)
    return reverse_by_length(x, lengths, time, batch)


@op("Trilu")
def trilu(node: Node) -> TensorValue:
    x = node.tensor(0)
    k = int(node.number(1)) if node.has(1) else 0
    rows, columns = x.shape[-2:]
    row = ops.reshape(ops.range(0, rows, 1, dtype=DType.int64, device=x.device), [rows, 1])
    column = ops.reshape(ops.range(0, columns, 1, dtype=DType.int64, device=x.device), [1, columns])
    # of an element from the main diagonal
    distance = column - row
    kept = distance >= k if node.attr("upper", 1) else distance <= k
    return ops.where(kept, x, ops.constant(np.zeros((), x.dtype.to_numpy())))


@op("Pad")
def pad(node: Node) -> TensorValue:
    x = node.tensor(0)
    value: Any = node.attr("value", 0.0)
    if node.version < 11:
        amounts, axes = node.attr("pads") or node.attr("paddings"), list(range(x.rank))
    else:
        amounts = node.ints(1)
        axes = node.axes(node.ints(3), x.rank) if node.has(3) else list(range(x.rank))
        value = node.number(2) if node.has(2) else 0
    if len(amounts) != 2 * len(axes):
        raise Unsupported(f"has {len(amounts)} paddings for {len(axes)} axes")
    pairs = [(0, 0)] * x.rank
    for index, axis in enumerate(axes):
        pairs[axis] = (amounts[index], amounts[index + len(axes)])
    return pad_axes(x, pairs, node.attr("mode", "constant"), value)


@op("DepthToSpace")
def depth_to_space(node: Node, x: TensorValue) -> TensorValue:
    size = node.attr("blocksize")
    batch, channels, *spatial = x.shape
    n = len(spatial)
    depth = _quotient(node, channels, size**n)
    taps = [size] * n
    if node.attr("mode", "DCR") == "CRD":
        # CRD: the channel comes before the position within a block
        x = ops.reshape(x, [batch, depth, *taps, *spatial])
        order = [
            0,
            1,
            *(axis for i in range(n) for axis in (2 + n + i, 2 + i)),
        ]  # each spatial axis, then its tap
    else:
        x = ops.reshape(x, [batch, *taps, depth, *spatial])
        order = [0, 1 + n, *(axis for i in range(n) for axis in (2 + n + i, 1 + i))]
    return ops.reshape(ops.permute(x, order), [batch, depth, *(dim * size for dim in spatial)])


def _quotient(node: Node, dim: Dim, divisor: int) -> Dim:
    exact = dim.expr.exact_quotient(divisor)
    if exact is None:
        raise Unsupported(f"axis 1 has size {dim}, which is no multiple of {divisor}")
    return Dim.from_mlir(exact)


@op("SpaceToDepth")
def space_to_depth(node: Node, x: TensorValue) -> TensorValue:
    size = node.attr("blocksize")
    batch, channels, *spatial = x.shape
    n = len(spatial)
    parts = [_quotient(node, dim, size) for dim in spatial]
    split: list[Any] = [batch, channels]
    for part in parts:
        split += [part, size]
    x = ops.reshape(x, split)
    channel_first = node.attr("mode", "DCR") == "CRD"
    taps = [3 + 2 * i for i in range(n)]
    outer = [2 + 2 * i for i in range(n)]
    order = [0, 1, *taps, *outer] if channel_first else [0, *taps, 1, *outer]
    return ops.reshape(ops.permute(x, order), [batch, channels * size**n, *parts])


@op("Det")
def determinant(node: Node, x: TensorValue) -> TensorValue:
    """Gaussian elimination with the largest pivot of each column."""
    size = node.static(x.shape[-1])
    if x.shape[-2] != size:
        raise Unsupported(f"the operand has the shape {x.shape}, expected square matrices")
    lead = x.shape[:-2]
    x = ops.reshape(x, [math.prod(lead, start=1), size, size])
    result = ops.broadcast_to(ops.constant(np.ones((), x.dtype.to_numpy())), [x.shape[0], 1, 1])
    rows = ops.reshape(ops.range(0, size, 1, dtype=DType.int64, device=x.device), [1, size, 1])
    for step in range(size):
        column = x[:, :, step : step + 1]
        sizes = ops.where(rows >= step, ops.abs(column), -1.0)
        pivot = ops.argmax(sizes, 1)
        at_pivot = ops.equal(rows, pivot)
        at_step = ops.equal(rows, step)
        pivot_row = over(ops.where(at_pivot, x, 0.0), [1], ops.sum)
        step_row = x[:, step : step + 1, :]
        x = ops.where(at_step, pivot_row, ops.where(at_pivot, step_row, x))
        value = pivot_row[:, :, step : step + 1]
        # an exchange of rows changes the sign
        swapped = ops.where(ops.equal(pivot, step), value, -value)
        result = result * swapped
        # singular: the determinant is 0 already, whatever follows
        divisor = ops.where(ops.equal(value, 0.0), 1.0, value)
        factor = ops.where(rows > step, x[:, :, step : step + 1] / divisor, 0.0)
        x = x - factor * pivot_row
    return ops.reshape(result, lead)
