"""Other shapes of the same elements, parts of tensors, and joined tensors."""

from __future__ import annotations

import re
from typing import Any

from max.dtype import DType
from max.graph import Dim, TensorValue, ops
from max.importers.errors import Unsupported
from max.importers.functions.indexing import pad_axes
from max.importers.functions.integer_products import permute_source, quantized_of, reshape_source
from max.importers.functions.reductions import reversed_along
from max.importers.torch.ops.arithmetic import convert, tensor_of
from max.importers.torch.ops.sizes import extreme, number_of, size_of
from max.importers.torch.table import Call, op
from max.importers.values import Imported


@op("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default")
def view(call: Call, x: TensorValue, size: list[Any]) -> TensorValue | Imported:
    dims = [Dim(number) for number in size]
    if any(number == -1 for number in size) and any(dim == 0 for dim in x.shape):
        # nothing can be derived from no elements: the size of -1 is 0
        dims = [Dim(0) if dim == -1 else dim for dim in dims]
    source = quantized_of(call.node.value(0))
    y = ops.reshape(x, dims)
    return y if source is None else Imported(y, source=reshape_source(source, y.shape))


@op("aten.view.dtype")
def view_dtype(call: Call, x: TensorValue, dtype: DType) -> TensorValue:
    if dtype is x.dtype:
        return x
    raise Unsupported(f"reads the bits of {x.dtype.name} as {dtype.name}")


@op("aten.permute.default")
def permute(call: Call, x: TensorValue, dims: list[int]) -> TensorValue | Imported:
    if not x.rank:
        return x
    order = call.axes(dims, x.rank)
    source = quantized_of(call.node.value(0))
    y = ops.permute(x, order)
    return y if source is None else Imported(y, source=permute_source(source, order))


@op("aten.transpose.int")
def transpose(call: Call, x: TensorValue, first: int, second: int) -> TensorValue:
    return ops.transpose(x, first, second) if x.rank else x


@op("aten.t.default")
def matrix_transpose(call: Call, x: TensorValue) -> TensorValue:
    return ops.transpose(x, 0, 1) if x.rank == 2 else x


@op("aten.unsqueeze.default")
def unsqueeze(call: Call, x: TensorValue, dim: int) -> TensorValue:
    return ops.unsqueeze(x, call.axis(dim, x.rank + 1))


@op("aten.squeeze.dim", "aten.squeeze.dims", "aten.squeeze.default")
def squeeze(call: Call, x: TensorValue, dim: Any = None) -> TensorValue:
    axes = call.axes(dim, x.rank) if dim != [] else []
    kept = [size for axis, size in enumerate(x.shape) if axis not in axes or size != 1]
    return ops.reshape(x, kept)


@op("aten.expand.default")
def expand(call: Call, x: TensorValue, size: list[Any], implicit: bool = False) -> TensorValue:
    new = len(size) - x.rank
    own = [Dim(1)] * new + list(x.shape)
    wanted = [old if number == -1 else Dim(number) for old, number in zip(own, size, strict=True)]
    return ops.broadcast_to(x, wanted)


@op("aten.repeat.default")
def repeat(call: Call, x: TensorValue, repeats: list[Any]) -> TensorValue:
    new = len(repeats) - x.rank
    x = ops.reshape(x, [*[1] * new, *x.shape])
    if all(number == 1 for number in repeats):
        return x
    shape, wide, result = [], [], []
    # each axis becomes [1, size], which broadcasts to [count, size]
    for size, count in zip(x.shape, repeats, strict=True):
        shape += [Dim(1), size]
        wide += [Dim(count), size]
        result.append(size * count)
    return ops.reshape(ops.broadcast_to(ops.reshape(x, shape), wide), result)


@op("aten.cat.default")
def cat(call: Call, tensors: list[TensorValue], dim: int = 0) -> TensorValue:
    dtype = call.result_dtype()
    # torch takes empty vectors among tensors of any rank
    rank = max(tensor.rank for tensor in tensors)
    kept = [t for t in tensors if not (t.rank == 1 and rank > 1 and t.shape[0] == 0)]
    return ops.concat([convert(tensor, dtype) for tensor in kept], call.axis(dim, rank))


@op("aten.stack.default")
def stack(call: Call, tensors: list[TensorValue], dim: int = 0) -> TensorValue:
    dtype = call.result_dtype()
    axis = call.axis(dim, tensors[0].rank + 1)
    return ops.stack([convert(tensor, dtype) for tensor in tensors], axis)


@op("aten.split_with_sizes.default", "aten.split_with_sizes_copy.default")
def split_with_sizes(call: Call, x: TensorValue, sizes: list[Any], dim: int = 0) -> Any:
    return tuple(ops.split(x, [Dim(size) for size in sizes], call.axis(dim, x.rank)))


@op("aten.split.Tensor")
def split(call: Call, x: TensorValue, size: int, dim: int = 0) -> Any:
    axis = call.axis(dim, x.rank)
    total, part = call.static(x.shape[axis]), call.static(size)
    sizes = [min(part, total - start) for start in range(0, max(total, 1), max(part, 1))]
    return tuple(ops.split(x, sizes, axis))


@op("aten.unbind.int")
def unbind(call: Call, x: TensorValue, dim: int = 0) -> Any:
    axis = call.axis(dim, x.rank)
    parts = ops.split(x, [1] * call.static(x.shape[axis]), axis)
    return tuple(ops.squeeze(part, axis) for part in parts)


def slice_bound(bound: Any, size: Dim, default: Any) -> Dim:
    """A bound of a slice as a position; of a symbolic size a run checks that it lies within ``[0, size]``."""
    if bound is None:
        return Dim(default)
    if isinstance(bound, int):
        # torch has 2**63 - 1 for the end of an axis
        if bound >= 1 << 62:
            return size
        try:
            total = int(size)
        except TypeError:
            return size + bound if bound < 0 else Dim(bound)
        return Dim(min(max(bound + total if bound < 0 else bound, 0), total))
    return bound


_CLIPPED = re.compile(r"Min\(|Max\(|^u\d+$")
"""Sizes of slices whose bounds torch moves into the tensor when the program runs."""


def clip_slice(call: Call, x: TensorValue, axis: int, start: Any, end: Any) -> TensorValue | None:
    """A slice whose bounds are moved into an axis of a size that only a run knows.

    Returns:
        The slice; None where torch says that the bounds lie inside.
    """
    size = x.shape[axis]
    if is_known(size) or not _CLIPPED.search(str(call.sizes[axis])):
        return None
    total = number_of(call, size)
    first, last = (
        total if number is None or (isinstance(number, int) and number >= 1 << 62)
        else total - ops.min(total, -number) if isinstance(number, int) and number < 0
        else ops.min(total, number_of(call, Dim(number)))
        for number in (start or 0, end)
    )  # fmt: skip
    # prefixes have one symbol for each pair of sizes, so that those of several tensors agree
    is_prefix = not start and not (isinstance(end, int) and end < 0)
    if is_prefix:
        length = Dim(extreme(call, "min", size, end))
    else:
        length = size_of(call, f"{size} from {start} to {end}", ops.max(last - first, 0))
    index: list[Any] = [slice(None)] * x.rank
    index[axis] = (slice(first, first + number_of(call, length)), length)
    return x[tuple(index)]


@op("aten.slice.Tensor", "aten.slice_copy.Tensor")
def slice_(
    call: Call, x: TensorValue, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> TensorValue:
    axis = call.axis(dim, x.rank)
    size = x.shape[axis]
    if step == 1 and (part := clip_slice(call, x, axis, start, end)) is not None:
        return part
    first, last = slice_bound(start, size, 0), slice_bound(end, size, size)
    if first == 0 and last == size and step == 1:
        return x
    # nothing lies between the bounds, in whatever order they are
    if is_known(first) and is_known(last) and int(first) >= int(last):
        first = last = Dim(0)
    index: list[Any] = [slice(None)] * x.rank
    index[axis] = slice(first, last, step)
    return x[tuple(index)]


def is_known(dim: Dim) -> bool:
    """Whether a size does not depend on symbols."""
    try:
        int(dim)
    except TypeError:
        return False
    return True


@op("aten.select.int", "aten.select_copy.int")
def select(call: Call, x: TensorValue, dim: int, position: Any) -> TensorValue:
    axis = call.axis(dim, x.rank)
    size = x.shape[axis]
    first = size + position if isinstance(position, int) and position < 0 else Dim(position)
    index: list[Any] = [slice(None)] * x.rank
    index[axis] = slice(first, first + 1)
    return ops.squeeze(x[tuple(index)], axis)


@op("aten.flip.default")
def flip(call: Call, x: TensorValue, dims: list[int]) -> TensorValue:
    for axis in call.axes(dims, x.rank) if dims else []:
        x = reversed_along(x, axis)
    return x


@op("aten.roll.default")
def roll(call: Call, x: TensorValue, shifts: list[int], dims: list[int] = []) -> TensorValue:  # noqa: B006
    if not dims:
        return ops.reshape(_roll_axis(call, ops.reshape(x, [-1]), shifts[0], 0), x.shape)
    for shift, axis in zip(shifts, call.axes(dims, x.rank), strict=True):
        x = _roll_axis(call, x, shift, axis)
    return x


def _roll_axis(call: Call, x: TensorValue, shift: int, axis: int) -> TensorValue:
    size = call.static(x.shape[axis])
    if size == 0 or shift % size == 0:
        return x
    first, second = ops.split(x, [size - shift % size, shift % size], axis)
    return ops.concat([second, first], axis)


@op("aten.constant_pad_nd.default")
def constant_pad(call: Call, x: TensorValue, pad: list[int], value: Any = 0) -> TensorValue:
    pairs = _pairs(call, x, pad)
    return pad_axes(x, pairs, "constant", value) if any(pad) else x


def _pairs(call: Call, x: TensorValue, pad: list[int]) -> list[tuple[int, int]]:
    """The amounts of each axis: torch lists them from the last axis on."""
    amounts = [call.static(amount) for amount in pad]
    pairs = [(0, 0)] * x.rank
    for i in range(len(amounts) // 2):
        pairs[x.rank - 1 - i] = (amounts[2 * i], amounts[2 * i + 1])
    return pairs


@op(
    "aten.reflection_pad1d.default",
    "aten.reflection_pad2d.default",
    "aten.reflection_pad3d.default",
)
def reflection_pad(call: Call, x: TensorValue, pad: list[int]) -> TensorValue:
    return pad_axes(x, _pairs(call, x, pad), "reflect", 0)


@op(
    "aten.replication_pad1d.default", "aten.replication_pad2d.default", "aten.replication_pad3d.default"
)  # fmt: skip
def replication_pad(call: Call, x: TensorValue, pad: list[int]) -> TensorValue:
    return pad_axes(x, _pairs(call, x, pad), "edge", 0)


@op("aten.pixel_shuffle.default")
def pixel_shuffle(call: Call, x: TensorValue, factor: int) -> TensorValue:
    *lead, channels, height, width = x.shape
    depth = call.static(channels) // factor**2
    n = len(lead)
    x = ops.reshape(x, [*lead, depth, factor, factor, height, width])
    # a channel is [depth, row, column] of a square: to [depth, height, row, width, column]
    x = ops.permute(x, [*range(n), n, n + 3, n + 1, n + 4, n + 2])
    return ops.reshape(x, [*lead, depth, height * factor, width * factor])


@op("aten.tril.default")
def tril(call: Call, x: TensorValue, diagonal: int = 0) -> TensorValue:
    return _triangle(x, lambda distance: distance <= diagonal)


@op("aten.triu.default")
def triu(call: Call, x: TensorValue, diagonal: int = 0) -> TensorValue:
    return _triangle(x, lambda distance: distance >= diagonal)


def _triangle(x: TensorValue, keeps: Any) -> TensorValue:
    rows, columns = x.shape[-2:]
    row = ops.range(0, rows, 1, dtype=DType.int64, device=x.device)
    column = ops.range(0, columns, 1, dtype=DType.int64, device=x.device)
    distance = ops.reshape(column, [1, columns]) - ops.reshape(row, [rows, 1])
    return ops.where(keeps(distance), x, tensor_of(0, x.dtype))


@op("aten.diagonal.default", "aten.diagonal_copy.default")
def diagonal(
    call: Call, x: TensorValue, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> TensorValue:
    first, second = call.axis(dim1, x.rank), call.axis(dim2, x.rank)
    others = [axis for axis in range(x.rank) if axis not in (first, second)]
    x = ops.permute(x, [*others, first, second])
    rows, columns = call.static(x.shape[-2]), call.static(x.shape[-1])
    # in the flat matrix: above the main diagonal columns are left out, below it rows
    start = offset if offset >= 0 else -offset * columns
    count = max(min(rows + min(offset, 0), columns - max(offset, 0)), 0)
    flat = ops.reshape(x, [*x.shape[:-2], rows * columns])
    # a step of the diagonal is one row and one column
    line = ops.range(0, count, 1, dtype=DType.int64, device=x.device) * (columns + 1) + start
    return ops.gather(flat, line, flat.rank - 1)


@op("aten.unfold.default")
def unfold(call: Call, x: TensorValue, dim: int, size: int, step: int) -> TensorValue:
    axis = call.axis(dim, x.rank)
    count = (call.static(x.shape[axis]) - size) // step + 1
    starts = ops.range(0, count, 1, dtype=DType.int64, device=x.device) * step
    taps = ops.range(0, size, 1, dtype=DType.int64, device=x.device)
    places = ops.reshape(starts, [count, 1]) + ops.reshape(taps, [1, size])  # [count, size]
    y = ops.gather(x, places, axis)
    # torch has the elements of a window in the last axis
    order = [a for a in range(y.rank) if a != axis + 1]
    return ops.permute(y, [*order, axis + 1])


@op("aten.as_strided.default")
def as_strided(
    call: Call, x: TensorValue, size: list[Any], stride: list[Any], offset: Any = None
) -> TensorValue:
    """A view of the same elements: decompositions write it to name the order of axes in memory."""
    own: list[Any] = call.node.attr("strides", [])
    same = len(own) == len(size) and [Dim(n) for n in size] == list(x.shape)
    if (
        not same
        or offset
        or any(n != 1 and a != b for n, a, b in zip(size, own, stride, strict=True))
    ):
        raise Unsupported("views the memory of its operand in another way")
    return x
