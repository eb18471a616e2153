"""Padding, dynamic slices, concatenation, ranges: a task copies or writes one row of the result, or a chunk of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from max import kernel as k
from max._backends.cpu.kernels.indexing.gather import as_rows, copy_row
from max._backends.kernel_call import KernelCall, Operand, operand_views, view

CHUNK = 4096
"""The number of elements of a concatenated row that a task copies."""


@k.kernel
def pad(out: k.Output, x: k.Input, ctx: k.Context, *, low: Any, value: Any) -> None:
    """Pads `x` with `value`: `low[d]` elements before it along axis `d`, and up to the size of `out` after it."""
    rank = x.rank
    width = ctx.target.width(out.dtype)
    length = out.shape[rank - 1]
    rows = as_rows(out, rank - 1)
    for row in ctx.parallel(rows.shape[0]):
        target = rows[row]
        remaining = k.i64(row)
        at = k.i64(0)
        inside = True
        for reverse in k.static_range(1, rank):
            d = rank - 1 - reverse
            coordinate = remaining % out.shape[d] - low[d]
            remaining = remaining // out.shape[d]
            inside = inside and coordinate >= 0 and coordinate < x.shape[d]
            at += coordinate * x.strides[d]
        fill = k.splat(out.dtype(value), width)
        # the whole row is filled first: rows inside overwrite their part
        for j, mask in k.vectors(length, width):
            target.store(j, value=fill, mask=mask)
        if inside:
            source = x.reshape(x.size)[at:]
            copy_row(target[low[rank - 1] : low[rank - 1] + x.shape[rank - 1]], source, width)


@k.kernel
def concat(out: k.Output, *inputs: k.Input, ctx: k.Context) -> None:
    """`out` `[outer, n]` is the inputs `[outer, n_i]`, one after the other along the second axis."""
    width = ctx.target.width(out.dtype)
    column = k.i64(0)
    for x in k.unroll(inputs):
        # no barrier: the inputs fill different columns
        for o, chunk in ctx.parallel((x.shape[0], k.ceildiv(x.shape[1], CHUNK))):
            begin = chunk * CHUNK
            end = k.min(begin + CHUNK, x.shape[1])
            copy_row(out[o][column + begin : column + end], x[o][begin:], width)
        column = column + x.shape[1]


@k.inline
def elements_between(first: k.SIMD, last: k.Value, by: k.Value) -> Any:
    """The number of elements of a range, as an unsigned integer, which holds any; raises if the step is 0, or if a
    float range has no size or more than 2**62 elements.
    """
    if by == 0:
        raise ValueError("the step is 0")
    if first.dtype.is_float:
        exact = k.ceil((k.f64(last) - k.f64(first)) / k.f64(by))
        # false for NaN
        if not exact <= 2.0**62:
            raise ValueError("from {} to {} in steps of {} is not a range", first, last, by)
        return k.u64(k.max(k.i64(exact), 0))
    else:
        # differences of 64-bit integers wrap to their unsigned values
        span = k.u64(last) - k.u64(first)
        size = k.u64(by)
        if by < 0:
            span = k.u64(0) - span
            size = k.u64(0) - size
        ahead = last > first if by > 0 else last < first
        return (span - k.u64(1)) // size + k.u64(1) if ahead else k.u64(0)


@k.kernel
def number_range(
    out: k.Output, start: k.Input, stop: k.Input, step: k.Input, ctx: k.Context
) -> None:
    """`out[i] = start + i * step`; raises unless `out` has the size of the range up to `stop`."""
    first = start[0]
    by = step[0]
    length = elements_between(first, stop[0], by)
    if length != k.u64(out.size):
        raise ValueError("{} elements, but the result has {}", length, out.size)
    for i in ctx.parallel(out.size):
        if out.dtype.is_float:
            # computed, not accumulated: the error does not grow with i
            out[i] = (
                k.f64(first) + k.f64(i) * k.f64(by)
                if out.dtype.bits == 64
                else k.f32(first) + k.f32(i) * k.f32(by)
            )
        else:
            out[i] = out.dtype(k.i64(first) + i * k.i64(by))


@k.inline
def slice_position(index: k.Value, size: k.Value, low: k.Value, high: k.Value) -> Any:
    """Converts a bound of a Python slice to a position in `[low, high]`; negative bounds count from the end."""
    at = index + size if index < 0 else index
    return k.min(k.max(at, low), high)


@k.inline
def slice_bounds(
    begin: k.View,
    by: k.View,
    whole: k.View,
    part: k.View,
    start: k.View,
    stop: k.View,
    step: k.View,
) -> None:
    """First index and step of `whole[start:stop:step]` along each axis, as in Python; raises if a size differs from
    that of `part`.
    """
    for axis in k.static_range(whole.rank):
        size = whole.shape[axis]
        if step[axis] == 0:
            raise ValueError("the step along axis {} is 0", axis)
        # clamped so that products do not overflow; a clamped step still leaves the axis after one element
        stride = k.min(k.max(k.i64(step[axis]), -size - 1), size + 1)
        if stride > 0:
            begin[axis] = slice_position(k.i64(start[axis]), size, 0, size)
            distance = slice_position(k.i64(stop[axis]), size, 0, size) - begin[axis]
        else:
            begin[axis] = slice_position(k.i64(start[axis]), size, -1, size - 1)
            distance = begin[axis] - slice_position(k.i64(stop[axis]), size, -1, size - 1)
        by[axis] = stride
        count = k.ceildiv(k.max(distance, 0), k.abs(stride))
        if count != part.shape[axis]:
            # an index beyond the axis, staged as a slice of one element
            if count == 0 and part.shape[axis] == 1 and stop[axis] == start[axis] + 1:
                raise IndexError(
                    "index {} is out of range for axis {} of size {}", start[axis], axis, size
                )
            raise ValueError(
                "axis {} has {} elements from {} to {} by {}; the result has {}",
                axis,
                count,
                start[axis],
                stop[axis],
                step[axis],
                part.shape[axis],
            )


@k.inline
def row_start(row: k.Value, begin: k.View, by: k.View, whole: k.View, part: k.View) -> Any:
    """The flat index in `whole` at which a row of `part` begins."""
    rank = whole.rank
    remaining = k.i64(row)
    at = begin[rank - 1]
    for reverse in k.static_range(1, rank):
        d = rank - 1 - reverse
        at += (begin[d] + remaining % part.shape[d] * by[d]) * whole.strides[d]
        remaining = remaining // part.shape[d]
    return at


@k.kernel
def slice_dynamic(
    out: k.Output, x: k.Input, start: k.Input, stop: k.Input, step: k.Input, ctx: k.Context
) -> None:
    """`out = x[start:stop:step]` along each axis, as in Python; raises if a size differs from that of `out`."""
    rank = x.rank
    begin = k.tile(k.i64, (rank,))
    by = k.tile(k.i64, (rank,))
    slice_bounds(begin, by, x, out, start, stop, step)
    rows = as_rows(out, rank - 1)
    flat = x.reshape(x.size)
    for row in ctx.parallel(rows.shape[0]):
        at = row_start(row, begin, by, x, out)
        for j in range(out.shape[rank - 1]):
            rows[row, j] = flat[at + j * by[rank - 1]]


@k.kernel
def store_slice_dynamic(
    x: k.Input, buffer: k.InOut, start: k.Input, stop: k.Input, step: k.Input, ctx: k.Context
) -> None:
    """`buffer[start:stop:step] = x` along each axis, as in Python; raises if a size differs from that of `x`."""
    rank = x.rank
    begin = k.tile(k.i64, (rank,))
    by = k.tile(k.i64, (rank,))
    slice_bounds(begin, by, buffer, x, start, stop, step)
    rows = as_rows(x, rank - 1)
    flat = buffer.reshape(buffer.size)
    for row in ctx.parallel(rows.shape[0]):
        at = row_start(row, begin, by, buffer, x)
        for j in range(x.shape[rank - 1]):
            flat[at + j * by[rank - 1]] = rows[row, j]


def _lower_pad(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    (x,) = operands
    (out,) = results
    mode = attributes["mode"]
    if mode != "constant" or not x.shape:
        raise NotImplementedError(
            f"mo.pad: mode {mode!r} of a tensor of rank {len(x.shape)}; 'constant' of rank 1 or more fits"
        )
    params = {"low": tuple(int(n) for n in attributes["low"]), "value": attributes["value"]}
    return KernelCall(pad, (view("result", 0, out), view("operand", 0, x)), params)


def _lower_concat(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    (out,) = results
    rank = len(out.shape)
    axis = int(attributes["axis"]) % rank
    groups = (range(axis), range(axis, rank))
    return KernelCall(concat, (view("result", 0, out, groups), *operand_views(operands, groups)))


def _lower_range(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    (out,) = results
    # the bounds are scalars, passed as views of one element
    return KernelCall(number_range, (view("result", 0, out), *operand_views(operands, ((),))))


def _lower_slice_dynamic(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    (out,) = results
    if not out.shape:
        raise NotImplementedError("mo.slice_dynamic of rank 0")
    return KernelCall(slice_dynamic, (view("result", 0, out), *operand_views(operands)))


def _lower_store_slice_dynamic(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    x = operands[0]
    if not x.shape:
        raise NotImplementedError("mo.buffer_store_slice_dynamic of rank 0")
    return KernelCall(store_slice_dynamic, operand_views(operands))


LOWERINGS = {
    "mo.pad": _lower_pad,
    "mo.concat": _lower_concat,
    "mo.range": _lower_range,
    "mo.slice_dynamic": _lower_slice_dynamic,
    "mo.buffer_store_slice_dynamic": _lower_store_slice_dynamic,
}
