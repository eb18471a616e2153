"""Softmax over blocks of keys as they come, in f32: shared by the kernels of attention.

A row keeps the maximum of its scores so far and the total of its weights relative to that; a new maximum rescales what was summed.
Where tasks are split over the keys, each part has sums, maximum and total of its own, and `merge_parts` makes one row of them.
"""

from __future__ import annotations

from typing import Any

from max import kernel as k
from max._kernel_library.tiles.tiling import Tiling
from max._kernel_library.tiles.transpose import HIGH_1, HIGH_2, LOW_1, LOW_2, lane_sums

MAX_SPLITS = 16
SPLIT_ROWS = 64
"""Splitting is for at most so many rows of queries."""
SPLIT_KEYS = 128
"""A part has at least so many keys."""
LOG2_E = 1.4426950408889634
NEGATIVE_INFINITY = float("-inf")


def padded(size: int, multiple: int) -> int:
    """The next multiple.

    Args:
        size: What is filled up.
        multiple: To a multiple of this.
    """
    return -(-size // multiple) * multiple


@k.inline
def greatest_lane(v: Any) -> Any:
    """The greatest lane of a vector without NaN, in fewer instructions than where it may have one."""
    for half in k.unroll((8, 4, 2, 1)):
        if v.width > half:
            low = k.shuffle(v, None, tuple(range(half)))
            high = k.shuffle(v, None, tuple(range(half, 2 * half)))
            v = k.select(low > high, low, high)
    return v[0]


@k.inline
def greater(a: Any, b: Any) -> Any:
    """The greater of two values, lane by lane; the second where one is not a number."""
    return k.select(a > b, a, b)


@k.inline
def greatest_lanes(rows: Any, count: int, width: int) -> Any:
    """The greatest lanes of one vector or of four without NaN, side by side.

    Args:
        rows: A tile of vectors.
        count: How many, 1 or 4.
        width: Their lanes.
    """
    if count == 1:
        return k.splat(greatest_lane(rows[0]), 1)
    ab = greater(
        k.shuffle(rows[0], rows[1], LOW_1[width]), k.shuffle(rows[0], rows[1], HIGH_1[width])
    )
    cd = greater(
        k.shuffle(rows[2], rows[3], LOW_1[width]), k.shuffle(rows[2], rows[3], HIGH_1[width])
    )
    all_four = greater(k.shuffle(ab, cd, LOW_2[width]), k.shuffle(ab, cd, HIGH_2[width]))
    for half in k.unroll((8, 4)):
        if all_four.width > half:
            low = k.shuffle(all_four, None, tuple(range(half)))
            all_four = greater(low, k.shuffle(all_four, None, tuple(range(half, 2 * half))))
    return all_four


@k.inline
def add_weights(
    scores: Any,
    stride: int,
    largest: Any,
    factor: Any,
    apart: bool,
    length: Any,
    maxima: Any,
    totals: Any,
    sums: Any,
    sums_stride: int,
    size: int,
    weights: Any,
    rows: int,
    t: Tiling,
) -> None:
    """Turns scores of one row or of four into weights, `2 ** (factor * (score - maximum))`, and brings their sums to new maxima.

    Args:
        scores: Scores of a block of keys.
        stride: Elements from row to row, of the weights too.
        largest: The greatest score of each row.
        factor: What scores are multiplied by.
        apart: Whether scores times the factor may overflow: their distance to the maximum is then multiplied.
        length: How many keys there are; the scores up to the next multiple of the width are -inf.
        maxima: The rows' maxima so far.
        totals: The totals of their weights so far.
        sums: Their sums so far; nothing was summed while the maximum is -inf.
        sums_stride: Elements from row to row.
        size: Sums of a row.
        weights: Where the weights go; may be where the scores are.
        rows: How many rows, 1 or 4.
        t: The tiling.
    """
    before = maxima.load(0, width=rows)
    now = greater(before, largest)
    # rows that see nothing so far: their weights are 0, or not a number where scores are not
    seen = now > NEGATIVE_INFINITY
    top = k.select(seen, now, 0.0)
    change = k.select(seen, k.exp2((before - top) * factor), 1.0)
    if not apart:
        top = top * factor
    parts = k.tile(k.f32, (rows,), width=t.width, fill=0)
    for j in range(0, length, t.width):
        for i in k.static_range(rows):
            score = scores.load(i * stride + j, width=t.width)
            if apart:
                power = (score - top[i]) * factor
            else:
                power = k.fma(score, k.splat(factor, t.width), k.splat(-top[i], t.width))
            weight = k.exp2(power)
            weights.store(i * stride + j, value=weight)
            parts[i] = parts[i] + weight
    maxima.store(0, value=now)
    if rows == 1 and k.target().batch_invariant:
        # in the order of four rows
        one = lane_sums(parts[0], parts[0], parts[0], parts[0], t.width)[0]
        totals.store(0, value=totals.load(0, width=1) * change + one)
    elif rows == 1:
        totals.store(0, value=totals.load(0, width=1) * change + k.reduce_add(parts[0]))
    else:
        four = lane_sums(parts[0], parts[1], parts[2], parts[3], t.width)
        totals.store(0, value=totals.load(0, width=4) * change + four)
    if k.any((change != 1.0) & (before > NEGATIVE_INFINITY)):
        for i in k.static_range(rows):
            for j in range(0, size, t.width):
                at = i * sums_stride + j
                sums.store(at, value=sums.load(at, width=t.width) * change[i])


@k.inline
def merge_parts(
    out: Any, parts: Any, splits: Any, head_dim: int, factor: Any, empty: float, width: int
) -> None:
    """One row of results from the parts `[splits, head_dim + 2]`: sums, maximum and total of each.

    Args:
        out: The row.
        parts: The parts.
        splits: How many there are.
        head_dim: The size of a row.
        factor: What maxima are multiplied by.
        empty: What a row is multiplied by whose weights are all 0.
        width: Lanes of a vector.
    """
    largest = k.f32(NEGATIVE_INFINITY)
    for s in range(splits):
        largest = k.max(largest, parts[s, head_dim])
    total = k.f32(0)
    for s in range(splits):
        if parts[s, head_dim + 1] != 0:
            total += parts[s, head_dim + 1] * k.exp2((parts[s, head_dim] - largest) * factor)
    scale = 1 / total if total != 0 else k.f32(empty)
    for j, mask in k.vectors(head_dim, width):
        v = k.splat(k.f32(0), width)
        for s in range(splits):
            if parts[s, head_dim + 1] != 0:
                weight = k.exp2((parts[s, head_dim] - largest) * factor) * scale
                v = v + parts.load(s, j, width=width, mask=mask) * weight
        if total == 0:
            v = v * scale
        out.store(j, value=v, mask=mask)
