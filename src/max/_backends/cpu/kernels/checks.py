"""Checks of operands of composed ops: each returns its first operand unchanged, or raises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from max import kernel as k
from max._backends.cpu.kernels.operand_checks import check_offsets, check_size
from max._backends.kernel_call import KernelCall, Operand, run_time_views, view

MAX_TOTAL = 2**62
"""The greatest sum of counts."""


@k.kernel
def check_counts(out: k.Output, counts: k.Input, ctx: k.Context, *, what: str) -> None:
    """`out = counts` `[n]`; raises where a count is negative, or where the sum exceeds `MAX_TOTAL`."""
    check_size("the result", out.size, counts.size)
    total = k.i64(0)
    for i in range(counts.size):
        count = k.i64(counts[i])
        if count < 0:
            raise ValueError("{}[{}] is {}, expected 0 or more", what, i, counts[i])
        # the sum itself could wrap
        if count > MAX_TOTAL - total:
            raise ValueError("{} add up to more than {}", what, MAX_TOTAL)
        total += count
        out[i] = counts[i]


@k.kernel
def check_row_offsets(
    out: k.Output, offsets: k.Input, rows: k.Input, ctx: k.Context, *, what: str
) -> None:
    """`out = offsets` `[batch + 1]`; raises unless they begin at 0, never fall, and end at `rows`."""
    check_size("the result", out.size, offsets.size)
    check_offsets(what, offsets, k.i64(rows[0]), ctx.target.width(k.i64))
    for i in range(offsets.size):
        out[i] = offsets[i]


def _lower_counts(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    """The call for `mo.check.counts`, on one worker and in place."""
    args = run_time_views(results, operands)
    params = {"what": attributes["what"]}
    return KernelCall(check_counts, args, params, serial=True, in_place=((0, 0),))


def _lower_offsets(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    """The call for `mo.check.offsets`, on one worker and in place."""
    offsets, rows = operands
    (out,) = results
    args = (
        view("result", 0, out, static=False),
        view("operand", 0, offsets, static=False),
        view("operand", 1, rows, ((),)),
    )
    params = {"what": attributes["what"]}
    return KernelCall(check_row_offsets, args, params, serial=True, in_place=((0, 0),))


LOWERINGS = {"mo.check.counts": _lower_counts, "mo.check.offsets": _lower_offsets}
