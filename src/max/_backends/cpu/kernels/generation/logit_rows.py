"""A row of logits in blocks, and the weights of its tokens.

A row is read in lines of `LINE` lanes. A block is some lines side by side, as many as make at most `BLOCKS` blocks. The
first pass finds the greatest logit of each lane of each block, the *tops*: those of at most `BLOCKS * LINE` groups of
tokens. Later passes skip the blocks whose tops are too low, and the tops bound the logits of the best tokens.

The line is the same on all targets, so that sums are added in one order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from max import kernel as k
from max._backends.cpu.kernels.attention.online_softmax import NEGATIVE_INFINITY

LINE = 64
"""Lanes that are read together: several vectors, as one alone is a chain of dependent instructions."""
BLOCKS = 64
"""The maximum number of blocks of a row."""
FORBIDDEN = -3.4028234663852886e38
"""The logit of a token that may not follow: finite, so that a row without any other has a distribution."""
ZERO_WEIGHT = -105.0
"""An exponent whose power of e is 0 in f32."""
NO_POWER = -150.0
"""An exponent whose power of 2 is 0 in f32."""


class LogitRow(NamedTuple):
    """A row of logits.

    Args:
        logits: The logits.
        words: Which of the tokens may follow: bit `token & 31` of word `token >> 5`; None: all. Those past the words
            may not.
        tops: Scratch memory for the greatest logits of lanes, `[BLOCKS, LINE]`.
        block_size: The number of logits of a block, a multiple of `LINE`.
        blocks: The number of blocks.
    """

    logits: Any
    words: Any
    tops: Any
    block_size: Any
    blocks: Any


@k.inline
def row_in_blocks(logits: k.View, words: k.View | None, tops: k.View) -> Any:
    """A row that is cut into blocks."""
    size = logits.shape[0]
    lines = (size + (LINE - 1)) // LINE
    block_size = (lines + (BLOCKS - 1)) // BLOCKS * LINE
    return LogitRow(
        logits, words, tops, block_size, (size + block_size - 1) // k.max(block_size, 1)
    )


@k.inline
def load_logits(row: LogitRow, j: k.Integer, mask: k.Mask | None, width: int) -> Any:
    """`width` logits from a multiple of it on; -inf behind the row, `FORBIDDEN` for tokens that may not follow."""
    logits = row.logits.load(j, width=width, mask=mask, other=NEGATIVE_INFINITY)
    if row.words is None:
        return logits
    forbidden = k.splat(k.f32(FORBIDDEN), width)
    logits = k.select(allowed_lanes(row.words, j, width), logits, forbidden)
    if mask is None:
        return logits
    return k.select(mask, logits, k.splat(k.f32(NEGATIVE_INFINITY), width))


@k.inline
def allowed_lanes(words: k.View, j: k.Integer, width: int) -> Any:
    """Whether the tokens from `j` on may follow; `j` is a multiple of `width`, which is 64 or divides 32."""
    if width > 32:
        low = allowed_bits(words, j, 32)
        high = allowed_bits(words, j + 32, 32)
        return k.concat(low, high) != 0
    return allowed_bits(words, j, width) != 0


@k.inline
def allowed_bits(words: k.View, j: k.Integer, width: int) -> Any:
    """For each of up to 32 tokens of a word an integer that is not 0 if it may follow."""
    place = k.i64(j) >> 5
    word = words[place] if place < words.shape[0] else k.i32(0)
    return k.splat(word >> k.i32(k.i64(j) & 31), width) & (
        k.splat(k.i32(1), width) << k.iota(k.i32, width)
    )


@k.inline
def find_tops(row: LogitRow) -> Any:
    """Writes the greatest logit of each lane of each block; returns the greatest of all, -inf if none is a number."""
    peaks = k.splat(k.f32(NEGATIVE_INFINITY), LINE)
    for block in range(row.blocks):
        start = block * row.block_size
        top = k.splat(k.f32(NEGATIVE_INFINITY), LINE)
        for j, mask in k.vectors(start, k.min(start + row.block_size, row.logits.shape[0]), LINE):
            logits = load_logits(row, j, mask, LINE)
            # NaN is not greater
            top = k.select(logits > top, logits, top)
        row.tops.store(block, 0, value=top)
        peaks = k.select(top > peaks, top, peaks)
    return k.reduce_max(peaks)


@k.inline
def block_top(row: LogitRow, block: k.Integer) -> Any:
    """The greatest logit of a block."""
    return k.reduce_max(row.tops.load(block, 0, width=LINE))


@k.inline
def first_of(row: LogitRow, peak: k.Value) -> Any:
    """The first index of the greatest logit; 0 if that is -inf."""
    found = k.i64(0)
    searching = peak > NEGATIVE_INFINITY
    for block in range(row.blocks):
        if searching and block_top(row, block) == peak:
            start = block * row.block_size
            for j, mask in k.vectors(
                start, k.min(start + row.block_size, row.logits.shape[0]), LINE
            ):
                bits = k.bitcast(load_logits(row, j, mask, LINE) == peak, k.u64)
                if searching and bits != 0:
                    found = k.i64(j) + k.i64(k.count_trailing_zeros(bits))
                    searching = False
    return found


@k.inline
def has_number(row: LogitRow) -> Any:
    """Whether a logit is not NaN."""
    any_number = False
    for j, mask in k.vectors(row.logits.shape[0], LINE):
        logits = load_logits(row, j, mask, LINE)
        numbers = logits == logits
        any_number = any_number or k.any(numbers if mask is None else numbers & mask)
    return any_number


@k.inline
def order_key(value: k.Value) -> Any:
    """A float as an integer with the same order."""
    bits = k.bitcast(value, k.i32)
    # of negative floats a greater magnitude has the greater bits
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@k.inline
def from_order_key(key: k.Integer) -> Any:
    """The inverse of `order_key`."""
    return k.bitcast(key ^ ((key >> 31) & 0x7FFFFFFF), k.f32)


class Distribution(NamedTuple):
    """The distribution of a row of logits.

    Args:
        row: The logits.
        peak: The greatest of them.
        temperature: The temperature.
        factor: The base-2 logarithm of e / temperature, as powers of 2 take fewer instructions than those of e.
    """

    row: Any
    peak: Any
    temperature: Any
    factor: Any


@k.inline
def token_weights(logits: k.SIMD, d: Distribution) -> Any:
    """Unnormalized probabilities: 1 for logits that equal the greatest one, also an infinite one; 0 for NaN."""
    power = (logits - d.peak) * d.factor
    # also for NaN, which is not greater
    power = k.select(power > NO_POWER, power, k.splat(k.f32(NO_POWER), logits.width))
    return k.select(logits == d.peak, k.splat(k.f32(1), logits.width), k.exp2(power))


@k.inline
def weight_of(logit: k.Value, d: Distribution) -> Any:
    """The weight of one logit."""
    return token_weights(k.splat(logit, 1), d)[0]


@k.inline
def lowest_logit(d: Distribution, min_weight: k.Value) -> Any:
    """A logit below the greatest one; the logits of all weights above 0 and at least `min_weight` are greater."""
    # less by more than what is rounded, of a product of up to 105
    exponent = k.max(k.log(k.f32(min_weight)) - 1e-3, k.f32(ZERO_WEIGHT))
    lowest = d.peak + exponent * d.temperature
    # two below, as the floats of 0 with and without a sign are equal
    below = k.max(order_key(d.peak) - 2, order_key(k.f32(NEGATIVE_INFINITY)))
    return lowest if lowest < d.peak else from_order_key(below)
