"""What was measured of processor families. It chooses among paths with equal results, and prefetch distances.

Each row names its measurement in docs/log. A family without a row takes the defaults.
"""

from __future__ import annotations

from typing import NamedTuple

from max import kernel as k

__all__ = ["QuantisedTuning", "tuning_of"]


class QuantisedTuning(NamedTuple):
    """The parameters of products with packed quantised weights on a processor family.

    Args:
        prefetch_distances: The bytes between a line that is read and the one that is prefetched, by the rows of a pass
            of the GEMV path, from one on.
        row_threshold: The most rows of the GEMV path where a byte product is one instruction, used when the machine
            has no measurement of its own.
    """

    prefetch_distances: tuple[int, ...]
    row_threshold: int


_DEFAULT = QuantisedTuning(prefetch_distances=(4096,) * 4, row_threshold=4)
_FAMILIES = {
    # the L2 prefetcher follows only a rising stream of misses, which far prefetches break; four rows are limited by
    # arithmetic: docs/log/2026-11-28-zen4.md
    "znver4": QuantisedTuning(prefetch_distances=(320, 320, 320, 4096), row_threshold=24),
}
"""By LLVM's name of the processor."""


def tuning_of(target: k.Target) -> QuantisedTuning:
    """The parameters for a target. Families were measured with byte products of one instruction; other code of the same
    processor has the defaults.
    """
    if not target.dot_i8_lanes(target.width(k.f32)):
        return _DEFAULT
    return _FAMILIES.get(getattr(target, "cpu", ""), _DEFAULT)
