"""The spread of many times, in a bounded memory."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np

MOST_EXACT = 1 << 20
"""The times that are kept; more are counted in classes of times that differ by 1/4096 at most."""
_DROPPED_BITS = 40
"""Of the 52 bits of a fraction, those that tell the times of a class apart."""
_SHARES = {"p90": 0.9, "p99": 0.99, "max": 1.0}


class Times:
    """Times in seconds, none of them below 0."""

    def __init__(self) -> None:
        self._values = array("d")
        self._classes: dict[int, int] = {}
        """The number of times by the first bits of their representation, which is in the order of the times."""
        self._count, self._sum, self._most = 0, 0.0, 0.0

    def add(self, seconds: Iterable[float]) -> None:
        """Adds times.

        Args:
            seconds: The times.
        """
        self._values.extend(seconds)
        if len(self._values) > MOST_EXACT:
            self._count_values()

    def _count_values(self) -> None:
        """Replaces the times that are kept by the numbers of their classes."""
        values = np.frombuffer(self._values, np.float64)
        self._count += len(values)
        self._sum += float(values.sum())
        self._most = max(self._most, float(values.max(initial=0.0)))
        found, counts = np.unique(values.view(np.int64) >> _DROPPED_BITS, return_counts=True)
        for key, count in zip(found.tolist(), counts.tolist(), strict=True):
            self._classes[key] = self._classes.get(key, 0) + count
        self._values = array("d")

    def percentiles(self) -> dict[str, float]:
        """Mean, median, percentiles and the greatest one in milliseconds; empty: there are no times."""
        if self._classes:
            self._count_values()
            return self._percentiles_of_classes()
        ordered = np.sort(1e3 * np.frombuffer(self._values, np.float64))
        last = len(ordered) - 1
        if last < 0:
            return {}
        found = {"mean": float(ordered.mean()), "median": float(np.median(ordered))}
        return found | {
            name: float(ordered[min(int(share * len(ordered)), last)])
            for name, share in _SHARES.items()
        }

    def _percentiles_of_classes(self) -> dict[str, float]:
        keys = np.array(sorted(self._classes), np.int64)
        ends = np.cumsum([self._classes[key] for key in keys.tolist()])
        # the middle of each class
        bits = (keys << _DROPPED_BITS) | (1 << (_DROPPED_BITS - 1))
        middles = np.minimum(bits.view(np.float64), self._most)

        def at(share: float) -> float:
            place = min(int(share * self._count), self._count - 1)
            return 1e3 * float(middles[np.searchsorted(ends, place, side="right")])

        found = {"mean": 1e3 * self._sum / self._count, "median": at(0.5)}
        found |= {name: at(share) for name, share in _SHARES.items()}
        return found | {"max": 1e3 * self._most}
