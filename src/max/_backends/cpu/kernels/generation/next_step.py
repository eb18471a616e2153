"""The transition from one decoding step of a batch to the next, where each sequence has one new token.

One task does all of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from max import kernel as k
from max._backends.cpu.kernels.generation.sampling import splitmix64
from max._backends.cpu.kernels.operand_checks import check_size
from max._backends.kernel_call import KernelCall, Operand, operand_views

MAX_LENGTH = 2**32 - 1
"""The greatest length that a u32 holds: a sequence of this length cannot grow."""


class StepResults(NamedTuple):
    """The results of a step, and the conditions that end the run.

    Args:
        next_tokens: The sampled tokens, `[batch]`.
        first_seeds: The seed of each sequence's request, `[batch]`.
        ends: The tokens that end each sequence, `[batch, n]`.
        interrupted: Whether the run is interrupted, `[1]`.
    """

    next_tokens: k.Input
    first_seeds: k.Input
    ends: k.Input
    interrupted: k.Input


class DecodingState(NamedTuple):
    """The inputs of the next step, updated in place.

    Args:
        tokens: The input tokens, `[batch]`.
        cache_lengths: Cached tokens of each sequence, `[batch]`.
        max_lengths: The greatest lengths of the batch, `[n, 2]`; element `[0, 1]` counts cached and new tokens.
        seeds: The seeds of the next step, `[batch]`.
        history: The tokens of all steps, `[steps, batch]`.
        steps: The number of steps that are done, `[1]`.
        again: Whether there is a next step, `[1]`.
    """

    tokens: k.InOut
    cache_lengths: k.InOut
    max_lengths: k.InOut
    seeds: k.InOut
    history: k.InOut
    steps: k.InOut
    again: k.InOut


@k.inline
def check_max_lengths(name: str, max_lengths: k.View) -> None:
    """Raises unless there are rows of two lengths.

    Args:
        name: The name of the operand in the message (compile time).
        max_lengths: `[n, 2]`.
    """
    check_size(f"a row of {name}", max_lengths.shape[1], 2)
    if max_lengths.shape[0] < 1:
        raise ValueError("{} has no rows, expected 1 or more", name)


@k.inline
def is_end(ends: k.View, row: k.Value, token: k.Value) -> Any:
    """Whether a token is among those that end a sequence, `ends` `[batch, n]`; 1 or 0."""
    found = k.i64(0)
    for i in range(ends.shape[1]):
        if ends[row, i] == token:
            found = k.i64(1)
    return found


@k.kernel
def next_step(results: StepResults, state: DecodingState, ctx: k.Context) -> None:
    """Stores the tokens of a step as row `steps[0]` of the history, and as the input of the next step.

    There is a next step while the history has rows left, no token ends its sequence or is negative (no token could be
    chosen), and the run is not interrupted.
    """
    next_tokens, first_seeds, ends, interrupted = results
    tokens, cache_lengths, max_lengths, seeds, history, steps, again = state
    for _ in ctx.parallel(1):
        check_size("interrupted", interrupted.shape[0], 1)
        check_size("steps", steps.shape[0], 1)
        check_size("again", again.shape[0], 1)
        check_max_lengths("max_lengths", max_lengths)
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
        # all sequences are checked before the first one changes
        for row in range(batch):
            if cache_lengths[row] == MAX_LENGTH:
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
            if token < 0:
                ended = k.i64(1)
            ended = ended | is_end(ends, row, token)
        max_lengths[0, 1] = max_lengths[0, 1] + 1  # all sequences of the batch grow by one token
        steps[0] = step + 1
        has_next = ended == 0 and step + 1 < history.shape[0]
        again[0] = k.u8(1) if has_next else k.u8(0)


def _lower_next_step(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    """The call for `mo.next_step.ragged.paged`."""
    args = operand_views(operands, static=False)
    return KernelCall(next_step, args)


LOWERINGS = {"mo.next_step.ragged.paged": _lower_next_step}
