"""Whether an execution has so little work that one worker is faster alone.

The work that workers could share is estimated for each set of sizes, by the rates of the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from max._backends.backend import Rate, Sharing
from max._compiler.program.code import ProgramCode
from max._config import flags
from max.mlir.sizes import size_function

__all__ = ["small_work"]


def small_work(
    code: ProgramCode, symbols: Sequence[str], sharing: Sharing | None
) -> Callable[[Sequence[int]], bool]:
    """A function from the values of `symbols` to whether an execution has too little work to share.

    Args:
        code: The program or segment.
        symbols: The names of all symbols of its sizes.
        sharing: The rates of its device.
    """
    launches = [launch for launch in code.launches if not launch.jump and not launch.serial]
    works = [launch.work for launch in launches if launch.work is not None]
    if sharing is None or not flags.MAX_RUN_ALONE or len(works) < len(launches):
        return _never
    rates = sharing.rates
    # the number of iterations of a loop is unknown: only work that is not worth sharing counts as small
    max_work = 0 if any(launch.jump == "back" for launch in code.launches) else sharing.most_work
    min_work, all_ones = 0, dict.fromkeys(symbols, 1)
    for work in works:
        amount = work.amount
        min_work += _time(
            rates[work.kind], amount if isinstance(amount, int) else amount.evaluate(all_ones)
        )
        if min_work > max_work:
            # most models are large with any sizes, and compute nothing for each set of them
            return _never
    counts = Counter(works)
    amounts = size_function([work.amount for work in counts], symbols)

    def is_small(values: Sequence[int]) -> bool:
        time = 0
        for (work, count), amount in zip(counts.items(), amounts(values), strict=True):
            time += count * _time(rates[work.kind], amount)
        return time <= max_work

    return is_small


def _never(_: Sequence[int]) -> bool:
    return False


def _time(rate: Rate, amount: int) -> int:
    """The part of a launch's time that is worth sharing."""
    return max(amount - rate.unshared_amount, 0) * rate.weight
