"""The slopes of ALiBi (https://arxiv.org/abs/2108.12409): a score bias that decreases linearly with the distance."""

from __future__ import annotations

import math

__all__ = ["alibi_slopes"]


def alibi_slopes(
    heads: int, largest: float = 8.0, *, interleaved: bool = False, factor: float = 1.0
) -> tuple[float, ...]:
    """The slope of each head: ``factor * 2 ** (-largest * (i + 1) / heads)`` for head i.

    This formula holds if the number of heads is a power of 2; see `interleaved` for other numbers.

    Args:
        heads: The number of heads.
        largest: The negated base-2 logarithm of the smallest slope, before `factor`.
        interleaved: How slopes are chosen if the number of heads is not a power of 2. True (MPT): from the series
            of the next power of 2, every second slope first. False (BLOOM, Falcon): the series of the previous power
            of 2, then every second slope of the series of twice as many heads.
        factor: The factor of all slopes; Falcon uses the factor of its scores.
    """
    if interleaved:
        count = 2 ** math.ceil(math.log2(heads))
        series = [2.0 ** (-largest * (i + 1) / count) for i in range(count)]
        picked = series if count == heads else [*series[1::2], *series[::2]][:heads]
        return tuple(slope * factor for slope in picked)
    count = 2 ** math.floor(math.log2(heads))
    series = [2.0 ** (-largest * (i + 1) / count) for i in range(count)]
    # heads that are no power of two: the others get slopes from between those of the series
    more = [2.0 ** (-largest * (i + 1) / (2 * count)) for i in range(0, 2 * count, 2)]
    return tuple(slope * factor for slope in [*series, *more][:heads])
