"""Online softmax over blocks of keys, in f32, shared by the kernels of attention.

A row keeps the maximum of its scores so far, the total of its weights relative to that maximum, and the weighted sum of
values. A new maximum rescales total and sums; `factor` is the scale of scores times log₂e::

    weight = 2 ** (factor · (score - maximum))
    total  = total · 2 ** (factor · (old maximum - maximum)) + Σ weight
    sums   = sums  · 2 ** (factor · (old maximum - maximum)) + Σ weight · value

Where tasks are split over the keys, each part has a state of its own, and `merge_parts` merges the states of a row.

Rows go through the softmax by fours where there are four, so that maxima and totals of four vectors come from shared
shuffles (`lane_maxima`, `kernels.tiles.transpose.lane_sums`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from max import kernel as k
from max._backends.cpu.kernels.tiles.tiling import Matrix, Tiling
from max._backends.cpu.kernels.tiles.transpose import HIGH_1, HIGH_2, LOW_1, LOW_2, lane_sums

MAX_SPLITS = 16
"""The maximum number of parts of a task that is split over the keys."""
SPLIT_ROWS = 64
"""The maximum number of rows of queries of a launch that splits tasks."""
SPLIT_KEYS = 128
"""The minimum number of keys of a part."""
LOG2_E = 1.4426950408889634
"""Weights are powers of 2, as `exp2` takes fewer instructions than `exp`: scores are multiplied by this."""
NEGATIVE_INFINITY = float("-inf")


class RowState(NamedTuple):
    """The state of rows between blocks of keys.

    Args:
        maxima: The maximum of each row's scores; -inf while it has seen none.
        totals: The total of each row's weights.
        sums: The weighted sums of values, flat.
        stride: Elements of `sums` from row to row.
        size: Sums of a row.
    """

    maxima: Any
    totals: Any
    sums: Any
    stride: int
    size: int


class Scaling(NamedTuple):
    """How scores become powers of 2.

    Args:
        factor: The factor of scores.
        overflows: Whether scores times the factor may overflow: then their distance to the maximum is multiplied.
    """

    factor: Any
    overflows: bool


@k.inline
def state_from(state: RowState, row: k.Integer) -> RowState:
    """The state from a row on."""
    return RowState(
        state.maxima[row:],
        state.totals[row:],
        state.sums[row * state.stride :],
        state.stride,
        state.size,
    )


def round_up(size: int, multiple: int) -> int:
    """The least multiple that is at least a size.

    Args:
        size: The size.
        multiple: The result is a multiple of this.
    """
    return -(-size // multiple) * multiple


@k.inline
def maximum(a: k.Value, b: k.Value) -> Any:
    """The greater of two values by lane, the second where one is NaN: one instruction instead of three of `k.max`."""
    return k.select(a > b, a, b)


@k.inline
def lane_maximum(v: k.SIMD) -> Any:
    """The greatest lane of a vector without NaN."""
    for half in k.unroll((8, 4, 2, 1)):
        if v.width > half:
            low = k.shuffle(v, None, tuple(range(half)))
            high = k.shuffle(v, None, tuple(range(half, 2 * half)))
            v = k.select(low > high, low, high)
    return v[0]


@k.inline
def lane_maxima(rows: k.View, count: int, width: int) -> Any:
    """The greatest lanes of one vector or of four without NaN, side by side.

    Args:
        rows: A tile of vectors.
        count: The number of vectors, 1 or 4.
        width: Their lanes.
    """
    if count == 1:
        return k.splat(lane_maximum(rows[0]), 1)
    ab = maximum(
        k.shuffle(rows[0], rows[1], LOW_1[width]), k.shuffle(rows[0], rows[1], HIGH_1[width])
    )
    cd = maximum(
        k.shuffle(rows[2], rows[3], LOW_1[width]), k.shuffle(rows[2], rows[3], HIGH_1[width])
    )
    all_four = maximum(k.shuffle(ab, cd, LOW_2[width]), k.shuffle(ab, cd, HIGH_2[width]))
    # lane i holds a maximum of row i % 4: halves combine lanes of equal rows
    for half in k.unroll((8, 4)):
        if all_four.width > half:
            low = k.shuffle(all_four, None, tuple(range(half)))
            all_four = maximum(low, k.shuffle(all_four, None, tuple(range(half, 2 * half))))
    return all_four


@k.inline
def add_totals(state: RowState, parts: k.View, change: k.Value, rows: int, width: int) -> None:
    """Adds the weights of a block to the totals of one row or of four, which are rescaled by `change`."""
    if rows == 1 and k.target().batch_invariant:
        # in the order of four rows
        one = lane_sums(parts[0], parts[0], parts[0], parts[0], width)[0]
        state.totals.store(0, value=state.totals.load(0, width=1) * change + one)
    elif rows == 1:
        one = k.reduce_add(parts[0])
        state.totals.store(0, value=state.totals.load(0, width=1) * change + one)
    else:
        four = lane_sums(parts[0], parts[1], parts[2], parts[3], width)
        state.totals.store(0, value=state.totals.load(0, width=4) * change + four)


@k.inline
def softmax_weight(score: k.Value, top: k.Value, scaling: Scaling, width: int) -> Any:
    """The weight of a vector of scores of a row.

    Args:
        score: The scores.
        top: The row's maximum; times the factor unless that overflows.
        scaling: How scores are scaled.
        width: Lanes of a vector.
    """
    if scaling.overflows:
        power = (score - top) * scaling.factor
    else:
        power = k.fma(score, k.splat(scaling.factor, width), k.splat(-top, width))
    return k.exp2(power)


@k.inline
def add_weights(
    scores: Matrix, weights: k.View, largest: k.Value, count: k.Integer, state: RowState, scaling: Scaling,
    rows: int, t: Tiling,
) -> None:  # fmt: skip
    """Computes the weights of one row or of four from their scores, and rescales totals and sums to new maxima.

    Args:
        scores: Scores of a block of keys; those up to the next multiple of the width are -inf.
        weights: Where the weights go, with the row stride of the scores; may be where the scores are.
        largest: The greatest score of each row.
        count: The number of keys.
        state: The rows' state. Nothing was summed while a maximum is -inf.
        scaling: How scores are scaled.
        rows: Rows, 1 or 4.
        t: The tiling.
    """
    before = state.maxima.load(0, width=rows)
    now = maximum(before, largest)
    # weights of rows that have seen no key are 0, or NaN where scores are NaN
    seen = now > NEGATIVE_INFINITY
    top = k.select(seen, now, 0.0)
    # 2 ** (factor * (old - new)); 1 where no key was seen, which would give NaN
    change = k.select(seen, k.exp2((before - top) * scaling.factor), 1.0)
    if not scaling.overflows:
        top = top * scaling.factor
    parts = k.tile(k.f32, (rows,), width=t.width, fill=0)
    for j in range(0, count, t.width):
        for i in k.static_range(rows):
            score = scores.elements.load(i * scores.row + j, width=t.width)
            weight = softmax_weight(score, top[i], scaling, t.width)
            weights.store(i * scores.row + j, value=weight)
            parts[i] = parts[i] + weight
    state.maxima.store(0, value=now)
    add_totals(state, parts, change, rows, t.width)
    # without a new maximum the sums keep their scale
    if k.any((change != 1.0) & (before > NEGATIVE_INFINITY)):
        for i in k.static_range(rows):
            for j in range(0, state.size, t.width):
                element = i * state.stride + j
                scaled = state.sums.load(element, width=t.width) * change[i]
                state.sums.store(element, value=scaled)


@k.inline
def merge_parts(
    out: k.View,
    parts: k.View,
    splits: k.Integer,
    factor: k.Value,
    empty: float,
    width: int,
    nan_is_zero: bool = False,
) -> None:
    """One row of results from the parts `[splits, head_dim + 2]`: sums, maximum and total of each.

    Args:
        out: The row `[head_dim]`.
        parts: The parts.
        splits: The number of parts.
        factor: The factor of maxima.
        empty: What a row is multiplied by whose weights are all 0.
        width: Lanes of a vector.
        nan_is_zero: Whether a row whose total is NaN is 0.
    """
    head_dim = out.shape[0]
    largest = k.f32(NEGATIVE_INFINITY)
    for s in range(splits):
        largest = k.max(largest, parts[s, head_dim])
    total = k.f32(0)
    for s in range(splits):
        # a part that saw no key has maximum -inf: its distance to a maximum of -inf is NaN
        if parts[s, head_dim + 1] != 0:
            total += parts[s, head_dim + 1] * k.exp2((parts[s, head_dim] - largest) * factor)
    scale = 1 / total if total != 0 else k.f32(empty)
    for j, mask in k.vectors(head_dim, width):
        v = k.splat(k.f32(0), width)
        for s in range(splits):
            if parts[s, head_dim + 1] != 0:
                weight = k.exp2((parts[s, head_dim] - largest) * factor) * scale
                v = v + parts.load(s, j, width=width, mask=mask) * weight
        # 0 where no key was seen, or NaN where the caller asks for it
        if total == 0:
            v = v * scale
        if nan_is_zero:
            v = k.select(k.splat(total, width) > 0, v, k.splat(k.f32(0), width))
        out.store(j, value=v, mask=mask)
