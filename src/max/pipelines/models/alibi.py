"""The slopes of ALiBi (https://arxiv.org/abs/2108.12409): a bias of scores that falls with the distance."""

from __future__ import annotations

import math

__all__ = ["alibi_slopes"]


def alibi_slopes(
    heads: int, largest: float = 8.0, *, interleaved: bool = False, factor: float = 1.0
) -> tuple[float, ...]:
    """The slope of each head: a geometric series down to ``2 ** -largest``.

    Args:
        heads: The number of heads.
        largest: The exponent of the least slope.
        interleaved: For a number of heads that is no power of 2: whether slopes are picked from the series of the
            next power, every second first, as MPT does; or whether the series of the power below is extended, as
            BLOOM and Falcon do.
        factor: The factor of all slopes; Falcon scales them as it scales scores.
    """
    if interleaved:
        count = 2 ** math.ceil(math.log2(heads))
        series = [2.0 ** (-largest * (i + 1) / count) for i in range(count)]
        picked = series if count == heads else [*series[1::2], *series[::2]][:heads]
        return tuple(slope * factor for slope in picked)
    count = 2 ** math.floor(math.log2(heads))
    series = [2.0 ** (-largest * (i + 1) / count) for i in range(count)]
    more = [2.0 ** (-largest * (i + 1) / (2 * count)) for i in range(0, 2 * count, 2)]
    return tuple(slope * factor for slope in [*series, *more][:heads])
