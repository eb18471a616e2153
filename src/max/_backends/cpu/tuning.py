"""Numbers of the CPU: how much work is shared, and how row thresholds are measured.

To wake another worker and wait for it takes 1 to 15 µs, a barrier 0.1 to 0.3 µs.
"""

from __future__ import annotations

from max._backends.backend import Rate, Sharing, Tuning

__all__ = ["SHARING", "TUNING"]

REGION_CHUNK = 16384
"""The fewest elements of a region that a worker takes at a time."""
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
