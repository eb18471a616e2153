"""What was measured of processor families. It chooses among paths with equal results, and prefetch distances.

Each row names its measurement in docs/log. A family without a row takes the defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from max import kernel as k

__all__ = ["QuantisedTuning", "tuning_of"]


class QuantisedTuning(NamedTuple):
    """The parameters of products with packed quantized weights on a processor family.

    Args:
        prefetch_distances: The bytes between a line that is read and the one that is prefetched, by the rows of a pass
            of the GEMV path, from one on.
        row_thresholds: The most rows of the GEMV path, by the bits of an element; used when the machine has no
            measurement of its own. Up to them a row more never makes a product faster, nor does the next one, which
            takes the GEMM path.
    """

    prefetch_distances: tuple[int, ...]
    row_thresholds: Mapping[int, int]


_FAR = (4096,) * 4
_DEFAULTS = {
    # docs/log/2026-11-23-avx512.md (Ice Lake)
    True: QuantisedTuning(_FAR, dict.fromkeys((2, 3, 4, 5, 6, 8), 4)),
    # a pass shares unpacking, signs and scales
    False: QuantisedTuning(_FAR, dict.fromkeys((2, 3, 4, 5, 6, 8), 8)),
}
"""By whether a product of bytes is one instruction."""
_FAMILIES = {
    # docs/log/2026-11-28-zen4.md: the L2 prefetcher follows only a rising stream of misses, which far prefetches break;
    # four rows are limited by arithmetic
    ("znver4", True): QuantisedTuning(
        (320, 320, 320, 4096), {2: 64, 3: 42, 4: 64, 5: 42, 6: 46, 8: 64}
    ),
    ("znver4", False): QuantisedTuning(_FAR, {2: 16, 3: 4, 4: 12, 5: 10, 6: 9, 8: 9}),
}
"""By LLVM's name of the processor, and whether a product of bytes is one instruction."""


def tuning_of(target: k.Target) -> QuantisedTuning:
    """The parameters for a target."""
    one = bool(target.dot_i8_lanes(target.width(k.f32)))
    return _FAMILIES.get((getattr(target, "cpu", ""), one), _DEFAULTS[one])
