"""Frequency, presence and repetition penalties on logits: a task is a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from max import kernel as k
from max._backends.cpu.kernels.indexing.gather import copy_row
from max._backends.cpu.kernels.operand_checks import check_rising, check_size
from max._backends.kernel_call import KernelCall, Operand, view


class Strengths(NamedTuple):
    """The penalties of each row, `[batch]`; 0, 0 and 1 change nothing.

    Args:
        frequency: Subtracted for each occurrence of a token.
        presence: Subtracted once from a token that occurred.
        repetition: Divides the positive logits of tokens that occurred, and multiplies the negative ones.
    """

    frequency: k.Input
    presence: k.Input
    repetition: k.Input


@k.kernel
def penalties(
    out: k.Output,
    logits: k.Input,
    tokens: k.Input,
    counts: k.Input,
    offsets: k.Input,
    strengths: Strengths,
    ctx: k.Context,
) -> None:
    """Lowers the logits of tokens that occurred: `tokens` and `counts` `[n]` belong to row `b` from `offsets[b]` to
    `offsets[b + 1]`.

    Repetition penalties apply first; then `frequency * count` and `presence` are subtracted.
    """
    frequency, presence, repetition = strengths
    width = ctx.target.width(k.f32)
    vocabulary = logits.shape[1]
    batch = logits.shape[0]
    check_size("the result", out.shape[0], batch)
    check_size("the result's rows", out.shape[1], vocabulary)
    check_size("counts", counts.size, tokens.size)
    check_size("offsets", offsets.size, batch + 1)
    check_size("frequency penalties", frequency.size, batch)
    check_size("presence penalties", presence.size, batch)
    check_size("repetition penalties", repetition.size, batch)
    # offsets are data: nothing is read by them before they are checked
    if k.i64(offsets[batch]) > tokens.size:
        raise ValueError(
            "offsets[{}] is {}, expected {} or less, the number of tokens",
            batch,
            offsets[batch],
            tokens.size,
        )
    check_rising("offsets", offsets, width)
    for row in ctx.parallel(logits.shape[0]):
        copy_row(out[row], logits[row], width)
        for i in range(k.i64(offsets[row]), k.i64(offsets[row + 1])):
            token = k.i64(tokens[i])
            if token < 0 or token >= vocabulary:
                raise IndexError("token {} is out of range for {} logits", token, vocabulary)
            if counts[i] > 0:
                logit = out[row, token]
                # a logit always falls: division by a penalty above 1 would raise a negative one
                logit = logit / repetition[row] if logit > 0 else logit * repetition[row]
                out[row, token] = logit - frequency[row] * k.f32(counts[i]) - presence[row]


def _lower_penalties(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    """The call for `mo.penalties`; the logits may be changed in place."""
    (out,) = results
    args = (
        view("result", 0, out),
        *(view("operand", i, operand, static=i == 0) for i, operand in enumerate(operands)),
    )
    return KernelCall(penalties, args, in_place=((0, 0),))


LOWERINGS = {"mo.penalties": _lower_penalties}
