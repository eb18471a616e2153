"""Cumulative sums along an axis: a task is a vector of neighbouring columns, whose sums stay in a register."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from max import kernel as k
from max._kernel_library.lowering import KernelCall, Operand, around, view


@k.kernel
def cumsum(out: k.Output, x: k.Input, ctx: k.Context, *, exclusive: bool, reverse: bool) -> None:
    """Sums of `x` `[outer, n, inner]` up to each element along the second axis; f32 sums for bf16 and f16."""
    sum_dtype = k.f32 if x.dtype.is_float and x.dtype.bits < 32 else x.dtype
    width = ctx.target.width(sum_dtype)
    size = x.shape[1]
    inner = x.shape[2]
    for o, strip in ctx.parallel((x.shape[0], k.ceildiv(inner, width))):
        column = strip * width
        if column + width <= inner:
            total = k.splat(sum_dtype(0), width)
            for i in range(size):
                at = size - 1 - i if reverse else i
                value = k.cast(x.load(o, at, column, width=width), sum_dtype)
                out.store(o, at, column, value=total if exclusive else total + value)
                total = total + value
        else:
            for j in range(column, inner):
                sum_so_far = sum_dtype(0)
                for i in range(size):
                    at = size - 1 - i if reverse else i
                    value = k.cast(x[o, at, j], sum_dtype)
                    out[o, at, j] = sum_so_far if exclusive else sum_so_far + value
                    sum_so_far = sum_so_far + value


def _lower_cumsum(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    """The call for `mo.cumsum`, on views `[before, axis, after]`."""
    (x,) = operands
    (out,) = results
    rank = len(x.shape)
    axis = int(attributes["axis"]) % rank
    groups = around(axis, rank)
    params = {name: bool(attributes[name]) for name in ("exclusive", "reverse")}
    return KernelCall(
        cumsum, (view("result", 0, out, groups), view("operand", 0, x, groups)), params
    )


LOWERINGS = {"mo.cumsum": _lower_cumsum}
