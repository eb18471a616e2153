"""What a task of dense attention does with its rows of queries: the pieces of `max._kernel_library.attention.dense_attention`.

`few_rows` reads keys and values in place; `many_rows` packs them, block by block, and multiplies by register tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from max import kernel as k
from max._kernel_library.attention import amx_attention
from max._kernel_library.attention.online_softmax import (
    LOG2_E,
    NEGATIVE_INFINITY,
    add_weights,
    greater,
    greatest_lanes,
    padded,
)
from max._kernel_library.tiles import amx_tiles
from max._kernel_library.tiles.micro_kernels import dot_rows, multiply_columns, multiply_tile
from max._kernel_library.tiles.packing import pack_columns, pack_rows
from max._kernel_library.tiles.tiling import Matrix, Tiling, tiling

MOST_KEYS = 512
"""Keys of a block, but for large heads."""
BLOCK_ELEMENTS = 1 << 17
"""Most elements of the keys and values of a block, packed: they stay in the L2 cache."""
FEW_ROWS = 4
"""Up to so many times the rows that are multiplied at once a task reads keys and values in place."""


@dataclass(frozen=True)
class Plan:
    """What is known of a call at compile time.

    Args:
        plain: Tiling of products in f32.
        left: Tiling of queries and keys.
        right: Tiling of weights and values.
        few: Up to so many rows keys and values are read in place.
        depth: Lanes of a packed query or key.
        stride: Elements from row to row of the sums.
        keys: Keys of a block.
        places: Places that a row tile's maxima take.
        scale: What scores are multiplied by where there are masks.
        factor: What they are multiplied by, in the end, as powers of 2.
        query_factor: What queries are multiplied by: scores that are scaled later must not turn around.
        fills: For each mask None, where it is added, or what stands where it is false.
        columns: Whether keys are `[size, keys]`.
        by_tiles: Whether many rows are multiplied in matrix tiles.
    """

    plain: Tiling
    left: Tiling
    right: Tiling
    few: int
    depth: int
    stride: int
    keys: int
    places: int
    scale: float
    factor: float
    query_factor: float
    fills: tuple[float | None, ...]
    columns: bool
    by_tiles: bool


def plan(
    target: k.Target,
    dtypes: tuple[k.ScalarType, ...],
    sizes: tuple[int, int],
    scale: float,
    fills: tuple[float | None, ...],
    columns: bool,
) -> Plan:
    """The plan for a call.

    Args:
        target: The machine.
        dtypes: Of queries, keys, values and the result.
        sizes: Of a query, of a value.
        scale: What scores are multiplied by.
        fills: For each mask None, where it is added, or what stands where it is false.
        columns: Whether keys are `[size, keys]`.
    """
    size, width = sizes
    t = tiling(target, k.f32, k.f32)
    # pairs of bf16, else f32; weights are rounded where the graph's probabilities are, which have the dtype of the result
    left, right = (
        pairs if (pairs := tiling(target, *both)).pair == 2 else t
        for both in ((dtypes[0], dtypes[1]), (dtypes[3], dtypes[2]))
    )
    by_tiles = amx_tiles.takes_tiles(target, left, right)
    if by_tiles:
        t, left, right = (amx_tiles.with_tile_height(x) for x in (t, left, right))
    late = not fills and scale > 0
    return Plan(
        plain=t,
        left=left,
        right=right,
        few=0 if target.batch_invariant else FEW_ROWS * t.gemv_rows,
        depth=padded(size, left.step) // left.pair,
        stride=padded(width, 4 * t.width),
        keys=max(64, min(MOST_KEYS, BLOCK_ELEMENTS // (size + width) // 64 * 64)),
        places=padded(t.height, 4),
        scale=scale,
        factor=scale * LOG2_E if late else LOG2_E,
        query_factor=1.0 if fills or late else scale,
        fills=fills,
        columns=columns,
        by_tiles=by_tiles,
    )


@k.inline
def greatest_scores(
    scores: Any, row: Any, last: Any, key: Any, count: Any, masks: Any, rows: int, p: Plan
) -> Any:
    """The greatest scores of one row or of four, after masks; lanes after the last key become -inf.

    Args:
        scores: Where the scores are; where there are masks they are scaled, and kept.
        row: The first row: a query's heads of the group, then the next query's.
        last: The last row that there is.
        key: The first key.
        count: How many keys.
        masks: Views `[group, queries, keys]`.
        rows: How many rows.
        p: The plan.
    """
    t = p.plain
    largest = k.tile(k.f32, (rows,), width=t.width, fill=NEGATIVE_INFINITY)
    for j, tail in k.vectors(count, t.width):
        for i in k.static_range(rows):
            score = scores.load(i * p.keys + j, width=t.width)
            if p.fills:
                score = score * p.scale
            for mask, kind in zip(masks, p.fills, strict=True):
                group = mask.shape[0]
                r = k.min(row + i, last)
                v = mask.load(r % group, r // group, key + j, width=t.width, mask=tail)
                if kind is None:
                    score = score + k.cast(v, k.f32)
                else:
                    score = k.select(v, score, k.splat(k.f32(kind), t.width))
            if tail is not None:
                score = k.select(tail, score, NEGATIVE_INFINITY)
            if p.fills or tail is not None:
                scores.store(i * p.keys + j, value=score)
            largest[i] = greater(score, largest[i])
    return greatest_lanes(largest, rows, t.width)


@k.inline
def some_scores(scores: Any, queries: Any, keys: Any, rows: int, p: Plan) -> None:
    """`scores[row, key] = queries[row] · keys[key]` for so many rows, with four keys or four vectors of keys read in place."""
    t = p.plain
    if p.columns:
        multiply_columns(Matrix(scores, p.keys), queries, keys, rows, t.width)
    else:
        dot_rows(Matrix(scores, p.keys), queries, keys, rows, t, unroll=2 if rows == 1 else 1)


@k.inline
def few_scores(scores: Any, queries: Any, keys: Any, rows: Any, p: Plan) -> None:
    """`scores[row, key] = queries[row] · keys[key]` for a few rows, with keys read in place."""
    t = p.plain
    count = keys.shape[1] if p.columns else keys.shape[0]
    for j in range(0, count, 4 * t.width if p.columns else 4):
        block = keys[:, j:] if p.columns else keys[j:]
        i = k.i64(0)
        while i + t.gemv_rows <= rows:
            some_scores(scores[i * p.keys + j :], queries[i:], block, t.gemv_rows, p)
            i += t.gemv_rows
        while i < rows:
            some_scores(scores[i * p.keys + j :], queries[i:], block, 1, p)
            i += 1


@k.inline
def few_values(sums: Any, weights: Any, values: Any, rows: Any, p: Plan) -> None:
    """`sums[row] += Σ weights[row, key] · values[key]` for a few rows, with values read in place."""
    t = p.plain
    few = weights.reshape(-1, p.keys)[:, : values.shape[0]]
    for column in k.static_range(0, p.stride, 4 * t.width):
        strip = values[:, column : min(column + 4 * t.width, values.shape[1])]
        i = k.i64(0)
        while i + t.gemv_rows <= rows:
            target = sums[i * p.stride + column :]
            multiply_columns(
                Matrix(target, p.stride), few[i:], strip, t.gemv_rows, t.width, accumulate=True
            )
            i += t.gemv_rows
        while i < rows:
            target = sums[i * p.stride + column :]
            multiply_columns(Matrix(target, p.stride), few[i:], strip, 1, t.width, accumulate=True)
            i += 1


@k.inline
def few_weights(
    scores: Any,
    sums: Any,
    maxima: Any,
    totals: Any,
    row: Any,
    last: Any,
    key: Any,
    count: Any,
    masks: Any,
    size: int,
    rows: int,
    p: Plan,
) -> None:
    """Turns scores of one row or of four into weights."""
    largest = greatest_scores(scores, row, last, key, count, masks, rows, p)
    add_weights(
        scores,
        p.keys,
        largest,
        p.factor,
        bool(p.fills),
        count,
        maxima,
        totals,
        sums,
        p.stride,
        size,
        scores,
        rows,
        p.plain,
    )


@k.inline
def copy_queries(target: Any, q: Any, first: Any, rows: Any, p: Plan) -> None:
    """Copies rows of queries side by side: a query's heads of the group, then the next query's."""
    group, width = q.shape[0], p.plain.width
    for i in range(rows):
        row = first + i
        for j, tail in k.vectors(q.shape[2], width):
            v = k.cast(q.load(row % group, row // group, j, width=width, mask=tail), k.f32)
            target.store(i, j, value=v * p.query_factor, mask=tail)


@k.inline
def few_rows(
    sums: Any,
    maxima: Any,
    totals: Any,
    q: Any,
    keys: Any,
    values: Any,
    masks: Any,
    first: Any,
    rows: Any,
    begin: Any,
    end: Any,
    queries: Any,
    scores: Any,
    p: Plan,
) -> None:
    """Attends with a few rows to the keys from `begin` to `end`, read in place."""
    t = p.plain
    group, size = q.shape[0], values.shape[1]
    last = group * q.shape[1] - 1
    copy_queries(queries, q, first, rows, p)
    for i in range(rows):
        maxima[i] = NEGATIVE_INFINITY
        totals[i] = 0
        for j in range(0, p.stride, t.width):
            sums.store(i * p.stride + j, value=k.splat(k.f32(0), t.width))
    key = k.i64(begin)
    while key < end:
        count = k.min(end - key, p.keys)
        block = keys[:, key : key + count] if p.columns else keys[key : key + count]
        few_scores(scores, queries, block, rows, p)
        i = k.i64(0)
        for some in k.unroll((4, 1)):
            while i + some <= rows:
                few_weights(
                    scores[i * p.keys :], sums[i * p.stride :], maxima[i:], totals[i:], first + i,
                    last, key, count, masks, size, some, p,
                )  # fmt: skip
                i += some
        few_values(sums, scores, values[key : key + count], rows, p)
        key += count


@k.inline
def pack_queries(packed: Any, unpacked: Any, q: Any, first: Any, rows: Any, p: Plan) -> None:
    """Packs rows of queries, tile by tile; where they are not rows of one view they are put side by side first."""
    t, left = p.plain, p.left
    straight = q.shape[0] == 1 and p.query_factor == 1
    if not straight:
        copy_queries(unpacked, q, first, rows, p)
    source = q[0, first : first + rows] if straight else unpacked[:rows]
    if p.by_tiles:
        amx_attention.copy_rows(packed.view(k.bf16), 2 * p.depth, source)
    for tile in range(0 if p.by_tiles else k.ceildiv(rows, t.height)):
        for r in k.static_range(0, t.height, t.width):
            if r == 0 or tile * t.height + r < rows:
                target = packed[tile * t.height * p.depth + r :]
                here = source[tile * t.height + r :]
                pack_rows(target, t.height, here, min(t.width, t.height - r), left)


@k.inline
def pack_keys(panels: Any, keys: Any, p: Plan) -> None:
    """Packs a block of keys into panels of two vectors' width, one after the other."""
    t = p.left
    count = keys.shape[1] if p.columns else keys.shape[0]
    for j in range(0, count, 2 * t.width):
        panel = panels[j * p.depth :]
        if p.columns:
            pack_columns(panel, keys[:, j:], 2, t)
        else:
            for half in range(j, k.min(j + 2 * t.width, count), t.width):
                pack_rows(panel[half - j :], 2 * t.width, keys[half:], t.width, t)


@k.inline
def prefetch_share(views: Any, slot: Any, slots: Any, p: Plan) -> None:
    """Asks for one of so many parts of the first rows of each view."""
    for x in k.unroll(views):
        rows = k.min(x.shape[0], p.keys)
        share = k.ceildiv(rows, slots)
        for row in range(k.min(slot * share, rows), k.min((slot + 1) * share, rows)):
            for j in range(0, k.min(x.shape[1], p.keys), 512 // x.dtype.bits):
                x.prefetch(row, j)


@k.inline
def many_rows(
    sums: Any,
    maxima: Any,
    totals: Any,
    q: Any,
    keys: Any,
    values: Any,
    masks: Any,
    first: Any,
    rows: Any,
    begin: Any,
    end: Any,
    unpacked: Any,
    packed: Any,
    key_panels: Any,
    value_panels: Any,
    scores: Any,
    rounded: Any,
    ahead: Any,
    matrix_tiles: Any,
    p: Plan,
) -> None:
    """Attends with many rows to the keys from `begin` to `end`, which are packed, block by block.

    Meanwhile the next block is asked for; in the last one the views `[rows, size]` of `ahead`.
    """
    t, left, right = p.plain, p.left, p.right
    last = q.shape[0] * q.shape[1] - 1
    width = values.shape[1]
    key_lanes = k.ceildiv(q.shape[2], left.pair)
    value_lanes = p.keys // right.pair
    pack_queries(packed, unpacked, q, first, rows, p)
    tiles = k.ceildiv(rows, t.height)
    for i in range(0, tiles * p.places, 4):
        maxima.store(i, value=k.splat(k.f32(NEGATIVE_INFINITY), 4))
        totals.store(i, value=k.splat(k.f32(0), 4))
    key = k.i64(begin)
    while key < end:
        count = k.min(end - key, p.keys)
        pack_keys(key_panels, keys[:, key:end] if p.columns else keys[key : key + count], p)
        for column in range(0, width, 2 * t.width):
            panel = value_panels[column * value_lanes :]
            pack_columns(panel, values[key : key + count, column:], 2, right)
            if p.by_tiles:
                amx_tiles.zero_panel_tail(panel, count)
        for tile in range(tiles):
            top = tile * t.height
            above = sums[tile * p.places * p.stride :]
            for j in range(0, count, 2 * t.width):
                mine, panel = packed[top * p.depth :], key_panels[j * p.depth :]
                slots = tiles * k.ceildiv(count, 2 * t.width)
                slot = tile * (slots // tiles) + j // (2 * t.width)
                if key + count >= end:
                    prefetch_share(ahead, slot, slots, p)
                else:
                    here = key + count
                    others = keys[:, here:] if p.columns else keys[here:]
                    prefetch_share((others, values[here:]), slot, slots, p)
                if p.by_tiles:
                    rows_of_tile = mine.view(k.bf16)
                    steps = p.depth // 16
                    amx_attention.multiply_tile(
                        matrix_tiles, scores[j:], p.keys, rows_of_tile, 2 * p.depth, panel, steps, True
                    )  # fmt: skip
                else:
                    multiply_tile(
                        Matrix(scores[j:], p.keys),
                        Matrix(mine, 1, t.height),
                        Matrix(panel, 2 * t.width),
                        key_lanes,
                        True,
                        left,
                    )
            for i in range(0, k.min(rows - top, t.height), 4):
                mine = scores[i * p.keys :]
                weights = rounded[i * p.keys :] if right.pair == 2 else mine
                place = tile * p.places + i
                largest = greatest_scores(mine, first + top + i, last, key, count, masks, 4, p)
                add_weights(
                    mine,
                    p.keys,
                    largest,
                    p.factor,
                    bool(p.fills),
                    count,
                    maxima[place:],
                    totals[place:],
                    above[i * p.stride :],
                    p.stride,
                    width,
                    weights,
                    4,
                    t,
                )
            lanes = rounded.view(k.i32) if right.pair == 2 else scores
            size = k.ceildiv(count, right.pair)
            if p.by_tiles:
                amx_attention.end_weights(rounded, p.keys, count)
            for column in range(0, width, 2 * t.width):
                panel = value_panels[column * value_lanes :]
                target = above[column:]
                start = key == begin
                if p.by_tiles:
                    steps = k.ceildiv(count, amx_tiles.DEPTH)
                    amx_attention.multiply_tile(
                        matrix_tiles, target, p.stride, rounded, p.keys, panel, steps, start
                    )
                else:
                    multiply_tile(
                        Matrix(target, p.stride),
                        Matrix(lanes, value_lanes, 1),
                        Matrix(panel, 2 * t.width),
                        size,
                        start,
                        right,
                    )
        key += count
