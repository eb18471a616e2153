"""From one decoding step of a ragged batch to the next, where no sequence has more than one new token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from max import kernel as k
from max._kernel_library.generation.sampling import splitmix64
from max._kernel_library.lowering import KernelCall, Operand, operand_views
from max._kernel_library.operand_checks import check_size, unsigned

LONGEST = 2**32 - 1
"""The greatest length, which cannot be increased."""


@k.kernel
def next_step(
    next_tokens: k.Input,
    first_seeds: k.Input,
    ends: k.Input,
    interrupted: k.Input,
    tokens: k.InOut,
    cache_lengths: k.InOut,
    max_lengths: k.InOut,
    seeds: k.InOut,
    history: k.InOut,
    steps: k.InOut,
    again: k.InOut,
    ctx: k.Context,
) -> None:
    """Stores the tokens `[batch]` of a step as row `steps[0]` of the history, and as the input of the next step.

    `again` says whether there is a next step: while the history has rows left, no token ends its sequence (`ends`
    `[batch, n]`), and the run is not interrupted.
    """
    for _ in ctx.parallel(1):
        check_size("interrupted", interrupted.shape[0], 1)
        check_size("steps", steps.shape[0], 1)
        check_size("again", again.shape[0], 1)
        check_size("a row of max_lengths", max_lengths.shape[1], 2)
        if max_lengths.shape[0] < 1:
            raise ValueError("max_lengths has no rows, expected 1 or more")
        step = k.i64(steps[0])
        if step < 0 or step >= history.shape[0]:
            raise IndexError("step {} of {}, the rows of the history", step, history.shape[0])
        batch = tokens.shape[0]
        check_size("next tokens", next_tokens.shape[0], batch)
        check_size("first seeds", first_seeds.shape[0], batch)
        check_size("ends", ends.shape[0], batch)
        check_size("cache_lengths", cache_lengths.shape[0], batch)
        check_size("seeds", seeds.shape[0], batch)
        check_size("a row of the history", history.shape[1], batch)
        for row in range(batch):
            if cache_lengths[row] == LONGEST:
                raise ValueError("cache_lengths[{}] is {}, expected less", row, cache_lengths[row])
        ended = k.i64(interrupted[0])
        for row in range(batch):
            token = next_tokens[row]
            history[step, row] = token
            tokens[row] = token
            length = cache_lengths[row] + 1
            cache_lengths[row] = length
            # the next token follows the one that is cached next; seeds are numbered from 1
            seeds[row] = splitmix64(first_seeds[row], k.i64(length) + 2)
            for i in range(ends.shape[1]):
                if ends[row, i] == token:
                    ended = k.i64(1)
        max_lengths[0, 1] = max_lengths[0, 1] + 1
        steps[0] = step + 1
        has_next = ended == 0 and step + 1 < history.shape[0]
        again[0] = k.u8(1) if has_next else k.u8(0)


def _lower_next_step(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    unsigned("mo.next_step.ragged.paged", operands[5:7])
    args = operand_views(operands, static=False)
    return KernelCall(next_step, args)


LOWERINGS = {"mo.next_step.ragged.paged": _lower_next_step}
