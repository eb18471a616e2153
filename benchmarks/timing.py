"""The time of a call, for workers; it needs no package, as peers' environments have few."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable


def median_time(call: Callable[[], object], seconds: float, least: int = 1) -> float:
    """Median seconds of a call that is repeated for the given number of seconds, at least ``least`` times."""
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < least or time.perf_counter() - begin < seconds:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
