"""Whether an execution has so little work that the calling thread is faster alone.

To wake another worker and wait for it takes 1 to 15 µs, a barrier 0.1 to 0.3 µs. The work that workers could share is
estimated for each set of sizes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from max._compiler.code import REGION_CHUNK, ProgramCode, WorkCode
from max._compiler.sizes import size_function
from max._config import flags

__all__ = ["small_work"]


class _Rate(NamedTuple):
    """How long one worker needs for an amount of work."""

    unshared: int
    """The amount up to which a launch is not worth sharing, however many launches there are."""
    weight: int
    """The time of each further element, operation or byte."""


RATES = {
    # one chunk, which is one worker's
    "region": _Rate(REGION_CHUNK, 64),
    # products of 25 by 25
    "product": _Rate(1 << 15, 1),
    # sorts, cumulative sums, pooling: their bytes say little about their time
    "other": _Rate(1 << 8, 8),
}
MOST_WORK = 1 << 16
"""The most work of an execution on one worker, about 5 µs."""


def small_work(code: ProgramCode, symbols: Sequence[str]) -> Callable[[Sequence[int]], bool]:
    """A function from the values of `symbols` to whether an execution has too little work to share.

    Args:
        code: The program or segment.
        symbols: The names of all symbols of its sizes.
    """
    launches = [launch for launch in code.launches if not launch.jump and not launch.serial]
    works = [launch.work for launch in launches if launch.work is not None]
    if not flags.MAX_RUN_ALONE or len(works) < len(launches):
        return _never
    # the number of iterations of a loop is unknown: only work that is not worth sharing counts as small
    max_work = 0 if any(launch.jump == "back" for launch in code.launches) else MOST_WORK
    min_work, all_ones = 0, dict.fromkeys(symbols, 1)
    for work in works:
        amount = work.amount
        min_work += _time(work, amount if isinstance(amount, int) else amount.evaluate(all_ones))
        if min_work > max_work:
            # most models are large with any sizes, and compute nothing for each set of them
            return _never
    counts = Counter(works)
    amounts = size_function([work.amount for work in counts], symbols)

    def is_small(values: Sequence[int]) -> bool:
        time = 0
        for (work, count), amount in zip(counts.items(), amounts(values), strict=True):
            time += count * _time(work, amount)
        return time <= max_work

    return is_small


def _never(_: Sequence[int]) -> bool:
    return False


def _time(work: WorkCode, amount: int) -> int:
    """The part of a launch's time that is worth sharing."""
    rate = RATES[work.kind]
    return max(amount - rate.unshared, 0) * rate.weight
