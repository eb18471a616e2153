"""The steps of a task of paged attention: load queries, then for each block of keys scores, softmax and values.

In: a `Task`, the `Plan` of its call, blocks of keys and values. Out: the maxima, totals and sums of its rows, in
    `Scratch`. `attend_block` has the order of the steps; budgets are in
    `kernels.attention.paged_attention`.
"""

from __future__ import annotations

from typing import Any

from max import kernel as k
from max._backends.cpu.kernels.attention import amx_attention
from max._backends.cpu.kernels.attention.online_softmax import (
    LOG2_E,
    NEGATIVE_INFINITY,
    RowState,
    Scaling,
    add_weights,
    lane_maxima,
    maximum,
    state_from,
)
from max._backends.cpu.kernels.attention.paged_cache import TREE_ROWS
from max._backends.cpu.kernels.attention.paged_plan import (
    AHEAD,
    KEYS,
    ROW_THRESHOLD,
    Plan,
    Scores,
    Scratch,
    Task,
    Trees,
    first_key,
    last_key,
    of_height,
    scales_before_softmax,
)
from max._backends.cpu.kernels.tiles import amx_tiles
from max._backends.cpu.kernels.tiles.micro_kernels import dot_rows, multiply_columns, multiply_tile
from max._backends.cpu.kernels.tiles.packing import pack_columns, pack_rows
from max._backends.cpu.kernels.tiles.strips import CACHE_LINE, L2
from max._backends.cpu.kernels.tiles.tiling import Matrix, Tiling


@k.inline
def load_queries(
    q: k.View, task: Task, split: k.Value, scores: Scores, memory: Scratch, p: Plan
) -> None:
    """Copies the rows of a task, times a factor, to scratch memory, and resets their state.

    A sink is a key without value that the first part of the context has seen.
    """
    t, state = p.plain, memory.state
    rows = task.tokens * p.group
    for i in range(rows):
        query = q[task.row + i // p.group, task.kv_head * p.group + i % p.group]  # [head_dim]
        for j, tail in k.vectors(q.shape[2], t.width):
            v = k.cast(query.load(j, width=t.width, mask=tail), k.f32) * scores.query_factor
            if rows <= p.row_threshold:
                memory.queries.store(i, j, value=v, mask=tail)
            else:
                memory.unpacked.store(i, j, value=v, mask=tail)
        state.maxima[i] = NEGATIVE_INFINITY
        state.totals[i] = 0
        if p.sinks:
            if split == 0:
                head = task.kv_head * p.group + i % p.group
                # so that `maximum * factor` is the sink's logit in the exponent of 2
                state.maxima[i] = scores.sinks[head] * LOG2_E / scores.factor
                state.totals[i] = 1  # 2 ** 0, the weight of the sink relative to its own maximum
        for j in range(0, p.stride, t.width):
            state.sums.store(i * p.stride + j, value=k.splat(k.f32(0), t.width))


@k.inline
def pack_paged_queries(rows: k.Integer, memory: Scratch, tile_height: k.Value, p: Plan) -> None:
    """Packs the copied rows of a task, tile by tile."""
    wide = p.wide
    lanes = p.depth // wide.pair
    if p.matrix_tiles:
        amx_attention.copy_rows_padded(memory.packed.view(k.bf16), p.depth, memory.unpacked[:rows])
    for height in k.unroll(p.heights):
        if height == tile_height:
            for tile in range(0 if p.matrix_tiles else k.ceildiv(rows, height)):
                for r in k.static_range(0, height, wide.width):
                    # a vector of rows behind the task is not packed: its results are never read
                    if r == 0 or tile * height + r < rows:
                        source = memory.unpacked[tile * height + r : rows]
                        target = memory.packed[tile * height * lanes + r :]
                        pack_rows(target, height, source, min(wide.width, height - r), wide)


@k.inline
def pack_task(rows: k.Integer, memory: Scratch, p: Plan) -> Any:
    """Packs the copied rows of a task where they are not read in place; returns the height of its register tiles."""
    tile_height = k.i64(p.plain.height)
    # few rows take the lower tiles of batch-invariant targets
    if len(p.heights) == 2:
        if rows <= ROW_THRESHOLD:
            tile_height = k.i64(p.heights[1])
    if rows > p.row_threshold:
        pack_paged_queries(rows, memory, tile_height, p)
    return tile_height


@k.inline
def store_row(
    out: k.View,
    row: k.Integer,
    head: k.Integer,
    state: RowState,
    i: k.Value,
    total: k.Value,
    size: int,
    width: int,
) -> None:
    """Stores the sums of a row of a task, divided by its total; 0 where the row has seen no key.

    Args:
        out: `[rows, heads, size]`.
        row: The row of the result.
        head: The head of the result.
        state: The state of the task's rows.
        i: The row of the task.
        total: The total of its weights.
        size: The size of a value.
        width: Lanes of a vector.
    """
    share = 1 / total if total > 0 else k.f32(0)
    for j, tail in k.vectors(size, width):
        v = state.sums.load(i * state.stride + j, width=width) * share
        out.store(row, head, j, value=v, mask=tail)


@k.inline
def prefetch_rows_of_block(keys: k.View, values: k.View | None, j: k.Value) -> None:
    """Prefetches four keys, `AHEAD` after `j`, and four values from `j` on into the L2 cache.

    A row of one head is too short, and the next one too far, for the hardware prefetcher. The values of a block do not
    fit the L1 cache beside its keys.
    """
    for r in k.static_range(4):
        if j + AHEAD + r < keys.shape[0]:
            for column in k.static_range(0, keys.shape[1], CACHE_LINE // keys.dtype.size):
                keys.prefetch(j + AHEAD + r, column, locality=L2)
        if values is not None:
            if j + r < values.shape[0]:
                for column in k.static_range(0, values.shape[1], CACHE_LINE // values.dtype.size):
                    values.prefetch(j + r, column, locality=L2)


@k.inline
def score_block(
    keys: k.View, rows: k.Integer, memory: Scratch, p: Plan, values: k.View | None = None
) -> None:
    """`scores[row, key] = queries[row] · keys[key]` for the keys `[count, head_dim]` of a block.

    Few rows read the keys in place; more rows are packed and multiplied by panels of keys. `values`, of the same block,
    are prefetched.
    """
    t, wide, scores = p.plain, p.wide, memory.scores
    count, head_dim = keys.shape[0], keys.shape[1]
    if rows <= p.row_threshold:
        for j in range(0, count, 4):
            prefetch_rows_of_block(keys, values, j)
            # passes may reach past the last row: queries and scores have room for twice the threshold
            for i in range(0, rows, p.gemv_rows):
                c = Matrix(scores[i * KEYS + j :], KEYS)
                queries, vectors = memory.queries[i:], p.gemv_vectors
                dot_rows(c, queries, keys[j:], p.gemv_rows, t, rows_at_once=vectors)
    else:
        lanes = p.depth // wide.pair
        for j in range(0, count, 2 * t.width):
            # a second vector without keys keeps old lanes: the softmax masks their scores
            for half in range(j, k.min(j + 2 * t.width, count), t.width):
                pack_rows(memory.panel[half - j :], 2 * t.width, keys[half:], t.width, wide)
            for tile in range(k.ceildiv(rows, t.height)):
                c = Matrix(scores[tile * t.height * KEYS + j :], KEYS)
                left = memory.packed[tile * t.height * lanes :]
                if p.matrix_tiles:
                    a = Matrix(left.view(k.bf16), 2 * lanes)
                    amx_attention.multiply_tile_amx(
                        memory.tiles, c, a, memory.panel, lanes // 16, True
                    )
                else:
                    size = k.ceildiv(head_dim, wide.pair)
                    b = Matrix(memory.panel, 2 * t.width)
                    multiply_tile(c, Matrix(left, 1, t.height), b, size, True, wide)


@k.inline
def add_values_packed(values: k.View, rows: k.Value, memory: Scratch, p: Plan) -> None:
    """`sums[row] += Σ weight[row, key] · values[key]` of a block of values, in panels; see `add_values`."""
    t, wide, state = p.plain, p.wide, memory.state
    count, head_dim = values.shape[0], values.shape[1]
    # lanes of 32 bits: an f32 weight, or those of two adjacent keys
    weights = memory.rounded_weights.view(k.i32) if wide.pair == 2 else memory.scores
    if p.matrix_tiles:
        for tile in range(k.ceildiv(rows, t.height)):
            row = tile * t.height
            tails = weights.view(k.bf16)[row * KEYS :]
            amx_attention.zero_weights_tail(tails, KEYS, count)
    for column in range(0, head_dim, 2 * t.width):
        pack_columns(memory.panel, values[:, column:], 2, wide)
        if p.matrix_tiles:
            amx_tiles.zero_panel_tail(memory.panel, count)
        lanes = KEYS // wide.pair
        size = k.ceildiv(count, wide.pair)
        for tile in range(k.ceildiv(rows, t.height)):
            row = tile * t.height
            left = weights[row * lanes :]
            c = Matrix(state.sums[row * p.stride + column :], p.stride)
            if p.matrix_tiles:
                steps = k.ceildiv(count, amx_tiles.DEPTH)
                a = Matrix(left.view(k.bf16), KEYS)
                amx_attention.multiply_tile_amx(memory.tiles, c, a, memory.panel, steps, False)
            else:
                b = Matrix(memory.panel, 2 * t.width)
                multiply_tile(c, Matrix(left, lanes), b, size, False, wide)


@k.inline
def add_values(
    values: k.View, rows: k.Integer, memory: Scratch, p: Plan, ahead: k.View | None = None
) -> None:
    """`sums[row] += Σ weight[row, key] · values[key]` for the values `[count, head_dim]` of a block.

    The weights of few rows are in place of their scores, those of more rows are lanes of `wide`. `ahead` are the keys
    that few rows read next.
    """
    t, state = p.plain, memory.state
    if rows <= p.row_threshold:
        weights = memory.scores.reshape(-1, KEYS)  # [rows, KEYS]
        step = p.gemv_vectors * t.width
        for column in k.static_range(0, p.stride, step):
            # the sums are padded to whole strips, the values are not
            strip = values[:, min(column, values.shape[1]) : min(column + step, values.shape[1])]
            for i in range(0, rows, p.gemv_rows):
                c = Matrix(state.sums[i * p.stride + column :], p.stride)
                following = ahead
                if ahead is not None:
                    # each strip of columns prefetches the same columns of the next keys, in the pass of the first rows
                    share = ahead.shape[0] if i == 0 else k.i64(0)
                    last = min(column + step, ahead.shape[1])
                    following = ahead[:share, min(column, last) : last]
                multiply_columns(
                    c, weights[i:], strip, p.gemv_rows, t.width, True, following, p.gemv_vectors
                )
    else:
        add_values_packed(values, rows, memory, p)


@k.inline
def softmax_visible(
    scores: k.View, weights: k.View, state: RowState, low: tuple[k.Integer, ...], high: tuple[k.Integer, ...],
    count: k.Integer, factor: k.Value, rows: int, t: Tiling,
) -> None:  # fmt: skip
    """Computes the weights of one row or of four from their scores.

    Args:
        scores: The scores of the first row on, `KEYS` a row.
        weights: Where the weights go.
        state: The rows' state.
        low: The first key of the block that each row sees.
        high: The last one.
        count: Keys of the block.
        factor: The factor of scores.
        rows: Rows, 1 or 4.
        t: The tiling.
    """
    # the mask test costs a compare and a store of each vector, so whole blocks skip it
    all_visible = count % t.width == 0
    for r in k.static_range(rows):
        all_visible = all_visible and low[r] <= 0 and high[r] >= count - 1
    # NaN is not caught here: it makes the weights NaN
    largest = k.tile(k.f32, (rows,), width=t.width, fill=NEGATIVE_INFINITY)
    if all_visible:
        for j in range(0, count, t.width):
            for i in k.static_range(rows):
                largest[i] = maximum(scores.load(i * KEYS + j, width=t.width), largest[i])
    else:
        for j in range(0, count, t.width):
            key = k.iota(k.i32, t.width)
            for i in k.static_range(rows):
                seen = (key >= k.i32(low[i] - j)) & (key <= k.i32(high[i] - j))
                score = k.select(seen, scores.load(i * KEYS + j, width=t.width), NEGATIVE_INFINITY)
                scores.store(i * KEYS + j, value=score)
                largest[i] = maximum(score, largest[i])
    top = lane_maxima(largest, rows, t.width)
    add_weights(Matrix(scores, KEYS), weights, top, count, state, Scaling(factor, False), rows, t)


@k.inline
def rescale(
    task: Task, key: k.Value, count: k.Integer, scores: Scores, memory: Scratch, p: Plan
) -> None:
    """Scales the products of a block: `softcap · tanh(scale · product / softcap) + slope · (key - position)`.

    Args:
        task: The task.
        key: The first key.
        count: Keys of the block.
        scores: How products become scores.
        memory: Scratch memory.
        p: The plan.
    """
    width = p.plain.width
    for i in range(task.tokens * p.group):
        for j in range(0, count, width):
            v = memory.scores.load(i * KEYS + j, width=width) * scores.scale
            if p.softcap > 0:
                v = k.tanh(v * (1 / p.softcap)) * p.softcap
            if p.mask == "causal_alibi":
                # negative, as keys of a causal mask come before the query
                offset = key + j - task.position - i // p.group
                distances = k.cast(k.iota(k.i32, width) + k.i32(offset), k.f32)
                v = v + distances * scores.slopes[task.kv_head * p.group + i % p.group]
            memory.scores.store(i * KEYS + j, value=v)


@k.inline
def hide_other_branches(
    task: Task, key: k.Value, count: k.Integer, trees: Trees, memory: Scratch, p: Plan
) -> None:
    """Hides the new keys of a block from the rows of a tree that they are no ancestors of; later ones are hidden by the
    causal mask.

    Args:
        task: The task.
        key: The first key.
        count: Keys of the block.
        trees: The ancestors of rows.
        memory: Scratch memory.
        p: The plan.
    """
    if trees.ancestors.shape[0] > 0:
        begin = k.max(trees.new_key - key, 0)
        # rows of trees have no bits for keys after these
        end = k.min(k.i64(count), trees.new_key + TREE_ROWS - key)
        for i in range(task.tokens):
            mask = trees.ancestors[task.row + i]
            if mask != 0:
                for j in range(begin, end):
                    if (mask >> k.u64(key + j - trees.new_key)) & k.u64(1) == 0:
                        for head in range(p.group):
                            memory.scores[(i * p.group + head) * KEYS + j] = NEGATIVE_INFINITY


@k.inline
def softmax_block(
    task: Task, key: k.Value, count: k.Integer, factor: k.Value, memory: Scratch, p: Plan
) -> None:
    """Computes the weights of all rows of a task for a block of keys, four rows at a time.

    Args:
        task: The task.
        key: The first key.
        count: Keys of the block.
        factor: The factor of scores.
        memory: Scratch memory.
        p: The plan.
    """
    all_rows = task.tokens * p.group
    i = k.i64(0)
    for rows in k.unroll((4, 1)):
        while i + rows <= all_rows:
            # rows of a task are token by token, so `group` rows share a position
            positions = [task.position + (i + r) // p.group for r in k.static_range(rows)]
            low = [first_key(position, p) - key for position in positions]
            high = [
                k.min(last_key(position, task.total, p) - key, count - 1) for position in positions
            ]
            scores, state = memory.scores[i * KEYS :], state_from(memory.state, i)
            # packed products need pairs of bf16; in place the weights stay f32
            if p.wide.pair == 2 and all_rows > p.row_threshold:
                rounded = memory.rounded_weights[i * KEYS :]
                softmax_visible(scores, rounded, state, low, high, count, factor, rows, p.plain)
            else:
                softmax_visible(scores, scores, state, low, high, count, factor, rows, p.plain)
            i += rows


@k.inline
def copy_scales(target: k.View, scales: k.View, width: int) -> None:
    """Copies the scales of a block `[count]`, which are rows of the cache apart; those up to the next multiple of the
    width are 0.
    """
    count = scales.shape[0]
    for i in range(count):
        target[i] = scales[i]
    for i in range(count, k.ceildiv(count, width) * width):
        target[i] = 0.0


@k.inline
def multiply_by_scales(
    scales: k.View, rows: k.Integer, count: k.Integer, memory: Scratch, width: int
) -> None:
    """Multiplies the scores, or weights, of a block's keys by their scales."""
    for i in range(rows):
        for j in range(0, count, width):
            v = memory.scores.load(i * KEYS + j, width=width) * scales.load(j, width=width)
            memory.scores.store(i * KEYS + j, value=v)


@k.inline
def attend_block(
    task: Task, keys: k.View, values: k.View, key: k.Value, scores: Scores, tile_height: k.Value, memory: Scratch,
    p: Plan, ahead: k.View | None = None, trees: Trees | None = None,
) -> None:  # fmt: skip
    """Attends with the rows of a task to a block of keys and values.

    Args:
        task: The task.
        keys: `[count, head_dim]`; codes where the cache has scales, which are in the scratch memory.
        values: `[count, head_dim]`.
        key: The number of the first key in the sequence.
        scores: How products become scores.
        tile_height: The height of register tiles, one of the plan's.
        memory: Scratch memory.
        p: The plan.
        ahead: The keys that are read next; None where they are not prefetched.
        trees: The ancestors of rows; None where no sequence has a tree.
    """
    rows = task.tokens * p.group
    # heights are compile-time numbers: one copy of the code each
    for height in k.unroll(p.heights):
        if height == tile_height:
            score_block(keys, rows, memory, of_height(p, height), values)
    # the products of codes lack the scales of the keys
    if p.rounded_cache:
        multiply_by_scales(memory.key_scales, rows, keys.shape[0], memory, p.plain.width)
    if scales_before_softmax(p):
        rescale(task, key, keys.shape[0], scores, memory, p)
    if trees is not None:
        hide_other_branches(task, key, keys.shape[0], trees, memory, p)
    softmax_block(task, key, keys.shape[0], scores.factor, memory, p)
    # after the softmax, whose totals are those of the weights alone
    if p.rounded_cache:
        multiply_by_scales(memory.value_scales, rows, keys.shape[0], memory, p.plain.width)
    for height in k.unroll(p.heights):
        if height == tile_height:
            add_values(values, rows, memory, of_height(p, height), ahead)
