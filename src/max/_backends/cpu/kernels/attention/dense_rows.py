"""The steps of a task of dense attention: scores, masks, softmax and values of its rows, block of keys by block.

`attend_in_place` reads keys and values in place; `attend_packed` packs them, block by block, and multiplies by register
or matrix tiles. In: a `Task` and the `Plan` of its call. Out: the maxima, totals and sums of its rows, in `Scratch`.
Budgets are in `kernels.attention.dense_attention`.
"""

from __future__ import annotations

from typing import Any

from max import kernel as k
from max._backends.cpu.kernels.attention import amx_attention
from max._backends.cpu.kernels.attention.dense_plan import (
    KeyBlock,
    Plan,
    Scratch,
    Sweep,
    Task,
)
from max._backends.cpu.kernels.attention.online_softmax import (
    NEGATIVE_INFINITY,
    RowState,
    add_weights,
    lane_maxima,
    maximum,
    softmax_weight,
    state_from,
)
from max._backends.cpu.kernels.tiles import amx_tiles
from max._backends.cpu.kernels.tiles.micro_kernels import dot_rows, multiply_columns, multiply_tile
from max._backends.cpu.kernels.tiles.packing import pack_columns, pack_rows
from max._backends.cpu.kernels.tiles.tiling import Matrix


@k.inline
def rounded_to(v: k.Value, dtype: k.ScalarType | None) -> Any:
    """An f32 vector rounded to a dtype; None: as it is."""
    if dtype is not None:
        v = k.cast(k.cast(v, dtype), k.f32)
    return v


@k.inline
def masked_maxima(
    scores: k.View, row: k.Value, last: k.Value, keys: KeyBlock, rows: int, p: Plan
) -> Any:
    """The greatest scores of one row or of four, after masks; scores behind the last key become -inf.

    Args:
        scores: The scores; with masks or roundings they are scaled, rounded and masked in place.
        row: The first row.
        last: The last row of the operands; rows past it read its masks.
        keys: The block of keys.
        rows: Rows, 1 or 4.
        p: The plan.
    """
    t = p.plain
    largest = k.tile(k.f32, (rows,), width=t.width, fill=NEGATIVE_INFINITY)
    for j, tail in k.vectors(keys.count, t.width):
        for i in k.static_range(rows):
            score = scores.load(i * p.keys + j, width=t.width)
            if p.rewrites_scores:
                # rounds as the graph would if it stored the scaled scores
                score = rounded_to(score * p.scale, p.score_dtypes[0])
            for mask, fill, dtype in zip(keys.masks, p.fills, p.score_dtypes[1:], strict=True):
                group = mask.shape[0]
                # rows go by fours: those past the last one would read masks outside their tensor
                r = k.min(row + i, last)
                # [width] of [group, queries, keys]
                v = mask.load(r % group, r // group, keys.first + j, width=t.width, mask=tail)
                if fill is None:
                    score = score + k.cast(v, k.f32)
                else:
                    score = k.select(v, score, k.splat(k.f32(fill), t.width))
                score = rounded_to(score, dtype)
            if tail is not None:
                score = k.select(tail, score, NEGATIVE_INFINITY)
            # without masks the scores in memory are those already, except behind the last key
            if p.rewrites_scores or tail is not None:
                scores.store(i * p.keys + j, value=score)
            largest[i] = maximum(score, largest[i])
    return lane_maxima(largest, rows, t.width)


@k.inline
def softmax_rows(
    scores: k.View, weights: k.View, state: RowState, row: k.Value, last: k.Value, keys: KeyBlock, rows: int,
    p: Plan,
) -> None:  # fmt: skip
    """Computes the weights of one row or of four from their scores.

    Args:
        scores: The scores of the first row on, flat.
        weights: Where the weights go; may be where the scores are.
        state: The rows' state.
        row: The first row.
        last: The last row of the operands.
        keys: The block of keys.
        rows: Rows, 1 or 4.
        p: The plan.
    """
    largest = masked_maxima(scores, row, last, keys, rows, p)
    count = keys.count
    add_weights(Matrix(scores, p.keys), weights, largest, count, state, p.scaling, rows, p.plain)


@k.inline
def rounded_weights(
    scores: k.View, weights: k.View, state: RowState, row: k.Value, last: k.Value, keys: KeyBlock, rows: int,
    sweep: Sweep, p: Plan,
) -> None:  # fmt: skip
    """Computes the weights of one row or of four as the graph's probabilities: divided by their total, and rounded.

    Arguments are those of `softmax_rows`, and the sweep. The first sweep computes maxima and totals, which the last one
    reads.
    """
    t, scaling, count = p.plain, p.scaling, keys.count
    if sweep.first:
        # a new maximum has no sums to rescale
        totals = RowState(state.maxima, state.totals, state.sums, state.stride, 0)
        softmax_rows(scores, scores, totals, row, last, keys, rows, p)
    else:
        masked_maxima(scores, row, last, keys, rows, p)
        for i in k.static_range(rows):
            # a row whose keys are all masked: `-inf - -inf` would be NaN
            top = k.select(state.maxima[i] > NEGATIVE_INFINITY, state.maxima[i], 0.0)
            if not scaling.overflows:
                top = top * scaling.factor
            # maxima and totals are final after the first sweep
            for j in range(0, count, t.width):
                score = scores.load(i * p.keys + j, width=t.width)
                scores.store(i * p.keys + j, value=softmax_weight(score, top, scaling, t.width))
    if sweep.last:
        for i in k.static_range(rows):
            # the graph divides before it rounds
            inverse = 1 / state.totals[i]
            for j in range(0, count, t.width):
                weight = scores.load(i * p.keys + j, width=t.width) * inverse
                weights.store(i * p.keys + j, value=rounded_to(weight, p.weight_dtype))


@k.inline
def score_rows(scores: k.View, queries: k.View, keys: k.View, rows: int, p: Plan) -> None:
    """`scores[row, key] = queries[row] · keys[key]` with four keys, or four vectors of keys, read in place."""
    t = p.plain
    c = Matrix(scores, p.keys)
    if p.columns:
        multiply_columns(c, queries, keys, rows, t.width)
    else:
        dot_rows(c, queries, keys, rows, t, unroll=2 if rows == 1 else 1)


@k.inline
def scores_in_place(scores: k.View, queries: k.View, keys: k.View, rows: k.Value, p: Plan) -> None:
    """`scores[row, key] = queries[row] · keys[key]` of a block of keys, read in place."""
    t = p.plain
    count = keys.shape[1] if p.columns else keys.shape[0]
    # columns: four vectors of keys; rows: four dot products at once
    for j in range(0, count, 4 * t.width if p.columns else 4):
        block = keys[:, j:] if p.columns else keys[j:]
        i = k.i64(0)
        while i + t.gemv_rows <= rows:
            score_rows(scores[i * p.keys + j :], queries[i:], block, t.gemv_rows, p)
            i += t.gemv_rows
        while i < rows:
            score_rows(scores[i * p.keys + j :], queries[i:], block, 1, p)
            i += 1


@k.inline
def add_values_in_place(
    sums: k.View, weights: k.View, values: k.View, rows: k.Value, p: Plan
) -> None:
    """`sums[row] += Σ weights[row, key] · values[key]` of a block of values, read in place."""
    t = p.plain
    left = weights.reshape(-1, p.keys)[:, : values.shape[0]]  # [rows, keys]
    for column in k.static_range(0, p.stride, 4 * t.width):
        strip = values[:, column : min(column + 4 * t.width, values.shape[1])]
        i = k.i64(0)
        while i + t.gemv_rows <= rows:
            c = Matrix(sums[i * p.stride + column :], p.stride)
            multiply_columns(c, left[i:], strip, t.gemv_rows, t.width, accumulate=True)
            i += t.gemv_rows
        while i < rows:
            c = Matrix(sums[i * p.stride + column :], p.stride)
            multiply_columns(c, left[i:], strip, 1, t.width, accumulate=True)
            i += 1


@k.inline
def copy_queries(target: k.View, task: Task, p: Plan) -> None:
    """Copies the task's rows of queries side by side, times the query factor."""
    group, width = task.q.shape[0], p.plain.width
    for i in range(task.rows):
        row = task.first + i
        for j, tail in k.vectors(task.q.shape[2], width):
            # the rows of a task are (query, head) pairs, the head changing fastest
            query = task.q.load(row % group, row // group, j, width=width, mask=tail)
            target.store(i, j, value=k.cast(query, k.f32) * p.query_factor, mask=tail)


@k.inline
def attend_in_place(task: Task, memory: Scratch, p: Plan) -> None:
    """Attends with the rows of a task to its keys, read in place."""
    t, state = p.plain, memory.state
    copy_queries(memory.queries, task, p)
    for i in range(task.rows):
        state.maxima[i] = NEGATIVE_INFINITY
        state.totals[i] = 0
        for j in range(0, p.stride, t.width):
            state.sums.store(i * p.stride + j, value=k.splat(k.f32(0), t.width))
    if p.weight_dtype is None:
        sweep_in_place(task, memory, Sweep(True, True), p)
    else:
        sweeps = sweeps_of(task, p)
        for sweep in range(sweeps):
            sweep_in_place(task, memory, Sweep(sweep == 0, sweep == sweeps - 1), p)


@k.inline
def sweeps_of(task: Task, p: Plan) -> Any:
    """How often a task with rounded weights reads its keys: twice if their scores do not fit into scratch memory."""
    # a single block finds its totals and adds its values in one sweep
    return k.select(task.end - task.begin > p.keys, k.i64(2), k.i64(1))


@k.inline
def sweep_in_place(task: Task, memory: Scratch, sweep: Sweep, p: Plan) -> None:
    """One pass of the rows of a task over its keys, read in place."""
    state = memory.state
    # the last row of all tasks: rows of a tile past the task still have masks
    last = task.q.shape[0] * task.q.shape[1] - 1
    key = k.i64(task.begin)
    while key < task.end:
        count = k.min(task.end - key, p.keys)
        block = task.keys[:, key : key + count] if p.columns else task.keys[key : key + count]
        scores_in_place(memory.scores, memory.queries, block, task.rows, p)
        i = k.i64(0)
        for rows in k.unroll((4, 1)):
            while i + rows <= task.rows:
                scores, row = memory.scores[i * p.keys :], task.first + i
                row_state, part = state_from(state, i), KeyBlock(key, count, task.masks)
                if p.weight_dtype is None:
                    softmax_rows(scores, scores, row_state, row, last, part, rows, p)
                else:
                    rounded_weights(scores, scores, row_state, row, last, part, rows, sweep, p)
                i += rows
        if sweep.last:
            values = task.values[key : key + count]
            add_values_in_place(state.sums, memory.scores, values, task.rows, p)
        key += count


@k.inline
def pack_queries(task: Task, memory: Scratch, p: Plan) -> None:
    """Packs rows of queries, tile by tile; where they are not rows of one view they are first copied side by side."""
    t, left = p.plain, p.left
    one_view = task.q.shape[0] == 1 and p.query_factor == 1
    if not one_view:
        copy_queries(memory.unpacked, task, p)
    end = task.first + task.rows
    source = task.q[0, task.first : end] if one_view else memory.unpacked[: task.rows]
    if p.matrix_tiles:
        amx_attention.copy_rows_padded(memory.packed.view(k.bf16), 2 * p.depth, source)
    for tile in range(0 if p.matrix_tiles else k.ceildiv(task.rows, t.height)):
        for r in k.static_range(0, t.height, t.width):
            # a vector of rows behind the task is not packed: its results are never read
            if r == 0 or tile * t.height + r < task.rows:
                target = memory.packed[tile * t.height * p.depth + r :]
                rows = source[tile * t.height + r :]
                pack_rows(target, t.height, rows, min(t.width, t.height - r), left)


@k.inline
def pack_keys(panels: k.View, keys: k.View, p: Plan) -> None:
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
def pack_values(panels: k.View, values: k.View, p: Plan) -> None:
    """Packs a block of values into panels of two vectors' width, one after the other."""
    # lanes of pairs: two keys share a lane
    lanes = p.keys // p.right.pair
    for column in range(0, values.shape[1], 2 * p.plain.width):
        panel = panels[column * lanes :]
        pack_columns(panel, values[:, column:], 2, p.right)
        if p.matrix_tiles:
            # matrix tiles read whole tiles along k, and 0 times a NaN in stale memory is NaN
            amx_tiles.zero_panel_tail(panel, values.shape[0])


@k.inline
def prefetch_share(views: Any, slot: k.Value, slots: k.Value, p: Plan) -> None:
    """Prefetches share `slot` of `slots` of the first rows of each view."""
    for x in k.unroll(views):
        rows = k.min(x.shape[0], p.keys)
        # the panels of all tiles share the prefetches
        share = k.ceildiv(rows, slots)
        for row in range(k.min(slot * share, rows), k.min((slot + 1) * share, rows)):
            # one a cache line, 64 bytes
            for j in range(0, k.min(x.shape[1], p.keys), 512 // x.dtype.bits):
                x.prefetch(row, j)


@k.inline
def multiply_keys(
    task: Task,
    memory: Scratch,
    tile: k.Value,
    tiles: k.Value,
    key: k.Value,
    count: k.Integer,
    ahead: Any,
    p: Plan,
) -> None:
    """The scores of a row tile and a block of packed keys. Meanwhile the next block, or the views of `ahead`, are
    prefetched.
    """
    t = p.plain
    rows = memory.packed[tile * t.height * p.depth :]
    for j in range(0, count, 2 * t.width):
        panel = memory.key_panels[j * p.depth :]
        slots = tiles * k.ceildiv(count, 2 * t.width)
        slot = tile * (slots // tiles) + j // (2 * t.width)
        if key + count >= task.end:
            prefetch_share(ahead, slot, slots, p)
        else:
            after = key + count
            keys = task.keys[:, after:] if p.columns else task.keys[after:]
            prefetch_share((keys, task.values[after:]), slot, slots, p)
        c = Matrix(memory.scores[j:], p.keys)  # [height, keys]
        if p.matrix_tiles:
            amx_attention.multiply_tile_amx(
                memory.tiles, c, Matrix(rows.view(k.bf16), 2 * p.depth), panel, p.depth // 16, True
            )
        else:
            lanes = k.ceildiv(task.q.shape[2], p.left.pair)
            right = Matrix(panel, 2 * t.width)
            multiply_tile(c, Matrix(rows, 1, t.height), right, lanes, True, p.left)


@k.inline
def multiply_values(
    memory: Scratch, sums: k.View, width: k.Integer, count: k.Value, first: bool, p: Plan
) -> None:
    """Adds the products of the weights of a row tile with a block of packed values to the sums.

    Args:
        memory: Scratch memory.
        sums: The sums of the row tile.
        width: The size of a value.
        count: Keys of the block.
        first: Whether this is the first block, which sets the sums.
        p: The plan.
    """
    t, right = p.plain, p.right
    value_lanes = p.keys // right.pair
    # weights as pairs of bf16 in lanes of 32 bits
    lanes = memory.rounded_weights.view(k.i32) if right.pair == 2 else memory.scores
    size = k.ceildiv(count, right.pair)
    if p.matrix_tiles:
        # weights are 0 up to a multiple of 16 keys, tiles take 32
        amx_attention.zero_weights_tail(memory.rounded_weights, p.keys, count)
    for column in range(0, width, 2 * t.width):
        panel = memory.value_panels[column * value_lanes :]
        c = Matrix(sums[column:], p.stride)
        if p.matrix_tiles:
            steps = k.ceildiv(count, amx_tiles.DEPTH)
            left = Matrix(memory.rounded_weights, p.keys)
            amx_attention.multiply_tile_amx(memory.tiles, c, left, panel, steps, first)
        else:
            left = Matrix(lanes, value_lanes)
            multiply_tile(c, left, Matrix(panel, 2 * t.width), size, first, right)


@k.inline
def attend_packed(task: Task, memory: Scratch, ahead: Any, p: Plan) -> None:
    """Attends with the rows of a task to its keys, which are packed, block by block.

    Cache budget: packed keys and values of a block (`BLOCK_ELEMENTS`) stay in the L2 cache, the scores of a row tile in
    the L1 cache.

    Args:
        task: The task.
        memory: Scratch memory.
        ahead: Views `[rows, size]` that the worker's next task reads first, prefetched during the last block.
        p: The plan.
    """
    state = memory.state
    pack_queries(task, memory, p)
    # padding rows of the last tile have a state too, as the softmax takes four rows
    for i in range(0, k.ceildiv(task.rows, p.plain.height) * p.state_rows, 4):
        state.maxima.store(i, value=k.splat(k.f32(NEGATIVE_INFINITY), 4))
        state.totals.store(i, value=k.splat(k.f32(0), 4))
    if p.weight_dtype is None:
        sweep_packed(task, memory, ahead, Sweep(True, True), p)
    else:
        sweeps = sweeps_of(task, p)
        for sweep in range(sweeps):
            sweep_packed(task, memory, ahead, Sweep(sweep == 0, sweep == sweeps - 1), p)


@k.inline
def sweep_packed(task: Task, memory: Scratch, ahead: Any, sweep: Sweep, p: Plan) -> None:
    """One pass of the packed rows of a task over its keys; arguments as of `attend_packed`."""
    t, state = p.plain, memory.state
    last = task.q.shape[0] * task.q.shape[1] - 1
    tiles = k.ceildiv(task.rows, t.height)
    key = k.i64(task.begin)
    while key < task.end:
        count = k.min(task.end - key, p.keys)
        keys = task.keys[:, key : key + count] if p.columns else task.keys[key : key + count]
        pack_keys(memory.key_panels, keys, p)
        if sweep.last:
            pack_values(memory.value_panels, task.values[key : key + count], p)
        for tile in range(tiles):
            top = tile * t.height
            multiply_keys(task, memory, tile, tiles, key, count, ahead, p)
            # a partial group of four reads padding rows, whose results are not stored
            for i in range(0, k.min(task.rows - top, t.height), 4):
                scores = memory.scores[i * p.keys :]
                weights = memory.rounded_weights[i * p.keys :] if p.right.pair == 2 else scores
                row_state = state_from(state, tile * p.state_rows + i)
                row, part = task.first + top + i, KeyBlock(key, count, task.masks)
                if p.weight_dtype is None:
                    softmax_rows(scores, weights, row_state, row, last, part, 4, p)
                else:
                    rounded_weights(scores, weights, row_state, row, last, part, 4, sweep, p)
            # the first sweep of two finds maxima and totals only
            if sweep.last:
                sums = state.sums[tile * p.state_rows * p.stride :]
                multiply_values(memory, sums, task.values.shape[1], count, key == task.begin, p)
        key += count
