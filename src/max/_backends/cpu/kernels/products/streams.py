"""Prefetches of a weight that is read from end to end, on processors whose hardware prefetchers do not keep up."""

from __future__ import annotations

from max import kernel as k
from max._backends.cpu.kernels.tiles.strips import CACHE_LINE, L1, L2

__all__ = ["prefetch_stream", "stream_distances"]

_DISTANCES = {
    # docs/log/2026-11-28-granite-rapids.md
    "sapphirerapids": (1024, 4096),
    # docs/log/2026-11-29-drafts-zen5.md: rows that share a weight are hidden behind its reads
    "znver5": (4096, 8192),
}
"""By LLVM's name of the processor: the distances in bytes of prefetches into the L1 and into the L2 cache."""


def stream_distances(target: k.Target) -> tuple[int, int] | None:
    """The distances of prefetches into the L1 and into the L2 cache; None: hardware prefetchers are faster alone."""
    return _DISTANCES.get(getattr(target, "cpu", ""))


@k.inline
def prefetch_stream(lines: k.View, size: int) -> None:
    """Prefetches what lies behind `size` bytes that are read now; beyond the weight nothing happens.

    Args:
        lines: The bytes from the first one that is read.
        size: The number of bytes, whole cache lines.
    """
    distances = stream_distances(k.target())
    if distances is not None:
        for i in k.static_range(0, size, CACHE_LINE):
            lines.prefetch(distances[1] + i, locality=L2)
            lines.prefetch(distances[0] + i, locality=L1)
