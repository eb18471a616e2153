"""Cumulative sums along an axis: a task is a vector of neighboring columns, whose sums stay in a register."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from max import kernel as k
from max._backends.kernel_call import KernelCall, Operand, around, view
from max._compiler.codegen.sums import add_part, no_sum

GROUP = 8
"""Elements whose sums so far are added up from 0, and then to the sum of all groups before them."""


@k.inline
def _rounded_pair(total: k.Value, rounding_error: k.Value, dtype: k.ScalarType) -> Any:
    """A wide sum as two numbers of a dtype, of which the first is the sum rounded to it."""
    if not dtype.is_float:
        return total, rounding_error
    elif dtype is k.f64:
        # the roundings of a sum that overflows are NaN
        return total, k.select(k.isnan(rounding_error), 0, rounding_error)
    else:
        base = k.cast(total, dtype)
        rest = k.cast(total - k.cast(base, k.f64), dtype)
        return base, k.select(k.isinf(base), 0, rest)


@k.inline
def _scan(
    out: k.View,
    x: k.View,
    o: k.Integer,
    j: k.Integer,
    zero: k.SIMD,
    exclusive: bool,
    reverse: bool,
    width: int,
) -> None:
    """The sums of a column, or of `width` neighboring columns."""
    size = x.shape[1]
    floats = zero.dtype.is_float
    # floats: a sum in two numbers, the second with what the first loses in rounding
    total, lost = no_sum(zero) if floats else (zero, zero)
    base = zero
    rest = zero
    whole = size // GROUP * GROUP
    for start in range(0, whole, GROUP):
        group = zero
        for i in k.static_range(GROUP):
            at = size - 1 - (start + i) if reverse else start + i
            group = _step(out, x, (o, at, j), base, rest, group, exclusive, width)
        total, lost = add_part(total, lost, group) if floats else (total + group, lost)
        base, rest = _rounded_pair(total, lost, zero.dtype)
    group = zero
    for i in range(whole, size):
        at = size - 1 - i if reverse else i
        group = _step(out, x, (o, at, j), base, rest, group, exclusive, width)


@k.inline
def _step(
    out: k.View,
    x: k.View,
    at: Any,
    base: k.SIMD,
    rest: k.Value,
    group: k.Value,
    exclusive: bool,
    width: int,
) -> Any:
    """Stores one sum; returns the sum of the group with the element."""
    value = k.cast(x.load(*at, width=width) if width else x[at], base.dtype)
    after = group + value
    # the rest and the group are small beside the base, so they are added first
    total = base + (rest + (group if exclusive else after))
    if width:
        out.store(*at, value=total)
    else:
        out[at] = total
    return after


@k.kernel
def cumsum(out: k.Output, x: k.Input, ctx: k.Context, *, exclusive: bool, reverse: bool) -> None:
    """Sums of `x` `[outer, n, inner]` up to each element along the second axis; f32 sums for bf16 and f16.

    Groups of floats are added to a wide sum: the error does not grow with n.
    """
    sum_dtype = k.f32 if x.dtype.is_float and x.dtype.bits < 32 else x.dtype
    width = ctx.target.width(sum_dtype)
    inner = x.shape[2]
    for o, strip in ctx.parallel((x.shape[0], k.ceildiv(inner, width))):
        column = strip * width
        if column + width <= inner:
            zeros = k.splat(sum_dtype(0), width)
            _scan(out, x, o, column, zeros, exclusive, reverse, width)
        else:
            # the columns that fill no vector, one by one
            for j in range(column, inner):
                _scan(out, x, o, j, sum_dtype(0), exclusive, reverse, 0)


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
