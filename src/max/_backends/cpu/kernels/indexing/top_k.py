"""The greatest and the smallest elements along an axis: `top_k`, `bottom_k`, `argmax`, `argmin`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from max import kernel as k
from max._backends.cpu.kernels.indexing.selection import best_of_row, keep_best, sort_heap
from max._backends.kernel_call import KernelCall, Lowering, Operand, around, view


@k.kernel
def top_k(
    values: k.Output, indices: k.Output, x: k.Input, ctx: k.Context, *, greatest: bool
) -> None:
    """The `values.shape[1]` greatest elements of each column of `x` `[outer, n, inner]`, the greatest first; or the
    smallest, the smallest first.

    Of equal elements the first comes first. NaN is the greatest element.
    """
    count = values.shape[1]
    # four vectors at once: most have no better element
    width = 4 * ctx.target.width(k.f32)
    for o, i in ctx.parallel((x.shape[0], x.shape[2])):
        # the results' memory is used for the heap
        best = values[o][:, i]
        places = indices[o][:, i]
        keep_best(best, places, x[o][:, i], count, width, greatest)
        sort_heap(best, places, count, greatest)


@k.kernel
def arg_best(out: k.Output, x: k.Input, ctx: k.Context, *, greatest: bool) -> None:
    """Index of the greatest or smallest element of each column of `x` `[outer, n, inner]`."""
    width = ctx.target.width(k.i64)
    for o, i in ctx.parallel((x.shape[0], x.shape[2])):
        _, index = best_of_row(x[o][:, i], greatest, width)
        out[o, 0, i] = index


def _lower_top_k(greatest: bool) -> Lowering:
    def lower(
        operands: Sequence[Operand],
        results: Sequence[Operand],
        attributes: Mapping[str, Any],
        target: k.Target,
    ) -> KernelCall:
        (x,) = operands
        rank = len(x.shape)
        axis = int(attributes["axis"]) % rank
        groups = around(axis, rank)
        args = (
            view("result", 0, results[0], groups),
            view("result", 1, results[1], groups),
            view("operand", 0, x, groups),
        )
        return KernelCall(top_k, args, {"greatest": greatest})

    return lower


def _lower_arg(greatest: bool) -> Lowering:
    def lower(
        operands: Sequence[Operand],
        results: Sequence[Operand],
        attributes: Mapping[str, Any],
        target: k.Target,
    ) -> KernelCall:
        (x,) = operands
        (out,) = results
        rank = len(x.shape)
        axis = int(attributes["axis"]) % rank
        if x.shape[axis] == 0:
            raise NotImplementedError(
                f"arg{'max' if greatest else 'min'} over an axis of size 0 (axis {axis})"
            )
        groups = around(axis, rank)
        return KernelCall(
            arg_best,
            (view("result", 0, out, groups), view("operand", 0, x, groups)),
            {"greatest": greatest},
        )

    return lower


LOWERINGS = {
    "mo.top_k": _lower_top_k(True),
    "mo.bottom_k": _lower_top_k(False),
    "mo.argmax": _lower_arg(True),
    "mo.argmin": _lower_arg(False),
}
