"""Prefetches of a weight that is read from end to end, on processors whose hardware prefetchers do not keep up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from max import kernel as k
from max._backends.cpu.kernels.tiles.strips import CACHE_LINE, L1, L2

__all__ = ["BYTES", "CODED", "ELEMENTS", "StreamDistances", "prefetch_stream", "stream_distances"]

ELEMENTS, CODED, BYTES = "elements", "coded", "bytes"
"""Forms of panels: elements of 16 or 32 bits as they are, in a code without loss, 8-bit integers."""


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


def _all_forms(distances: StreamDistances) -> Mapping[str, StreamDistances]:
    return dict.fromkeys((ELEMENTS, CODED, BYTES), distances)


_DISTANCES: Mapping[str, Mapping[str, StreamDistances]] = {
    # docs/log/2026-11-28-granite-rapids.md
    "sapphirerapids": _all_forms(StreamDistances(1024, 4096)),
    # docs/log/2026-11-30-k-formats-zen3.md
    "znver3": _all_forms(StreamDistances(320, 1024, 3)),
    # docs/log/2026-11-30-few-rows-zen4.md: hardware prefetchers fall behind where a line is multiplied for long, and
    # lose the stream where prefetches come among reads that they would follow
    "znver4": {
        ELEMENTS: StreamDistances(2048, 8192, 8),
        CODED: StreamDistances(4096, 16384, 4),
        BYTES: StreamDistances(2048, 8192, 5),
    },
    # docs/log/2026-11-29-drafts-zen5.md: rows that share a weight are hidden behind its reads
    "znver5": _all_forms(StreamDistances(4096, 8192)),
}
"""By LLVM's name of the processor, and the form."""


def stream_distances(target: k.Target, rows: int, form: str) -> StreamDistances | None:
    """The distances of the prefetches of a pass of some rows over panels of a form; None: it has none."""
    forms = _DISTANCES.get(getattr(target, "cpu", ""))
    return None if forms is None or rows < forms[form].rows else forms[form]


@k.inline
def prefetch_stream(lines: k.View, size: int, rows: int, form: str) -> None:
    """Prefetches what lies behind `size` bytes that are read now; beyond the weight nothing happens.

    Args:
        lines: The bytes from the first one that is read.
        size: The number of bytes, whole cache lines.
        rows: The number of rows of the pass.
        form: The form of the panels.
    """
    distances = stream_distances(k.target(), rows, form)
    if distances is not None:
        for i in k.static_range(0, size, CACHE_LINE):
            lines.prefetch(distances.far + i, locality=L2)
            lines.prefetch(distances.near + i, locality=L1)
