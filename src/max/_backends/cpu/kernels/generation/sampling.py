"""Choosing the next token of each row of logits.

The distribution is `softmax(logits / temperature)`, cut in this order: to the `top_k` most likely tokens, then to the
fewest of those whose probabilities sum to `top_p`, then to those with at least `min_p` times the greatest probability.
Of equal logits the lower index ranks first. The token is the first, in order of index, at which the running sum of
weights exceeds `u` times the total, where `u` in [0, 1) depends on the row's seed only: `u = (mix(seed) >> 40) /
2**24`, with the finalizer of splitmix64.

A cut is a threshold: a logit, and how many of the first tokens with an equal one are kept. Rows are not sorted. A task
is a row of logits; it is read

- once, for the greatest logit of each lane of each block (`logit_rows`), from which a greedy choice follows;
- with `top_k` up to `MOST_KEPT`, a second time: these tops bound the logit of the last of the best tokens from below,
  the tokens above the bound are gathered, and all cuts and the draw are made among these (`candidates`);
- otherwise once for each cut's search, and once for the sums of weights of blocks, of which only the one with the token
  is read again (`row_cuts`).

A row of NaN only has no token: the result is `NO_TOKEN`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from max import kernel as k
from max._backends.cpu.kernels.attention.online_softmax import LOG2_E, NEGATIVE_INFINITY
from max._backends.cpu.kernels.generation.candidates import (
    MOST_KEPT,
    bound_of,
    drawn_candidate,
    gather_candidates,
    keep_first,
    mass_cut,
    measure_above,
    weigh_candidates,
)
from max._backends.cpu.kernels.generation.logit_rows import (
    BLOCKS,
    LINE,
    Distribution,
    find_tops,
    first_of,
    has_number,
    lowest_logit,
    row_in_blocks,
)
from max._backends.cpu.kernels.generation.row_cuts import (
    Cut,
    Memory,
    count_cut,
    drawn_from_row,
    mass_row_cut,
    place_of_tie,
    worker_memory,
)
from max._backends.cpu.kernels.operand_checks import check_size
from max._backends.kernel_call import KernelCall, Operand, operand_views, view

NO_TOKEN = -1
"""The result for a row whose logits are all NaN."""


@k.inline
def splitmix64(seed: k.Value, index: k.Value) -> Any:
    """Element `index`, from 1, of the sequence of 64-bit numbers of a seed (Steele, Lea, Flood: Fast splittable
    pseudorandom number generators, 2014).
    """
    x = seed + k.u64(index) * k.u64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> 30)) * k.u64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> 27)) * k.u64(0x94D049BB133111EB)
    return x ^ (x >> 31)


@k.inline
def uniform(seed: k.Value) -> Any:
    """A number in [0, 1) from a seed."""
    # f32 holds 24 bits exactly
    return k.f32(k.i64(splitmix64(seed, 1) >> 40)) * k.f32(1 / 16777216)


class Choice(NamedTuple):
    """How a token is chosen among those of a distribution.

    Args:
        count: `top_k`; 0 or less keeps all.
        share: `top_p`.
        min_weight: `min_p`.
        u: In [0, 1).
    """

    count: Any
    share: Any
    min_weight: Any
    u: Any


@k.inline
def drawn_of_best(d: Distribution, choice: Choice, most: k.Integer, m: Memory) -> Any:
    """The token that is drawn after a cut to the `most` best tokens, `MOST_KEPT` at most."""
    row = d.row
    c = m.candidates
    # weights below min_p count for top_p
    lowest = lowest_logit(d, k.f32(0) if choice.share < 1 else choice.min_weight)
    tops = row.tops.reshape(BLOCKS * LINE)
    # as many tops are as many tokens; a few more cost less than the exact bound
    bound = bound_of(
        lambda bound: measure_above(tops, None, row.blocks, bound),  # pyright: ignore[reportUnknownLambdaType]
        lowest,
        d.peak,
        k.f64(most),
        k.f64(most + most // 4 + 16),
    )
    count = gather_candidates(row, c, bound, d.peak, most, d.peak)
    lines = weigh_candidates(d, c, count)
    if choice.share < 1:
        total = measure_above(c.logits, c.weights, lines, lowest)
        threshold, ties = mass_cut(d, c, lines, lowest, d.peak, k.f64(choice.share) * total)
        count = keep_first(c, count, threshold, ties)
    return drawn_candidate(c, count, choice.min_weight, choice.u)


@k.inline
def drawn_of_row(d: Distribution, choice: Choice, m: Memory) -> Any:
    """The token that is drawn after any cuts."""
    row = d.row
    lowest = lowest_logit(d, k.f32(0))
    threshold = lowest
    ties = k.i64(0)
    # a cut to all tokens is none
    if choice.count > 0 and choice.count < row.logits.shape[0]:
        threshold, ties = count_cut(d, choice.count, lowest)
    if choice.share < 1:
        threshold, ties = mass_row_cut(d, choice.share, threshold, ties, m)
    last = place_of_tie(row, threshold, ties) if ties > 0 else k.i64(-1)
    # with min_p fewer blocks are read
    kept = lowest_logit(d, choice.min_weight)
    if kept >= threshold:
        threshold = kept
        last = k.i64(-1)
    cut = Cut(threshold, last, choice.min_weight)
    return drawn_from_row(d, cut, choice.u, m)


@k.inline
def drawn_token(d: Distribution, choice: Choice, m: Memory) -> Any:
    """The token that is drawn from a distribution after its cuts."""
    size = d.row.logits.shape[0]
    most = k.min(choice.count, size) if choice.count > 0 else k.i64(size)
    token = k.i64(0)
    if most <= MOST_KEPT and (most < size or choice.share < 1):
        token = drawn_of_best(d, choice, most, m)
    else:
        token = drawn_of_row(d, choice, m)
    return token


class Parameters(NamedTuple):
    """The sampling parameters of each row `[batch]`.

    Args:
        temperature: 0 is greedy.
        top_k: 1 is greedy, 0 and less is all tokens.
        top_p: In [0, 1].
        min_p: In [0, 1].
        seed: u64.
    """

    temperature: k.Input
    top_k: k.Input
    top_p: k.Input
    min_p: k.Input
    seed: k.Input


@k.inline
def check_parameters(p: Parameters, b: k.Integer) -> None:
    """Refuses parameters of a row that are out of range, or NaN."""
    if not p.temperature[b] >= 0:
        raise ValueError("the temperature of row {} is {}, expected 0 or more", b, p.temperature[b])
    if not (p.top_p[b] >= 0 and p.top_p[b] <= 1):
        raise ValueError("top_p of row {} is {}, expected 0 to 1", b, p.top_p[b])
    if not (p.min_p[b] >= 0 and p.min_p[b] <= 1):
        raise ValueError("min_p of row {} is {}, expected 0 to 1", b, p.min_p[b])


@k.inline
def sample_rows(
    out: k.View, logits: k.View, p: Parameters, words: k.View | None, ctx: k.Context
) -> None:
    """Samples a token of each row, with `words` among the tokens whose bits are set."""
    memory = worker_memory(ctx)
    batch = logits.shape[0]
    if logits.shape[1] == 0 and batch > 0:
        raise ValueError("the logits have 0 columns, expected 1 or more")
    check_size("the result", out.shape[0], batch)
    check_size("temperature", p.temperature.shape[0], batch)
    check_size("top_k", p.top_k.shape[0], batch)
    check_size("top_p", p.top_p.shape[0], batch)
    check_size("min_p", p.min_p.shape[0], batch)
    check_size("seed", p.seed.shape[0], batch)
    if words is not None:
        check_size("allowed", words.shape[0], batch)
    for b in ctx.parallel(batch, grain=1):
        check_parameters(p, b)
        row = row_in_blocks(logits[b], None if words is None else words[b], memory.tops)
        peak = find_tops(row)
        count = k.i64(p.top_k[b])
        # a row of only -inf or NaN has no distribution
        if p.temperature[b] > 0 and count != 1 and peak > NEGATIVE_INFINITY:
            d = Distribution(row, peak, p.temperature[b], LOG2_E / p.temperature[b])
            choice = Choice(count, p.top_p[b], p.min_p[b], uniform(k.u64(p.seed[b])))
            out[b] = drawn_token(d, choice, memory)
        elif peak > NEGATIVE_INFINITY or has_number(row):
            out[b] = first_of(row, peak)
        else:
            out[b] = NO_TOKEN


@k.kernel
def sample_token(out: k.Output, logits: k.Input[k.f32, 2], p: Parameters, ctx: k.Context) -> None:
    """`out[row]` is the token drawn from row `row` of `logits`; greedy where the temperature is 0 or `top_k` is 1;
    `NO_TOKEN` where all logits are NaN.
    """
    sample_rows(out, logits, p, None, ctx)


@k.kernel
def sample_allowed(
    out: k.Output,
    logits: k.Input[k.f32, 2],
    p: Parameters,
    words: k.InOut[k.i32, 2],
    ctx: k.Context,
) -> None:
    """As `sample_token`, where the logits of tokens whose bits in `words` `[batch, words]` are 0, and of those past the
    words, are `FORBIDDEN`.
    """
    sample_rows(out, logits, p, words, ctx)


def _lowering(kernel: Any) -> Callable[..., KernelCall]:
    """The lowering to a kernel whose first argument is the result."""

    def lower(
        operands: Sequence[Operand],
        results: Sequence[Operand],
        attributes: Mapping[str, Any],
        target: k.Target,
    ) -> KernelCall:
        return KernelCall(kernel, (view("result", 0, results[0]), *operand_views(operands)))

    return lower


LOWERINGS = {
    "mo.sample.token": _lowering(sample_token),
    "mo.sample.allowed": _lowering(sample_allowed),
}
