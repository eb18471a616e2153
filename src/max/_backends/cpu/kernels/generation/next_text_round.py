"""The transition from one round of tokens that texts draft to the next: which are right, and the inputs of the model.

A round is a step of the model, which verifies the next tokens of a text that each sequence follows. One task does all
of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from max import kernel as k
from max._backends.cpu.kernels.generation.next_round import NOTHING, check_round, num_right
from max._backends.cpu.kernels.generation.next_step import MAX_LENGTH, check_max_lengths, is_end
from max._backends.cpu.kernels.generation.sampling import splitmix64
from max._backends.cpu.kernels.operand_checks import check_size
from max._backends.kernel_call import KernelCall, Operand, operand_views


class TextRoundResults(NamedTuple):
    """The results of a round, and the conditions that end the run.

    Args:
        chosen_tokens: The token that the model chooses after each of the last `width` rows of a sequence,
            `[batch * width]`; a sequence of fewer rows has them at its last places.
        first_seeds: The seed of each sequence's request, `[batch]`.
        ends: The tokens that end each sequence, `[batch, n]`.
        offsets: The first row of each sequence, and the number of rows, `[batch + 1]`.
        texts: What follows each sequence if all drafted tokens are right, `[batch, m]`; -1: any token may.
        interrupt: Whether the run is interrupted, `[1]`.
    """

    chosen_tokens: k.Input
    first_seeds: k.Input
    ends: k.Input
    offsets: k.Input
    texts: k.Input
    interrupt: k.Input


class TextRoundState(NamedTuple):
    """The inputs of the next round, updated in place.

    Args:
        rows: The tokens of the rows that the model verifies, `[total]`: for each sequence its last token, then the
            drafted ones.
        cache_lengths: Cached tokens of each sequence, `[batch]`.
        max_lengths: The greatest lengths of the batch, `[n, 2]`; element `[0, 1]` counts cached tokens.
        seeds: The seeds of the rows as `chosen_tokens` has them, `[batch * width]`.
        history: The tokens of all rounds, `[rounds, batch * width]`; those of a sequence at its first places.
        rounds: The number of rounds that are done, `[1]`.
        again: Whether there is a next round, `[1]`.
    """

    rows: k.InOut
    cache_lengths: k.InOut
    max_lengths: k.InOut
    seeds: k.InOut
    history: k.InOut
    rounds: k.InOut
    again: k.InOut


@k.kernel
def next_text_round(results: TextRoundResults, state: TextRoundState, ctx: k.Context) -> None:
    """Stores the tokens of a round as row `rounds[0]` of the history: for each sequence the drafted tokens that are
    right, which the model chooses too, and the token that it chooses after them.

    There is a next round while the history has rows left, all tokens are those of the texts, no new token ends its
    sequence or is negative, and the run is not interrupted. It drafts the next tokens of the texts.
    """
    chosen, first_seeds, ends, offsets, texts, interrupt = results
    rows, cache_lengths, max_lengths, seeds, history, rounds, again = state
    for _ in ctx.parallel(1):
        check_size("interrupt", interrupt.shape[0], 1)
        check_size("rounds", rounds.shape[0], 1)
        check_size("again", again.shape[0], 1)
        check_max_lengths("max_lengths", max_lengths)
        number, most = k.i64(rounds[0]), history.shape[0]
        check_round(number, history)
        batch, count = cache_lengths.shape[0], chosen.shape[0]
        if batch < 1 or count < batch or count % batch != 0:
            raise ValueError("{} tokens of {} sequences, expected a multiple", count, batch)
        width = count // batch
        check_size("first seeds", first_seeds.shape[0], batch)
        check_size("ends", ends.shape[0], batch)
        check_size("offsets", offsets.shape[0], batch + 1)
        check_size("texts", texts.shape[0], batch)
        check_size("seeds", seeds.shape[0], count)
        check_size("a row of the history", history.shape[1], count)
        if texts.shape[1] < most * width - 1:
            raise ValueError(
                "texts of {} tokens, expected {} or more", texts.shape[1], most * width - 1
            )
        if offsets[0] != 0 or offsets[batch] != rows.shape[0]:
            raise ValueError(
                "offsets from {} to {} of {} rows", offsets[0], offsets[batch], rows.shape[0]
            )
        # all sequences are checked before the first one changes: u32 holds their lengths after the round
        for row in range(batch):
            own = k.i64(offsets[row + 1]) - k.i64(offsets[row])
            if own < 1 or own > width:
                raise ValueError("sequence {} has {} rows, expected 1 to {}", row, own, width)
            if k.i64(cache_lengths[row]) + width > MAX_LENGTH:
                raise ValueError("cache_lengths[{}] is {}, expected less", row, cache_lengths[row])
        has_rows = number + 1 < most
        ended = k.i64(interrupt[0])
        longest = k.i64(0)
        for row in range(batch):
            first = k.i64(offsets[row])
            own = k.i64(offsets[row + 1]) - first
            # where the tokens after its own rows begin
            begin = (row + 1) * width - own
            right = num_right(rows, first, chosen, begin, own)
            last = chosen[begin + right]
            for place in range(width):
                token = k.i64(NOTHING)
                if place <= right:
                    token = chosen[begin + place]
                    ended = ended | is_end(ends, row, token)
                history[number, row * width + place] = token
            if last < 0 or right + 1 < own:
                ended = k.i64(1)
            length = k.i64(cache_lengths[row]) + right + 1
            longest = max(longest, length)
            cache_lengths[row] = k.u32(length)
            rows[first] = last
            if has_rows:
                # the tokens of a text that this round, and those before it, have used
                done = (number + 1) * own
                expected = texts[row, done - 1]
                if expected >= 0 and last != expected:
                    ended = k.i64(1)
                for place in range(own - 1):
                    rows[first + 1 + place] = texts[row, done + place]
            # the next token follows the one that is cached next; seeds are numbered from 1
            for place in range(own):
                seeds[begin + place] = splitmix64(first_seeds[row], length + 2 + place)
        max_lengths[0, 1] = k.u32(longest)
        rounds[0] = number + 1
        again[0] = k.u8(1) if ended == 0 and has_rows else k.u8(0)


def _lower_next_text_round(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    """The call for `mo.next_text_round.ragged.paged`."""
    return KernelCall(next_text_round, operand_views(operands, static=False))


LOWERINGS = {"mo.next_text_round.ragged.paged": _lower_next_text_round}
