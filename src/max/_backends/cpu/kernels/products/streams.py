"""Prefetches of a weight that is read from end to end, on processors whose hardware prefetchers do not keep up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from max import kernel as k
from max._backends.cpu.kernels.tiles.strips import CACHE_LINE, L1, L2

__all__ = ["StreamDistances", "prefetch_stream", "stream_distances"]


class StreamDistances(NamedTuple):
    """How far ahead a weight is prefetched.

    Args:
        near: The distance in bytes of prefetches into the L1 cache.
        far: The distance of those into the L2 cache.
        rows: The fewest rows of a pass that prefetches: with fewer ones, hardware prefetchers are faster alone.
    """

    near: int
    far: int
    rows: int = 1


_DISTANCES: Mapping[str, StreamDistances] = {
    # docs/log/2026-11-28-granite-rapids.md
    "sapphirerapids": StreamDistances(1024, 4096),
    # docs/log/2026-11-29-few-rows-zen4.md: hardware prefetchers fall behind where lines are multiplied by several rows
    "znver4": StreamDistances(2048, 8192, 5),
    # docs/log/2026-11-29-drafts-zen5.md: rows that share a weight are hidden behind its reads
    "znver5": StreamDistances(4096, 8192),
}
"""By LLVM's name of the processor."""


def stream_distances(target: k.Target, rows: int) -> StreamDistances | None:
    """The distances of the prefetches of a pass of some rows; None: it has none."""
    distances = _DISTANCES.get(getattr(target, "cpu", ""))
    return None if distances is None or rows < distances.rows else distances


@k.inline
def prefetch_stream(lines: k.View, size: int, rows: int) -> None:
    """Prefetches what lies behind `size` bytes that are read now; beyond the weight nothing happens.

    Args:
        lines: The bytes from the first one that is read.
        size: The number of bytes, whole cache lines.
        rows: The number of rows of the pass.
    """
    distances = stream_distances(k.target(), rows)
    if distances is not None:
        for i in k.static_range(0, size, CACHE_LINE):
            lines.prefetch(distances.far + i, locality=L2)
            lines.prefetch(distances.near + i, locality=L1)
