"""Counting the tokens of each row of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from max import kernel as k
from max._backends.cpu.kernels.operand_checks import check_rising, check_size
from max._backends.kernel_call import KernelCall, Operand, view


@k.kernel
def count_tokens(data: k.InOut, offsets: k.Input, tokens: k.Input, ctx: k.Context) -> None:
    """Adds 1 to the count of `tokens[b]` in the pairs of token and count of row `b`: `data` `[n, 2]` from `offsets[b]`
    to `offsets[b + 1]`.

    A token that has no pair yet takes the first whose token is negative or whose count is 0.
    """
    batch = tokens.size
    check_size("offsets", offsets.size, batch + 1)
    check_rising("offsets", offsets, ctx.target.width(k.i64))
    if k.i64(offsets[batch]) > data.shape[0]:
        raise ValueError(
            "offsets end at {}; there are {} pairs of token and count",
            offsets[batch],
            data.shape[0],
        )
    for b in range(batch):
        end = k.i64(offsets[b + 1])
        place, free = end, end  # `end` stands for none
        for i in range(k.i64(offsets[b]), end):
            used = data[i, 0] >= 0 and data[i, 1] > 0
            if used:
                if k.i64(data[i, 0]) == k.i64(tokens[b]):
                    place = k.min(place, i)
            else:
                free = k.min(free, i)
        if place < end:
            data[place, 1] = data[place, 1] + 1
        elif free < end:
            data[free, 0] = tokens[b]
            data[free, 1] = 1
        else:
            raise ValueError("row {} has no free pair for token {}", b, tokens[b])


def _lower_count(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    """The call for `mo.frequencies.update`, on one worker."""
    args = tuple(view("operand", i, operand, static=False) for i, operand in enumerate(operands))
    return KernelCall(count_tokens, args, serial=True)


LOWERINGS = {"mo.frequencies.update": _lower_count}
