"""What was measured of processor families. It chooses among paths with equal results, and prefetch distances.

Each row names its measurement in docs/log. A family without a row takes the defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from max import kernel as k

__all__ = ["QuantizedTuning", "tuning_of"]


ONCE, KEPT = 0, 3
"""Localities of prefetches: `prefetchnta`, which displaces no other data, and into all caches."""


_BITS = (2, 3, 4, 5, 6, 8)


class QuantizedTuning(NamedTuple):
    """The parameters of products with packed quantized weights on a processor family.

    Row thresholds are the most rows of the GEMV path, by the bits of an element; they are used when the machine has no
    measurement of its own. Up to them a row more never makes a product faster, nor does the next one, which takes the
    GEMM path.

    Args:
        prefetch_distances: The bytes between a line that is read and the one that is prefetched, by the rows of a pass
            of the GEMV path, from one on; a pass has at most as many rows.
        row_thresholds: The row thresholds if the GEMM path has register tiles.
        tile_row_thresholds: The row thresholds if it has matrix tiles, which take 16 rows and must be configured.
        far_distances: The distances of additional prefetches into the L2 cache, by the rows of a pass; 0: none.
        streamed_locality: The locality of prefetches of weights that are larger than the caches, as in `k.prefetch`.
        prefetches_bytes: Whether a single row prefetches lines of 8 bits, which hardware prefetchers may follow better.
        turns: For some encodings, by the rows of a pass: the blocks of a strip that are read before as many of the next
            strip, 1 or those of a unit; 0: strips are read one after the other.
    """

    prefetch_distances: tuple[int, ...]
    row_thresholds: Mapping[int, int]
    tile_row_thresholds: Mapping[int, int] = dict.fromkeys(_BITS, 64)
    far_distances: tuple[int, ...] = (0, 0, 0, 0)
    streamed_locality: int = ONCE
    prefetches_bytes: bool = False
    turns: Mapping[str, tuple[int, ...]] = MappingProxyType({})


_FAR = (4096,) * 4
_DEFAULTS = {
    # docs/log/2026-11-23-avx512.md (Ice Lake)
    True: QuantizedTuning(_FAR, dict.fromkeys(_BITS, 4)),
    # a pass shares unpacking, signs and scales
    False: QuantizedTuning(_FAR, dict.fromkeys(_BITS, 8)),
}
"""By whether a product of bytes is one instruction."""
_INTEL_SERVERS = (
    "skylake-avx512", "cascadelake", "cooperlake", "icelake-server", "sapphirerapids",
)  # fmt: skip
_FAMILIES = {
    # docs/log/2026-11-28-granite-rapids.md: `prefetchnta` bypasses the L2 cache in its design, which is that of all
    # since Skylake; thresholds are the defaults, as nothing else was measured on them
    **{
        (name, one): tuning._replace(
            prefetch_distances=(1024,) * 4, far_distances=_FAR, streamed_locality=KEPT
        )
        for name in _INTEL_SERVERS
        for one, tuning in _DEFAULTS.items()
    },
    # docs/log/2026-11-28-zen4.md: the L2 prefetcher follows only a rising stream of misses, which far prefetches break.
    # docs/log/2026-11-30-few-rows-zen4.md: with more arithmetic it falls behind; registers have the sums of six rows
    ("znver4", True): QuantizedTuning(
        (320, 320, 2048, 2048, 4096, 4096),
        {2: 64, 3: 42, 4: 64, 5: 64, 6: 64, 8: 64},
        far_distances=(0, 0, 8192, 8192, 16384, 16384),
    ),
    # docs/log/2026-11-29-drafts-zen5.md: the more a block computes, the farther ahead lines must be asked for
    ("znver5", True): QuantizedTuning((8192,) * 4, {2: 64, 3: 42, 4: 64, 5: 64, 6: 64, 8: 64}),
    # docs/log/2026-11-30-k-formats-zen3.md
    ("znver3", False): QuantizedTuning(_FAR, {2: 32, 3: 10, 4: 12, 5: 13, 6: 9, 8: 20}),
    ("znver4", False): QuantizedTuning(_FAR, {2: 16, 3: 4, 4: 12, 5: 10, 6: 9, 8: 9}),
    # docs/log/2026-11-28-granite-rapids.md: prefetches that bypass the L2 cache reach two fifths of the bandwidth; one
    # stream of a core reaches less of it than two
    ("sapphirerapids", True): QuantizedTuning(
        (1024,) * 4,
        {2: 64, 3: 12, 4: 16, 5: 12, 6: 12, 8: 24},
        {2: 64, 3: 24, 4: 32, 5: 24, 6: 40, 8: 24},
        far_distances=_FAR,
        streamed_locality=KEPT,
        turns={
            **dict.fromkeys(("Q4_0", "Q8_0", "Q6_K", "IQ4_NL"), (1, 1, 1, 1)),
            **dict.fromkeys(("Q4_K", "Q5_K", "Q2_K", "Q3_K"), (8, 0, 0, 0)),
        },
        prefetches_bytes=True,
    ),
}
"""By LLVM's name of the processor, and whether a product of bytes is one instruction. Processors with matrix tiles have
the name of Sapphire Rapids, whatever model a virtual machine reports (`max.kernel.targets.cpu`)."""


def tuning_of(target: k.Target) -> QuantizedTuning:
    """The parameters for a target."""
    one = bool(target.dot_i8_lanes(target.width(k.f32)))
    return _FAMILIES.get((getattr(target, "cpu", ""), one), _DEFAULTS[one])
