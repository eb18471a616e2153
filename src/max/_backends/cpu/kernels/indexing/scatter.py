"""Writing updates into a copy of a tensor, or combining them with its elements, by indices along one axis or by index
vectors.

One worker applies all updates of equal indices, in their order: the last replacement wins, and results of reductions do
not depend on the number of workers. `scatter` splits the other axes over the workers, `scatter_nd` the rows of the
result by their number modulo the workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from max import kernel as k
from max._backends.cpu.kernels.indexing.gather import as_rows, checked_index, copy_row
from max._backends.kernel_call import KernelCall, Operand, view

COPY = 16384
"""The number of elements of a copying task."""


@k.inline
def copy_all(out: k.View, x: k.View, ctx: k.Context) -> None:
    """Copies a tensor, all workers together; a barrier must follow."""
    size = out.size
    flat_out = out.reshape(size)
    flat_x = x.reshape(size)
    for chunk in ctx.parallel(k.ceildiv(size, COPY), grain=1):
        begin = chunk * COPY
        end = k.min(begin + COPY, size)
        copy_row(flat_out[begin:end], flat_x[begin:], ctx.target.width(out.dtype))


@k.inline
def updated_element(old: k.SIMD, update: k.Value, reduction: str) -> Any:
    """An element after an update, rounded to its dtype: `replace`, `add`, `max`, `min` or `mul`."""
    if reduction == "replace":
        return update
    elif reduction == "add":
        return k.cast(old + update, old.dtype)
    elif reduction == "mul":
        return k.cast(old * update, old.dtype)
    elif reduction == "max":
        return k.cast(k.max(old, update), old.dtype)
    else:
        return k.cast(k.min(old, update), old.dtype)


@k.inline
def combine_row(row: k.View, update: k.View, width: int, reduction: str) -> None:
    """Applies a row of updates to a row of the result."""
    if reduction == "replace":
        copy_row(row, update, width)
    else:
        for j, mask in k.vectors(row.size, width):
            old = row.load(j, width=width, mask=mask)
            new = update.load(j, width=width, mask=mask)
            row.store(j, value=updated_element(old, new, reduction), mask=mask)


@k.kernel
def scatter(
    out: k.Output,
    x: k.Input,
    updates: k.Input,
    indices: k.Input,
    ctx: k.Context,
    *,
    axis: int,
    reduction: str,
) -> None:
    """`out = x`, then `out[…, indices[i], …]` is combined with `updates[i]` along `axis`, for each position `i` of
    `indices`, which has the rank of `x`.
    """
    # workers copy chunks that others then update
    copy_all(out, x, ctx)
    ctx.barrier()
    sizes = indices.shape
    others = k.i64(1)
    for other in k.static_range(len(sizes)):
        if other != axis:
            others = others * sizes[other]
    out_strides = out.strides
    places = indices.reshape(indices.size)
    values = updates.reshape(updates.size)
    target = out.reshape(out.size)
    # one worker writes all updates along the axis, in order
    for column in ctx.parallel(others):
        remaining = k.i64(column)
        at = k.i64(0)
        place = k.i64(0)
        # the other axes by their row-major index, from the last axis on
        for reverse in k.static_range(len(sizes)):
            d = len(sizes) - 1 - reverse
            if d != axis:
                coordinate = remaining % sizes[d]
                remaining = remaining // sizes[d]
                at += coordinate * out_strides[d]
                place += coordinate * indices.strides[d]
        for i in range(sizes[axis]):
            update = place + i * indices.strides[axis]
            to = at + checked_index(places[update], x.shape[axis], axis) * out_strides[axis]
            target[to] = updated_element(target[to], values[update], reduction)


@k.kernel
def scatter_nd(
    out: k.Output,
    x: k.Input,
    updates: k.Input,
    indices: k.Input,
    ctx: k.Context,
    *,
    reduction: str,
) -> None:
    """`out = x`, then `out[*indices[i]]` is combined with `updates[i]`, by rows: `x` is `[d0, d1, …, inner]`, `indices`
    `[n, depth]`, `updates` `[n, inner]`.
    """
    copy_all(out, x, ctx)
    ctx.barrier()
    depth = indices.shape[1]
    width = ctx.target.width(out.dtype)
    rows = as_rows(out, depth)
    # each worker writes only its own rows, in order, so that no two workers write the same row
    for part in ctx.parallel(ctx.num_workers, grain=1):
        for i in range(indices.shape[0]):
            row = k.i64(0)
            for d in k.static_range(depth):
                row = row * x.shape[d] + checked_index(indices[i, d], x.shape[d], d)
            if row % ctx.num_workers == part:
                combine_row(rows[row], updates[i], width, reduction)


def _lower_scatter(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    x, updates, indices = operands
    (out,) = results
    axis = int(attributes["axis"]) % len(x.shape)
    args = (
        view("result", 0, out),
        view("operand", 0, x),
        view("operand", 1, updates),
        view("operand", 2, indices),
    )
    params = {"axis": axis, "reduction": attributes.get("reduction", "replace")}
    return KernelCall(scatter, args, params, in_place=((0, 0),))


def _lower_scatter_nd(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    x, updates, indices = operands
    (out,) = results
    depth, rank = indices.shape[-1], len(x.shape)
    if not isinstance(depth, int) or depth > rank:
        raise NotImplementedError(
            f"mo.scatter_nd: index vectors of {depth} for rank {rank}; a static length up to the rank fits"
        )
    # an axis for each number of an index vector; the axes behind them are a row
    groups = (*((d,) for d in range(depth)), range(depth, rank))
    leading = len(indices.shape) - 1
    args = (
        view("result", 0, out, groups),
        view("operand", 0, x, groups),
        view("operand", 1, updates, (range(leading), range(leading, len(updates.shape)))),
        view("operand", 2, indices, (range(leading), (leading,))),
    )
    params = {"reduction": attributes.get("reduction", "replace")}
    return KernelCall(scatter_nd, args, params, in_place=((0, 0),))


LOWERINGS = {
    "mo.scatter": _lower_scatter,
    "mo.scatter_reduce": _lower_scatter,
    "mo.scatter_nd": _lower_scatter_nd,
    "mo.scatter_nd_reduce": _lower_scatter_nd,
}
