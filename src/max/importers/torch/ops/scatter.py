"""Tensors with elements replaced or added to, at positions that other tensors hold."""

from __future__ import annotations

from typing import Any

from max.dtype import DType
from max.graph import TensorValue, ops
from max.importers.errors import Unsupported
from max.importers.functions.indexing import positive
from max.importers.torch.ops.arithmetic import convert, tensor_of
from max.importers.torch.ops.indexing import Indices, Places, expand_masks, inverse
from max.importers.torch.ops.shape import is_known, slice_bound
from max.importers.torch.table import Call, op

_REDUCTIONS: dict[str, Any] = {
    "sum": ops.scatter_add, "prod": ops.scatter_mul, "amax": ops.scatter_max, "amin": ops.scatter_min,
    "add": ops.scatter_add, "multiply": ops.scatter_mul,
}  # fmt: skip


def _covered_part(source: TensorValue, index: TensorValue) -> TensorValue:
    """The part of the source that the indices cover."""
    if list(source.shape) == list(index.shape):
        return source
    return source[tuple(slice(0, size) for size in index.shape)]


def _scatter(
    call: Call, function: Any, x: TensorValue, dim: int, index: TensorValue, source: TensorValue
) -> TensorValue:
    if not x.rank:
        raise Unsupported("takes no tensor of rank 0")
    axis = call.axis(dim, x.rank)
    return function(x, _covered_part(source, index), positive(index, x.shape[axis]), axis)


@op("aten.scatter.src")
def scatter(
    call: Call, x: TensorValue, dim: int, index: TensorValue, source: TensorValue
) -> TensorValue:
    return _scatter(call, ops.scatter, x, dim, index, source)


@op("aten.scatter.value")
def scatter_value(
    call: Call, x: TensorValue, dim: int, index: TensorValue, value: Any
) -> TensorValue:
    source = ops.broadcast_to(tensor_of(value, x.dtype), index.shape)
    return _scatter(call, ops.scatter, x, dim, index, source)


@op("aten.scatter_add.default")
def scatter_add(
    call: Call, x: TensorValue, dim: int, index: TensorValue, source: TensorValue
) -> TensorValue:
    return _scatter(call, ops.scatter_add, x, dim, index, source)


@op("aten.scatter_reduce.two", "aten.scatter.reduce")
def scatter_reduce(
    call: Call,
    x: TensorValue,
    dim: int,
    index: TensorValue,
    source: TensorValue,
    reduce: str,
    include_self: bool = True,
) -> TensorValue:
    if reduce not in _REDUCTIONS or not include_self:
        raise Unsupported(f"the reduction is {reduce!r}, include_self is {include_self}")
    return _scatter(call, _REDUCTIONS[reduce], x, dim, index, source)


@op("aten.index_put.default", "aten._unsafe_index_put.default")
def index_put(
    call: Call, x: TensorValue, indices: Indices, values: TensorValue, accumulate: bool = False
) -> TensorValue:
    if (
        len(indices) == 1
        and indices[0] is not None
        and indices[0].dtype is DType.bool
        and (values.rank == 0 or list(values.shape) == [1])
        and not accumulate
    ):
        # one value for all true elements needs no positions
        mask = indices[0]
        mask = ops.reshape(mask, [*mask.shape, *[1] * (x.rank - mask.rank)])
        return ops.where(mask, ops.reshape(convert(values, x.dtype), []), x)
    places = Places(x, expand_masks(call, indices))
    base = ops.permute(x, places.order)
    depth = int(places.rows.shape[-1])
    # the axes of the indices, then those that no index selects
    rank = places.lead + x.rank - depth
    order = places.to_result(rank)
    shape = [*places.rows.shape[:-1], *base.shape[depth:]]
    # values broadcast to what `index` would return
    values = ops.broadcast_to(convert(values, x.dtype), [shape[axis] for axis in order])
    updates = ops.permute(values, inverse(order)) if rank else values
    function = ops.scatter_nd_add if accumulate else ops.scatter_nd
    return ops.permute(function(base, updates, places.rows), inverse(places.order))


@op("aten.index_add.default")
def index_add(
    call: Call, x: TensorValue, dim: int, index: TensorValue, source: TensorValue, alpha: Any = 1
) -> TensorValue:
    axis = call.axis(dim, x.rank)
    added = source if alpha == 1 else source * tensor_of(alpha, x.dtype)
    return ops.scatter_add(x, added, _along(index, source, axis), axis)


def _along(index: TensorValue, source: TensorValue, axis: int) -> TensorValue:
    """A vector of positions along an axis, for each element of a tensor."""
    shape = [index.shape[0] if a == axis else 1 for a in range(source.rank)]
    flat = ops.reshape(ops.cast(index, DType.int64), shape)
    return ops.broadcast_to(flat, source.shape)


@op("aten.slice_scatter.default")
def slice_scatter(
    call: Call,
    x: TensorValue,
    source: TensorValue,
    dim: int = 0,
    start: Any = None,
    end: Any = None,
    step: int = 1,
) -> TensorValue:
    axis = call.axis(dim, x.rank)
    size = x.shape[axis]
    first, last = slice_bound(start, size, 0), slice_bound(end, size, size)
    if first == 0 and last == size and step == 1:
        return source
    if is_known(first) and is_known(last) and int(first) >= int(last):
        return x
    # elements between those of the slice stay: positions instead of parts
    if step != 1:
        line = ops.range(0, source.shape[axis], 1, dtype=DType.int64, device=x.device)
        return ops.scatter(x, source, _along(line * step + first, source, axis), axis)
    before: list[Any] = [slice(None)] * x.rank
    after: list[Any] = [slice(None)] * x.rank
    before[axis], after[axis] = slice(0, first), slice(last, size)
    return ops.concat([x[tuple(before)], source, x[tuple(after)]], axis)


@op("aten.select_scatter.default")
def select_scatter(
    call: Call, x: TensorValue, source: TensorValue, dim: int, index: int
) -> TensorValue:
    axis = call.axis(dim, x.rank)
    # -1 + 1 is 0, which would end the slice at the front
    end = index + 1 if index != -1 else None
    return slice_scatter(call, x, ops.unsqueeze(source, axis), axis, index, end)


@op("aten.masked_scatter.default")
def masked_scatter(
    call: Call, x: TensorValue, mask: TensorValue, source: TensorValue
) -> TensorValue:
    return ops.masked_scatter(
        x, ops.broadcast_to(mask, x.shape), source, call.node.new_size("masked")
    )


@op("aten.histc.default")
def histogram(
    call: Call, x: TensorValue, bins: int = 100, min: float = 0, max: float = 0
) -> TensorValue:
    """The number of elements in each of several ranges of equal width."""
    count, low, high = call.static(bins), call.number(min), call.number(max)
    if low >= high:
        raise Unsupported("takes the limits from the elements")
    flat = ops.reshape(x, [-1])
    inside = ops.logical_and(flat >= tensor_of(low, x.dtype), flat <= tensor_of(high, x.dtype))
    wide = flat if x.dtype.is_float() else ops.cast(flat, DType.float64)
    place = ops.floor((wide - low) * (count / (high - low)))
    # the upper limit belongs to the last range
    place = ops.where(place >= float(count), float(count - 1), ops.where(place < 0.0, 0.0, place))
    # an element outside adds 0 to the first range
    index = ops.cast(ops.where(inside, place, 0.0), DType.int64)
    ones = ops.cast(inside, x.dtype)
    zeros = ops.broadcast_to(tensor_of(0, x.dtype), [count])
    return ops.scatter_add(zeros, ones, index, 0)
