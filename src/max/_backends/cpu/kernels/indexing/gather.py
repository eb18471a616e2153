"""Gathering by indices along one axis, or by index vectors: a task copies one row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from max import kernel as k
from max._backends.kernel_call import KernelCall, Operand, around, view


@k.inline
def copy_row(target: k.View, source: k.View, width: int) -> None:
    """Copies a row, converting to the target's dtype."""
    for j, mask in k.vectors(target.size, width):
        target.store(j, value=source.load(j, width=width, mask=mask), mask=mask)


@k.inline
def checked_index(index: k.SIMD, size: k.Value, axis: int) -> Any:
    """Converts an index to a position: negative indices count from the end; raises if it is out of range."""
    position = k.i64(index)
    if index.dtype.kind == "u":
        # compare as unsigned: indices from 2**63 on become negative in i64
        if k.u64(index) >= k.u64(size):
            raise IndexError("index {} is out of range for axis {} of size {}", index, axis, size)
        return position
    else:
        if position < -size or position >= size:
            raise IndexError(
                "index {} is out of range for axis {} of size {}", position, axis, size
            )
        return position + size if position < 0 else position


@k.inline
def as_rows(x: k.View, axes: int) -> Any:
    """A contiguous view as a matrix: its first `axes` axes are merged, and so are the others (any may have size 0)."""
    rows = 1
    for d in k.static_range(axes):
        rows = rows * x.shape[d]
    length = 1
    for d in k.static_range(axes, x.rank):
        length = length * x.shape[d]
    return x.reshape(rows, length)


@k.kernel
def gather(out: k.Output, x: k.Input, indices: k.Input, ctx: k.Context, *, axis: int) -> None:
    """`out[o, i] = x[o, indices[i]]` for rows: `x` is `[outer, size, inner]`, `indices` `[n]`, `out` `[outer, n,
    inner]`.
    """
    width = ctx.target.width(out.dtype)
    outer = out.shape[0]
    # indices are checked even if the result is empty
    for o, i in ctx.parallel((k.max(outer, 1), out.shape[1])):
        at = checked_index(indices[i], x.shape[1], axis)
        if outer > 0:
            copy_row(out[o, i], x[o, at], width)


@k.kernel
def gather_nd(
    out: k.Output, x: k.Input, indices: k.Input, ctx: k.Context, *, batch_dims: int
) -> None:
    """`out[b, i] = x[b, *indices[b, i]]` for rows: `x` is `[batch, d0, d1, …, inner]`, `indices` `[batch, n, depth]`,
    `out` `[batch, n, inner]`.
    """
    width = ctx.target.width(out.dtype)
    depth = indices.shape[2]
    for b, i in ctx.parallel((out.shape[0], out.shape[1])):
        row = k.i64(0)
        for d in k.static_range(depth):
            # the row-major index of the element
            row = row * x.shape[1 + d] + checked_index(
                indices[b, i, d], x.shape[1 + d], batch_dims + d
            )
        copy_row(out[b, i], as_rows(x[b], depth)[row], width)


def _lower_gather(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    x, indices = operands
    rank = len(x.shape)
    axis = int(attributes["axis"]) % rank
    last = axis + len(indices.shape)
    (out,) = results
    # views [outer, n, inner], [outer, size, inner] and [n]
    args = (
        view("result", 0, out, (range(axis), range(axis, last), range(last, len(out.shape)))),
        view("operand", 0, x, around(axis, rank)),
        view("operand", 1, indices, (range(len(indices.shape)),)),
    )
    return KernelCall(gather, args, {"axis": axis})


def _lower_gather_nd(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    x, indices = operands
    batch_dims = int(attributes["batch_dims"])
    depth, rank = indices.shape[-1], len(x.shape)
    if not isinstance(depth, int) or batch_dims + depth > rank:
        raise NotImplementedError(
            f"mo.gather_nd: index vectors of {depth} for rank {rank} and batch_dims {batch_dims}"
        )
    (out,) = results
    inner = rank - batch_dims - depth
    outer = len(out.shape) - inner
    args = (
        view(
            "result",
            0,
            out,
            (range(batch_dims), range(batch_dims, outer), range(outer, len(out.shape))),
        ),
        view(
            "operand",
            0,
            x,
            (
                range(batch_dims),
                *((batch_dims + d,) for d in range(depth)),
                range(batch_dims + depth, rank),
            ),
        ),
        view(
            "operand",
            1,
            indices,
            (
                range(batch_dims),
                range(batch_dims, len(indices.shape) - 1),
                (len(indices.shape) - 1,),
            ),
        ),
    )
    return KernelCall(gather_nd, args, {"batch_dims": batch_dims})


LOWERINGS = {"mo.gather": _lower_gather, "mo.gather_nd": _lower_gather_nd}
