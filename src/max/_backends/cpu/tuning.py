"""Numbers of the CPU: blocks of regions, how much work is shared, and how row thresholds are measured.

To wake another worker and wait for it takes 1 to 15 µs, a barrier 0.1 to 0.3 µs.
"""

from __future__ import annotations

from max._backends.backend import Rate, Sharing, Tuning

__all__ = ["SHARING", "TUNING"]

REGION_CHUNK = 16384
"""The fewest elements of a region that a worker takes at a time."""
BLOCK = 4096
"""Elements of the vectorized axis that one parallel chunk takes."""
TILE_ROWS, TILE_LANES = 16, 16
"""The tile in which a transposed argument is read: each of its cache lines is used whole while it is in the cache."""
TILE_LINE = 64
"""Bytes per row of a tile that is transposed in registers: one cache line, which is then written whole."""
LONG_ROW = 8 * BLOCK
"""The length above which several workers reduce a single row."""
SERIAL_ELEMENTS = 2048
"""Regions of at most this many elements run on one worker: waking the others costs more."""
CHUNKS = 8
"""The most chunks per worker: enough to balance the load if the system slows one worker down."""
SHARING = Sharing(
    rates={
        # one chunk, which is one worker's
        "region": Rate(REGION_CHUNK, 64),
        # products of 25 by 25
        "product": Rate(1 << 15, 1),
        # sorts, cumulative sums, pooling: their bytes say little about their time
        "other": Rate(1 << 8, 8),
    },
    most_work=1 << 16,  # about 5 µs
)
TUNING = Tuning(least_bytes=1 << 20, sample_bytes=48 << 20, most_rows=128)
