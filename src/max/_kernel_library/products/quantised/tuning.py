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
        prefetch_distance: The bytes between a line that is read and the one that is prefetched.
        row_threshold: The most rows of the GEMV path where a byte product is one instruction, used when the machine
            has no measurement of its own.
    """

    prefetch_distance: int
    row_threshold: int


_DEFAULT = QuantisedTuning(prefetch_distance=4096, row_threshold=4)
_FAMILIES = {
    # 512-bit loads keep all miss buffers busy, and prefetches far ahead are dropped: docs/log/2026-11-28-zen4.md
    "znver4": QuantisedTuning(prefetch_distance=640, row_threshold=24),
}
"""By LLVM's name of the processor."""


def tuning_of(target: k.Target) -> QuantisedTuning:
    """The parameters for a target."""
    return _FAMILIES.get(getattr(target, "cpu", ""), _DEFAULT)
