"""The transition from one round of drafted tokens to the next: which are right, and the inputs of both models.

A round is some steps of a draft model, which write tokens, and a step of the model, which verifies them. One task does
all of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from max import kernel as k
from max._backends.cpu.kernels.generation.next_step import MAX_LENGTH, check_max_lengths, is_end
from max._backends.cpu.kernels.generation.sampling import splitmix64
from max._backends.cpu.kernels.operand_checks import check_size
from max._backends.kernel_call import KernelCall, Operand, operand_views

NOTHING = -2
"""Stands in the history for the place of a drafted token that is wrong, and for those after it."""


class RoundResults(NamedTuple):
    """The results of a round, and the conditions that end the run.

    Args:
        chosen_tokens: The token that the model chooses after each row, `[batch * width]`.
        first_seeds: The seed of each sequence's request, `[batch]`.
        ends: The tokens that end each sequence, `[batch, n]`.
        bounds: The greatest number of cached tokens of each sequence, `[batch]`.
        vocabulary: The number of tokens of the draft model, `[1]`.
        interrupt: Whether the run is interrupted, `[1]`.
    """

    chosen_tokens: k.Input
    first_seeds: k.Input
    ends: k.Input
    bounds: k.Input
    vocabulary: k.Input
    interrupt: k.Input


class RoundState(NamedTuple):
    """The inputs of the next round, updated in place.

    Args:
        rows: The tokens of the rows that the model verifies, `[batch * width]`: for each sequence its last token, then
            the drafted ones.
        cache_lengths: Cached tokens of each sequence, `[batch]`.
        max_lengths: The greatest lengths of the batch, `[n, 2]`; element `[0, 1]` counts cached tokens.
        seeds: The seeds of the rows, `[batch * width]`.
        pairs: The last two tokens of each sequence, which the draft model reads first, `[2 * batch]`.
        pair_lengths: Its cached tokens before them, `[batch]`.
        pair_max_lengths: As `max_lengths`.
        draft_lengths: Its cached tokens before the last one of them, `[batch]`.
        draft_max_lengths: As `max_lengths`.
        draft_seeds: The seeds of its next tokens, `[batch]`.
        num_drafted: The number of tokens that it has written, `[1]`.
        history: The tokens of all rounds, `[rounds, batch * width]`.
        rounds: The number of rounds that are done, `[1]`.
        again: Whether there is a next round, `[1]`.
    """

    rows: k.InOut
    cache_lengths: k.InOut
    max_lengths: k.InOut
    seeds: k.InOut
    pairs: k.InOut
    pair_lengths: k.InOut
    pair_max_lengths: k.InOut
    draft_lengths: k.InOut
    draft_max_lengths: k.InOut
    draft_seeds: k.InOut
    num_drafted: k.InOut
    history: k.InOut
    rounds: k.InOut
    again: k.InOut


@k.inline
def num_right(
    rows: k.View, first: k.Value, choices: k.View, first_choice: k.Value, width: k.Value
) -> Any:
    """How many drafted tokens of a sequence are right.

    Args:
        rows: The tokens of the rows of all sequences.
        first: The first row of the sequence, whose last token is followed by the drafted ones.
        choices: The tokens that the model chooses after rows.
        first_choice: The place of that after the first row.
        width: The number of rows of the sequence.
    """
    right = k.i64(0)
    while right + 1 < width and rows[first + right + 1] == choices[first_choice + right]:
        right += 1
    return right


@k.inline
def check_round(number: k.Value, history: k.View) -> None:
    """Raises unless the history `[rounds, n]` has a row for a round."""
    if number < 0 or number >= history.shape[0]:
        raise IndexError("round {} of {}, the rows of the history", number, history.shape[0])


@k.kernel
def next_round(results: RoundResults, state: RoundState, ctx: k.Context) -> None:
    """Stores the tokens of a round as row `rounds[0]` of the history: for each sequence the drafted tokens that are
    right, which the model chooses too, and the token that it chooses after them.

    There is a next round while the history has rows left, each sequence has room for all its drafted tokens and one
    more, no new token ends its sequence, is negative or is none of the draft model, and the run is not interrupted.
    """
    chosen, first_seeds, ends, bounds, vocabulary, interrupt = results
    (
        rows, cache_lengths, max_lengths, seeds, pairs, pair_lengths, pair_max_lengths,
        draft_lengths, draft_max_lengths, draft_seeds, num_drafted, history, rounds, again,
    ) = state  # fmt: skip
    for _ in ctx.parallel(1):
        check_size("vocabulary", vocabulary.shape[0], 1)
        check_size("interrupt", interrupt.shape[0], 1)
        check_size("num_drafted", num_drafted.shape[0], 1)
        check_size("rounds", rounds.shape[0], 1)
        check_size("again", again.shape[0], 1)
        check_max_lengths("max_lengths", max_lengths)
        check_max_lengths("pair_max_lengths", pair_max_lengths)
        check_max_lengths("draft_max_lengths", draft_max_lengths)
        number = k.i64(rounds[0])
        check_round(number, history)
        batch, count = cache_lengths.shape[0], rows.shape[0]
        if batch < 1 or count < batch or count % batch != 0:
            raise ValueError("{} rows of {} sequences, expected a multiple", count, batch)
        width = count // batch
        check_size("chosen tokens", chosen.shape[0], count)
        check_size("first seeds", first_seeds.shape[0], batch)
        check_size("ends", ends.shape[0], batch)
        check_size("bounds", bounds.shape[0], batch)
        check_size("seeds", seeds.shape[0], count)
        check_size("pairs", pairs.shape[0], 2 * batch)
        check_size("pair_lengths", pair_lengths.shape[0], batch)
        check_size("draft_lengths", draft_lengths.shape[0], batch)
        check_size("draft_seeds", draft_seeds.shape[0], batch)
        check_size("a row of the history", history.shape[1], count)
        # all sequences are checked before the first one changes: u32 holds their lengths after the round
        for row in range(batch):
            if k.i64(cache_lengths[row]) + width > MAX_LENGTH:
                raise ValueError("cache_lengths[{}] is {}, expected less", row, cache_lengths[row])
        ended = k.i64(interrupt[0])
        longest = k.i64(0)
        for row in range(batch):
            first = row * width
            right = num_right(rows, first, chosen, first, width)
            before = rows[first + right]
            last = chosen[first + right]
            for place in range(width):
                token = chosen[first + place] if place <= right else k.i64(NOTHING)
                history[number, first + place] = token
                if place <= right:
                    ended = ended | is_end(ends, row, token)
            if last < 0 or last >= vocabulary[0]:
                ended = k.i64(1)
            length = k.i64(cache_lengths[row]) + right + 1
            if length + width > bounds[row]:
                ended = k.i64(1)
            longest = max(longest, length)
            cache_lengths[row] = k.u32(length)
            draft_lengths[row] = k.u32(length)
            pair_lengths[row] = k.u32(length - 1)
            pairs[2 * row] = before
            pairs[2 * row + 1] = last
            rows[first] = last
            # the next token follows the one that is cached next; seeds are numbered from 1
            draft_seeds[row] = splitmix64(first_seeds[row], length + 2)
            for place in range(width):
                seeds[first + place] = splitmix64(first_seeds[row], length + 2 + place)
        max_lengths[0, 1] = k.u32(longest)
        draft_max_lengths[0, 1] = k.u32(longest)
        pair_max_lengths[0, 1] = k.u32(longest - 1)
        num_drafted[0] = k.i64(0)
        rounds[0] = number + 1
        has_next = ended == 0 and number + 1 < history.shape[0]
        again[0] = k.u8(1) if has_next else k.u8(0)


def _lower_next_round(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    """The call for `mo.next_round.ragged.paged`."""
    return KernelCall(next_round, operand_views(operands, static=False))


LOWERINGS = {"mo.next_round.ragged.paged": _lower_next_round}
