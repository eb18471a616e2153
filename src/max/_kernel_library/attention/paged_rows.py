"""The work of a task of paged attention on its rows: the pieces of `max._kernel_library.attention.paged_attention`.

A row is a new token's query of one head; rows are ordered token by token, in each the query heads that share a KV head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from max import kernel as k
from max._kernel_library.attention import amx_attention
from max._kernel_library.attention.cache_formats import is_rounded
from max._kernel_library.attention.online_softmax import (
    LOG2_E,
    NEGATIVE_INFINITY,
    RowState,
    Scaling,
    add_weights,
    lane_maxima,
    maximum,
    padded,
    state_from,
)
from max._kernel_library.tiles import amx_tiles
from max._kernel_library.tiles.micro_kernels import dot_rows, multiply_columns, multiply_tile
from max._kernel_library.tiles.packing import pack_columns, pack_rows
from max._kernel_library.tiles.strips import CACHE_LINE
from max._kernel_library.tiles.tiling import Matrix, Tiling, tiling

KEYS = 128
"""Keys of a block; a block lies in one page."""
AHEAD = 16
"""Distance in keys at which they are prefetched where they are read in place."""
ROW_THRESHOLD = 8
"""Most rows of a task that reads the cache in place."""
TASK_ROWS = 48
"""Rows of a task, unless a KV head has more query heads."""
LONG_TASKS = 4
"""Tasks have this many times the rows where enough of them remain for the workers: keys and values are packed less often."""


@dataclass(frozen=True)
class Plan:
    """The compile-time facts of a call.

    Args:
        plain: Tiling of products in f32.
        wide: Tiling of packed operands: pairs of bf16, else `plain`.
        heights: Heights of register tiles; batch-invariant targets have a lower one for few rows.
        group: Query heads of a KV head.
        kv_heads: KV heads.
        gemv_rows: Rows per pass where the cache is read in place.
        row_threshold: Most rows of a task that reads the cache in place.
        short_tokens: Tokens of a task.
        long_tokens: Tokens of a task where there are many.
        depth: Elements of a packed query or key.
        stride: Elements from row to row of the sums.
        most_rows: Rows of scratch memory.
        matrix_tiles: Whether packed operands are multiplied in matrix tiles.
        mask: The mask.
        window: Its window.
        softcap: The bound of soft-capped scores; 0 for none.
        sinks: Whether each head has a sink.
        cross: Whether a sequence has its own number of keys: then positions may be past the last one.
        rounded_cache: Whether keys and values are codes, with a scale each.
    """

    plain: Tiling
    wide: Tiling
    heights: tuple[int, ...]
    group: int
    kv_heads: int
    gemv_rows: int
    row_threshold: int
    short_tokens: int
    long_tokens: int
    depth: int
    stride: int
    most_rows: int
    matrix_tiles: bool
    mask: str
    window: int
    softcap: float
    sinks: bool
    cross: bool
    rounded_cache: bool


class Scores(NamedTuple):
    """How products of queries and keys become the logits of the softmax.

    Args:
        query_factor: What queries are multiplied by.
        factor: What scores are multiplied by, to be powers of 2.
        scale: The scale of the products, where `rescaled` turns them into scores.
        sinks: The logit of each head's sink, `[heads]`.
        slopes: The slope of each head's bias, `[heads]`.
    """

    query_factor: Any
    factor: Any
    scale: Any
    sinks: Any
    slopes: Any


class Scratch(NamedTuple):
    """Scratch memory of a worker.

    Args:
        queries: Rows that are read in place, `[rows, head_dim]`, f32.
        unpacked: Rows before they are packed, `[rows, head_dim]`.
        packed: Packed rows, flat lanes.
        panel: A panel of keys or values, flat lanes.
        scores: Scores, `KEYS` a row, flat.
        rounded: Weights as bf16, as the scores.
        key_scales: The scales of a block's keys, `[KEYS]`, where the cache has scales.
        value_scales: Those of its values.
        state: The state of all rows.
        tiles: The matrix tiles.
    """

    queries: Any
    unpacked: Any
    packed: Any
    panel: Any
    scores: Any
    rounded: Any
    key_scales: Any
    value_scales: Any
    state: RowState
    tiles: Any


class Task(NamedTuple):
    """New tokens of a sequence, for one KV head.

    Args:
        sequence: The sequence.
        kv_head: The KV head.
        row: The row of the first token in the ragged batch.
        position: Its position in the sequence.
        tokens: Tokens.
        total: Tokens of the sequence, cached and new.
    """

    sequence: Any
    kv_head: Any
    row: Any
    position: Any
    tokens: Any
    total: Any


class Piece(NamedTuple):
    """New rows of a sequence, for one KV head.

    Args:
        sequence: The sequence.
        kv_head: The KV head.
        first: The first row, counted from the sequence's.
        rows: Rows.
        sequence_rows: All new rows of the sequence.
    """

    sequence: Any
    kv_head: Any
    first: Any
    rows: Any
    sequence_rows: Any


@k.inline
def find_piece(offsets: Any, task: Any, rows_per_task: Any, kv_heads: int) -> Piece:
    """The piece of a task's number: those of a sequence follow each other, for each piece the KV heads."""
    sequence = k.i64(0)
    index = k.i64(task)
    rows = k.i64(offsets[1]) - k.i64(offsets[0])
    pieces = k.ceildiv(rows, rows_per_task)
    while index >= pieces * kv_heads:
        index -= pieces * kv_heads
        sequence += 1
        rows = k.i64(offsets[sequence + 1]) - k.i64(offsets[sequence])
        pieces = k.ceildiv(rows, rows_per_task)
    # the last rows of a causal mask see most keys: they come first
    first = (pieces - 1 - index % pieces) * rows_per_task
    return Piece(sequence, index // pieces, first, k.min(rows_per_task, rows - first), rows)


def rows_per_pass(group: int, target: k.Target) -> int:
    """Rows per pass where the cache is read in place: rows past the last one are computed for nothing.

    Args:
        group: Query heads of a KV head.
        target: The target.
    """
    # three rows by four keys take 12 accumulators, three queries and a key: 16 registers
    counts = (4, 3, 5, 2) if target.registers >= 32 else (3, 2)
    return next((n for n in counts if group % n == 0), 1 if group == 1 else counts[0])


def tile_heights_of(group: int, t: Tiling, target: k.Target) -> tuple[int, ...]:
    """The heights of register tiles; where few rows are packed too, a lower one for them.

    Args:
        group: Query heads of a KV head.
        t: The tiling.
        target: The target.
    """
    low = min(group, ROW_THRESHOLD)
    return (t.height, low) if target.batch_invariant and low < t.height else (t.height,)


def plan_paged(
    target: k.Target,
    dtypes: tuple[k.ScalarType, k.ScalarType],
    heads: tuple[int, int, int],
    mask: str,
    window: int,
    softcap: float,
    sinks: bool,
    value_size: int = 0,
    cross: bool = False,
) -> Plan:
    """The plan of a call.

    Args:
        target: The target.
        dtypes: Element types of queries and cache.
        heads: Query heads, KV heads, and the size of a head.
        mask: The mask.
        window: Its window.
        softcap: The bound of soft-capped scores; 0 for none.
        sinks: Whether each head has a sink.
        value_size: Elements of a value, where it is the beginning of its key; 0: values are as long as keys.
        cross: Whether a sequence has its own number of keys.
    """
    query_heads, kv_heads, head_dim = heads
    group = query_heads // kv_heads
    t = tiling(target, k.f32, k.f32)
    # f32 again, except for pairs of bf16
    pairs = tiling(target, *dtypes)
    wide = pairs if pairs.pair == 2 else t
    matrix_tiles = amx_tiles.takes_tiles(target, wide)
    if matrix_tiles:
        t, wide = amx_tiles.with_tile_height(t), amx_tiles.with_tile_height(wide)
    long_tokens = max(LONG_TASKS * TASK_ROWS // group, 1)
    return Plan(
        plain=t,
        wide=wide,
        heights=tile_heights_of(group, t, target),
        group=group,
        kv_heads=kv_heads,
        gemv_rows=rows_per_pass(group, target),
        row_threshold=0 if target.batch_invariant else ROW_THRESHOLD,
        short_tokens=max(TASK_ROWS // group, 1),
        long_tokens=long_tokens,
        # packed queries and keys are filled up to whole vectors, rows of sums to whole strips of columns
        depth=padded(head_dim, wide.step),
        stride=padded(value_size or head_dim, 4 * t.width),
        most_rows=padded(max(long_tokens * group, 2 * ROW_THRESHOLD), t.height),
        matrix_tiles=matrix_tiles,
        mask=mask,
        window=window,
        softcap=softcap,
        sinks=sinks,
        cross=cross,
        rounded_cache=is_rounded(dtypes[1]),
    )


def rescaled(p: Plan) -> bool:
    """Whether products are scaled before the softmax, as a soft cap or a bias needs."""
    return p.softcap > 0 or p.mask == "causal_alibi"


def of_height(p: Plan, height: int) -> Plan:
    """A plan with register tiles of another height."""
    return replace(p, plain=replace(p.plain, height=height), wide=replace(p.wide, height=height))


@k.inline
def paged_scratch(head_dim: int, p: Plan, ctx: Any) -> Scratch:
    """The scratch memory of a worker."""
    wide, most_rows = p.wide, p.most_rows
    queries = ctx.scratch(k.f32, (2 * ROW_THRESHOLD, head_dim))
    unpacked = ctx.scratch(k.bf16 if wide.pair == 2 else k.f32, (most_rows, head_dim))
    packed = ctx.scratch(wide.lane, (most_rows * p.depth // wide.pair,))
    scores = ctx.scratch(k.f32, (most_rows * KEYS,))
    rounded = ctx.scratch(k.bf16, (most_rows * KEYS if wide.pair == 2 else 1,))
    sums = ctx.scratch(k.f32, (most_rows * p.stride,))
    maxima = ctx.scratch(k.f32, (most_rows,))
    totals = ctx.scratch(k.f32, (most_rows,))
    panel = ctx.scratch(wide.lane, (max(p.depth, KEYS) // wide.pair * 2 * p.plain.width,))
    state = RowState(maxima, totals, sums, p.stride, p.stride)
    tiles = k.matrix_tiles(amx_tiles.SHAPES)
    scales = [ctx.scratch(k.f32, (KEYS if p.rounded_cache else 1,)) for _ in k.static_range(2)]
    return Scratch(
        queries, unpacked, packed, panel, scores, rounded, scales[0], scales[1], state, tiles
    )


@k.inline
def first_key(position: Any, p: Plan) -> Any:
    """The first key that a query at a position sees."""
    if p.mask == "sliding_window" or p.mask == "symmetric_window":
        return k.max(position - p.window + 1, 0)
    elif p.mask == "chunked_causal":
        return position // p.window * p.window
    else:
        return position * 0


@k.inline
def last_key(position: Any, total: Any, p: Plan) -> Any:
    """The last key that a query at a position sees, of a sequence of `total` tokens."""
    if p.mask == "null":
        return total - 1
    elif p.mask == "symmetric_window":
        return k.min(position + p.window - 1, total - 1)
    elif p.cross:
        return k.min(position, total - 1)
    else:
        return position


@k.inline
def load_queries(q: Any, task: Task, split: Any, scores: Scores, memory: Scratch, p: Plan) -> None:
    """Copies the rows of a task, times a factor, to scratch memory, and resets their state.

    A sink is a key without value that the first part of the context has seen.
    """
    t, state = p.plain, memory.state
    rows = task.tokens * p.group
    for i in range(rows):
        query = q[task.row + i // p.group, task.kv_head * p.group + i % p.group]
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
                state.maxima[i] = scores.sinks[head] * LOG2_E / scores.factor
                state.totals[i] = 1
        for j in range(0, p.stride, t.width):
            state.sums.store(i * p.stride + j, value=k.splat(k.f32(0), t.width))


@k.inline
def pack_paged_queries(rows: Any, memory: Scratch, tile_height: Any, p: Plan) -> None:
    """Packs the copied rows of a task, tile by tile."""
    wide = p.wide
    lanes = p.depth // wide.pair
    if p.matrix_tiles:
        amx_attention.copy_rows_padded(memory.packed.view(k.bf16), p.depth, memory.unpacked[:rows])
    for height in k.unroll(p.heights):
        if height == tile_height:
            for tile in range(0 if p.matrix_tiles else k.ceildiv(rows, height)):
                for r in k.static_range(0, height, wide.width):
                    if r == 0 or tile * height + r < rows:
                        source = memory.unpacked[tile * height + r : rows]
                        target = memory.packed[tile * height * lanes + r :]
                        pack_rows(target, height, source, min(wide.width, height - r), wide)


@k.inline
def prefetch_rows_of_block(keys: Any, values: Any, j: Any) -> None:
    """Prefetches the keys `AHEAD` further than `j` and the values at `j`, four rows each.

    A row of one head is too short, and the next one too far, for the hardware prefetcher.
    """
    for r in k.static_range(4):
        if j + AHEAD + r < keys.shape[0]:
            for column in k.static_range(0, keys.shape[1], CACHE_LINE // keys.dtype.size):
                keys.prefetch(j + AHEAD + r, column)
        if values is not None:
            if j + r < values.shape[0]:
                for column in k.static_range(0, values.shape[1], CACHE_LINE // values.dtype.size):
                    values.prefetch(j + r, column)


@k.inline
def score_block(keys: Any, rows: Any, memory: Scratch, p: Plan, values: Any = None) -> None:
    """`scores[row, key] = queries[row] · keys[key]` for the keys `[count, head_dim]` of a block.

    Few rows read the keys in place, more multiply packed rows by panels of keys. `values` are those of the block, which are needed next.
    """
    t, wide, scores = p.plain, p.wide, memory.scores
    count, head_dim = keys.shape[0], keys.shape[1]
    if rows <= p.row_threshold:
        for j in range(0, count, 4):
            prefetch_rows_of_block(keys, values, j)
            for i in range(0, rows, p.gemv_rows):
                c = Matrix(scores[i * KEYS + j :], KEYS)
                dot_rows(c, memory.queries[i:], keys[j:], p.gemv_rows, t)
    else:
        lanes = p.depth // wide.pair
        for j in range(0, count, 2 * t.width):
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
def add_values_packed(values: Any, rows: Any, memory: Scratch, p: Plan) -> None:
    """`sums[row] += Σ weight[row, key] · values[key]` of a block of values, in panels; see `add_values`."""
    t, wide, state = p.plain, p.wide, memory.state
    count, head_dim = values.shape[0], values.shape[1]
    weights = memory.rounded.view(k.i32) if wide.pair == 2 else memory.scores
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
def add_values(values: Any, rows: Any, memory: Scratch, p: Plan) -> None:
    """`sums[row] += Σ weight[row, key] · values[key]` for the values `[count, head_dim]` of a block.

    The weights of few rows replaced their scores, those of more are lanes of `wide`.
    """
    t, state = p.plain, memory.state
    if rows <= p.row_threshold:
        weights = memory.scores.reshape(-1, KEYS)
        for column in k.static_range(0, p.stride, 4 * t.width):
            strip = values[:, column : min(column + 4 * t.width, values.shape[1])]
            for i in range(0, rows, p.gemv_rows):
                c = Matrix(state.sums[i * p.stride + column :], p.stride)
                multiply_columns(c, weights[i:], strip, p.gemv_rows, t.width, accumulate=True)
    else:
        add_values_packed(values, rows, memory, p)


@k.inline
def softmax_visible(
    scores: Any, weights: Any, state: RowState, low: Any, high: Any, count: Any, factor: Any,
    rows: int, t: Tiling,
) -> None:  # fmt: skip
    """Computes the weights of one row or of four from their scores.

    Args:
        scores: The scores of the first row on, `KEYS` a row.
        weights: Where the weights go.
        state: The rows' state.
        low: The first key of the block that each row sees.
        high: The last one.
        count: Keys of the block.
        factor: What scores are multiplied by.
        rows: Rows, 1 or 4.
        t: The tiling.
    """
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
def rescale(task: Task, key: Any, count: Any, scores: Scores, memory: Scratch, p: Plan) -> None:
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
                offset = key + j - task.position - i // p.group
                distances = k.cast(k.iota(k.i32, width) + k.i32(offset), k.f32)
                v = v + distances * scores.slopes[task.kv_head * p.group + i % p.group]
            memory.scores.store(i * KEYS + j, value=v)


@k.inline
def softmax_block(task: Task, key: Any, count: Any, factor: Any, memory: Scratch, p: Plan) -> None:
    """Computes the weights of all rows of a task for a block of keys, four rows at a time.

    Args:
        task: The task.
        key: The first key.
        count: Keys of the block.
        factor: What scores are multiplied by.
        memory: Scratch memory.
        p: The plan.
    """
    all_rows = task.tokens * p.group
    i = k.i64(0)
    for rows in k.unroll((4, 1)):
        while i + rows <= all_rows:
            at = [task.position + (i + r) // p.group for r in k.static_range(rows)]
            low = [first_key(position, p) - key for position in at]
            high = [k.min(last_key(position, task.total, p) - key, count - 1) for position in at]
            scores, state = memory.scores[i * KEYS :], state_from(memory.state, i)
            if p.wide.pair == 2 and all_rows > p.row_threshold:
                rounded = memory.rounded[i * KEYS :]
                softmax_visible(scores, rounded, state, low, high, count, factor, rows, p.plain)
            else:
                softmax_visible(scores, scores, state, low, high, count, factor, rows, p.plain)
            i += rows


@k.inline
def copy_scales(target: Any, scales: Any, width: int) -> None:
    """Copies the scales of a block `[count]`, which are rows of the cache apart; those up to the next multiple of the width are 0."""
    count = scales.shape[0]
    for i in range(count):
        target[i] = scales[i]
    for i in range(count, k.ceildiv(count, width) * width):
        target[i] = 0.0


@k.inline
def multiply_by_scales(scales: Any, rows: Any, count: Any, memory: Scratch, width: int) -> None:
    """Multiplies the scores, or weights, of a block's keys by their scales."""
    for i in range(rows):
        for j in range(0, count, width):
            v = memory.scores.load(i * KEYS + j, width=width) * scales.load(j, width=width)
            memory.scores.store(i * KEYS + j, value=v)


@k.inline
def attend_block(
    task: Task, keys: Any, values: Any, key: Any, scores: Scores, tile_height: Any, memory: Scratch,
    p: Plan,
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
    """
    rows = task.tokens * p.group
    for height in k.unroll(p.heights):
        if height == tile_height:
            score_block(keys, rows, memory, of_height(p, height), values)
    if p.rounded_cache:
        multiply_by_scales(memory.key_scales, rows, keys.shape[0], memory, p.plain.width)
    if rescaled(p):
        rescale(task, key, keys.shape[0], scores, memory, p)
    softmax_block(task, key, keys.shape[0], scores.factor, memory, p)
    if p.rounded_cache:
        multiply_by_scales(memory.value_scales, rows, keys.shape[0], memory, p.plain.width)
    for height in k.unroll(p.heights):
        if height == tile_height:
            add_values(values, rows, memory, of_height(p, height))
