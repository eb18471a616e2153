"""Chooses one of the staged paths by which a batch attends to cached latents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from max import kernel as k
from max._backends.cpu.kernels.operand_checks import check_offsets, check_size
from max._backends.kernel_call import KernelCall, Operand, run_time_views


@k.kernel
def plan_latents(
    out: k.Output,
    input_row_offsets: k.Input,
    cache_lengths: k.Input,
    ctx: k.Context,
    *,
    least_rows: int,
    most_cached: int,
    saved: int,
    spent: int,
    count: int,
) -> None:
    """`out[0]` is 1 where keys and values are expanded, `out[1]` where tokens are selected, else 0.

    Keys and values are expanded where that takes fewer products: a pair of a query and a token takes `saved` less, a
    cached token `spent` more. There must be `least_rows` new tokens, with at most `most_cached` cached ones for each; 0
    rows: nothing is expanded. Tokens are selected where a sequence has more than `count`; 0: they are not. Where
    results must not depend on the rest of the batch, keys are never expanded, and tokens are always selected.
    """
    batch = cache_lengths.shape[0]
    check_size("the plan", out.shape[0], 2)
    check_size("input_row_offsets", input_row_offsets.shape[0], batch + 1)
    rows = k.i64(input_row_offsets[batch])
    check_offsets("input_row_offsets", input_row_offsets, rows, ctx.target.width(k.i32))
    # products of lengths may exceed 64 bits
    cached, longest, pairs = k.i64(0), k.i64(0), k.f64(0)
    for b in range(batch):
        cached += k.i64(cache_lengths[b])
        new = k.i64(input_row_offsets[b + 1]) - k.i64(input_row_offsets[b])
        longest = k.max(longest, k.i64(cache_lengths[b]) + new)
        # twice the number of pairs
        pairs += k.f64(new) * k.f64(2 * k.i64(cache_lengths[b]) + new)
    out[0] = k.i32(0)
    out[1] = k.i32(0)
    if ctx.target.batch_invariant:
        if count > 0:
            out[1] = k.i32(1)
    else:
        if least_rows > 0:
            if rows >= least_rows and cached <= rows * most_cached:
                # `pairs` is doubled, so the other side is too
                if pairs * float(saved) >= 2.0 * k.f64(cached) * float(spent):
                    out[0] = k.i32(1)
        if count > 0:
            if longest > count:
                out[1] = k.i32(1)


def _lower_plan(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    """The call for `mo.latents.plan.ragged`: one worker computes the two flags."""
    args = run_time_views(results, operands)
    names = ("least_rows", "most_cached", "saved", "spent", "count")
    params = {name: int(attributes[name]) for name in names}
    return KernelCall(plan_latents, args, params, serial=True)


LOWERINGS = {"mo.latents.plan.ragged": _lower_plan}
