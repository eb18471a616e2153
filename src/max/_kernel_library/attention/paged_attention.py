"""Attention of a ragged batch of new tokens over the paged KV cache, which holds them already.

Online softmax over blocks of keys, in f32. The query heads that share a key head are worked on together: a task is some tokens'
queries of one key head. Tasks with many rows pack keys and values and multiply by register tiles, those with few rows (decoding)
read the cache in place. Where there are too few tasks for the workers, each is split over the context, and a second phase
merges the parts.

Where results must not depend on the rest of the batch (`Target.batch_invariant`), all tasks pack keys and values, those with few rows into lower
register tiles, none is split, and blocks of keys begin where they would for a prompt's first token.

Where queries and cache are bf16 and the machine multiplies pairs of bf16, tasks with many rows do so: weights (not their total) are
rounded to bf16, sums are f32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from max import kernel as k
from max._kernel_library.attention import amx_attention
from max._kernel_library.attention.online_softmax import (
    LOG2_E,
    MAX_SPLITS,
    NEGATIVE_INFINITY,
    SPLIT_KEYS,
    SPLIT_ROWS,
    add_weights,
    greater,
    greatest_lanes,
    merge_parts,
    padded,
)
from max._kernel_library.attention.paged_cache import (
    check_batch,
    check_size,
    layer_of,
    page_of,
    unsigned,
)
from max._kernel_library.lowering import KernelCall, Operand, Workspace, view
from max._kernel_library.tiles import amx_tiles
from max._kernel_library.tiles.micro_kernels import dot_rows, multiply_columns, multiply_tile
from max._kernel_library.tiles.packing import pack_columns, pack_rows
from max._kernel_library.tiles.tiling import Matrix, Tiling, tiling
from max.dtype import DType

KEYS = 128
"""Keys of a block; a block lies in one page."""
FEW_ROWS = 8
"""The row threshold below which a task reads the cache in place."""
TASK_ROWS = 48
"""Rows of a task, but for more query heads a key head."""
LONG_TASKS = 4
"""A task has so many times the rows where that leaves enough tasks for the workers: keys and values are packed less often."""


def rows_at_once(group: int, target: k.Target) -> int:
    """Rows that a task with few of them works on together: rows past the last one are computed for nothing.

    Args:
        group: Query heads of a key head.
        target: The machine.
    """
    if target.registers < 32:
        return 2 if group % 2 == 0 else 1
    return next((count for count in (4, 3, 5, 2) if group % count == 0), 1 if group == 1 else 4)


def few_limit(target: k.Target) -> int:
    """The row threshold below which a task reads the cache in place."""
    return 0 if target.batch_invariant else FEW_ROWS


def tile_heights(group: int, t: Tiling, target: k.Target) -> tuple[int, ...]:
    """The heights of register tiles: of many rows, and where few are multiplied in tiles too, a lower one for them.

    Args:
        group: Query heads of a key head.
        t: The tiling.
        target: The machine.
    """
    low = min(group, FEW_ROWS)
    return (t.height, low) if target.batch_invariant and low < t.height else (t.height,)


def of_height(t: Tiling, height: int) -> Tiling:
    """A tiling with register tiles of another height."""
    return replace(t, height=height)


@k.inline
def first_key(position: Any, mask: str, window: int) -> Any:
    """The first key that a query at a position sees."""
    if mask == "sliding_window":
        return k.max(position - window + 1, 0)
    elif mask == "chunked_causal":
        return position // window * window
    else:
        return position * 0


@k.inline
def last_key(position: Any, total: Any, mask: str) -> Any:
    """The last key that a query at a position sees, of a sequence of `total` tokens."""
    if mask == "null":
        return total - 1
    else:
        return position


@k.inline
def scores_of_block(
    scores: Any,
    queries: Any,
    packed: Any,
    keys: Any,
    rows: Any,
    panel: Any,
    step: int,
    tiles: Any,
    by_tiles: bool,
    t: Tiling,
    wide: Tiling,
) -> None:
    """`scores[row, key] = queries[row] · keys[key]` for the keys `[count, head_dim]` of a block.

    Few rows are multiplied as `t` says, more as `wide` does, or where `by_tiles` in matrix tiles.
    """
    count = keys.shape[0]
    head_dim = keys.shape[1]
    if rows <= few_limit(k.target()):
        for j in range(0, count, 4):
            for i in range(0, rows, step):
                dot_rows(Matrix(scores[i * KEYS + j :], KEYS), queries[i:], keys[j:], step, t)
    else:
        lanes = padded(head_dim, wide.step) // wide.pair
        for j in range(0, count, 2 * t.width):
            for half in range(j, k.min(j + 2 * t.width, count), t.width):
                pack_rows(panel[half - j :], 2 * t.width, keys[half:], t.width, wide)
            for tile in range(k.ceildiv(rows, t.height)):
                sums = scores[tile * t.height * KEYS + j :]
                left = packed[tile * t.height * lanes :]
                if by_tiles:
                    steps = lanes // 16
                    amx_attention.multiply_tile(
                        tiles, sums, KEYS, left.view(k.bf16), 2 * lanes, panel, steps, True
                    )
                else:
                    size = k.ceildiv(head_dim, wide.pair)
                    multiply_tile(
                        Matrix(sums, KEYS),
                        Matrix(left, 1, t.height),
                        Matrix(panel, 2 * t.width),
                        size,
                        True,
                        wide,
                    )


@k.inline
def add_values(
    sums: Any,
    stride: int,
    scores: Any,
    weights: Any,
    values: Any,
    rows: Any,
    panel: Any,
    step: int,
    tiles: Any,
    by_tiles: bool,
    t: Tiling,
    wide: Tiling,
) -> None:
    """`sums[row] += Σ weight[row, key] · values[key]` for the values `[count, head_dim]` of a block.

    The weights of few rows are where the scores were, those of more in lanes of `wide`. Where `by_tiles` more are multiplied in matrix tiles.
    """
    count = values.shape[0]
    head_dim = values.shape[1]
    if rows <= few_limit(k.target()):
        few = scores.reshape(-1, KEYS)
        for column in k.static_range(0, stride, 4 * t.width):
            strip = values[:, column : min(column + 4 * t.width, head_dim)]
            for i in range(0, rows, step):
                target = sums[i * stride + column :]
                multiply_columns(
                    Matrix(target, stride), few[i:], strip, step, t.width, accumulate=True
                )
    else:
        if by_tiles:
            for tile in range(k.ceildiv(rows, t.height)):
                row = tile * t.height
                amx_attention.end_weights(weights.view(k.bf16)[row * KEYS :], KEYS, count)
        for column in range(0, head_dim, 2 * t.width):
            pack_columns(panel, values[:, column:], 2, wide)
            if by_tiles:
                amx_tiles.zero_panel_tail(panel, count)
            lanes = KEYS // wide.pair
            size = k.ceildiv(count, wide.pair)
            for tile in range(k.ceildiv(rows, t.height)):
                row = tile * t.height
                left = weights[row * lanes :]
                target = sums[row * stride + column :]
                if by_tiles:
                    steps = k.ceildiv(count, amx_tiles.DEPTH)
                    amx_attention.multiply_tile(
                        tiles, target, stride, left.view(k.bf16), KEYS, panel, steps, False
                    )
                else:
                    multiply_tile(
                        Matrix(target, stride),
                        Matrix(left, lanes, 1),
                        Matrix(panel, 2 * t.width),
                        size,
                        False,
                        wide,
                    )


@k.inline
def softmax_rows(
    scores: Any,
    factor: Any,
    low: Any,
    high: Any,
    count: Any,
    maxima: Any,
    totals: Any,
    sums: Any,
    stride: int,
    weights: Any,
    rows: int,
    t: Tiling,
) -> None:
    """Turns the scores of one row or of four, times a factor, into weights, relative to their maxima so far, to which their sums are brought.

    Each row sees the keys from its `low` to its `high`. Rows of scores and weights are `KEYS` apart, those of sums `stride`.
    """
    whole = count % t.width == 0
    for r in k.static_range(rows):
        whole = whole and low[r] <= 0 and high[r] >= count - 1
    # NaN is not caught here: it makes the weights NaN
    largest = k.tile(k.f32, (rows,), width=t.width, fill=NEGATIVE_INFINITY)
    if whole:
        for j in range(0, count, t.width):
            for i in k.static_range(rows):
                largest[i] = greater(scores.load(i * KEYS + j, width=t.width), largest[i])
    else:
        for j in range(0, count, t.width):
            key = k.iota(k.i32, t.width)
            for i in k.static_range(rows):
                seen = (key >= k.i32(low[i] - j)) & (key <= k.i32(high[i] - j))
                score = k.select(seen, scores.load(i * KEYS + j, width=t.width), NEGATIVE_INFINITY)
                scores.store(i * KEYS + j, value=score)
                largest[i] = greater(score, largest[i])
    greatest = greatest_lanes(largest, rows, t.width)
    add_weights(
        scores, KEYS, greatest, factor, False, count, maxima, totals, sums, stride, stride, weights,
        rows, t,
    )  # fmt: skip


@k.inline
def find_task(task: Any, offsets: Any, kv_heads: int, tokens_a_task: int) -> Any:
    """Sequence, key head, first token and number of tokens of a task."""
    sequence = k.i64(0)
    rest = k.i64(task)
    new = k.i64(offsets[1]) - k.i64(offsets[0])
    pieces = k.ceildiv(new, tokens_a_task)
    while rest >= pieces * kv_heads:
        rest -= pieces * kv_heads
        sequence += 1
        new = k.i64(offsets[sequence + 1]) - k.i64(offsets[sequence])
        pieces = k.ceildiv(new, tokens_a_task)
    # the last tokens see most keys: they come first
    first = (pieces - 1 - rest % pieces) * tokens_a_task
    return sequence, rest // pieces, first, k.min(tokens_a_task, new - first)


@k.kernel
def attention(
    out: k.Output,
    q: k.Input,
    offsets: k.Input,
    blocks: k.InOut,
    cache_lengths: k.Input,
    lookup_table: k.Input,
    max_lengths: k.Input,
    layer_index: k.Input,
    scale: k.Input,
    parts: k.InOut,
    ctx: k.Context,
    *,
    mask: str,
    window: int,
) -> None:
    """`out[token, head] = softmax(scale · q[token, head] · keys) · values`, over the keys that the mask leaves to the token."""
    heads = q.shape[1]
    head_dim = q.shape[2]
    kv_heads = blocks.shape[4]
    page_size = blocks.shape[3]
    group = heads // kv_heads
    t = tiling(ctx.target, k.f32, k.f32)
    # f32 again, but for pairs of bf16
    pairs = tiling(ctx.target, q.dtype, blocks.dtype)
    wide = pairs if pairs.pair == 2 else t
    by_tiles = amx_tiles.takes_tiles(ctx.target, wide)
    if by_tiles:
        t, wide = amx_tiles.with_tile_height(t), amx_tiles.with_tile_height(wide)
    element = k.bf16 if wide.pair == 2 else k.f32
    step = rows_at_once(group, ctx.target)
    short_tokens = max(TASK_ROWS // group, 1)
    long_tokens = max(LONG_TASKS * TASK_ROWS // group, 1)
    few = few_limit(ctx.target)
    heights = tile_heights(group, t, ctx.target)
    few_rows = 2 * FEW_ROWS
    most_rows = padded(max(long_tokens * group, few_rows), t.height)
    # packed queries and keys are filled up to whole vectors, rows of sums to whole strips of columns
    depth = padded(head_dim, wide.step)
    stride = padded(head_dim, 4 * t.width)
    queries = ctx.scratch(k.f32, (few_rows, head_dim))
    unpacked = ctx.scratch(element, (most_rows, head_dim))
    packed = ctx.scratch(wide.lane, (most_rows * depth // wide.pair,))
    scores = ctx.scratch(k.f32, (most_rows * KEYS,))
    rounded = ctx.scratch(k.bf16, (most_rows * KEYS if wide.pair == 2 else 1,))
    sums = ctx.scratch(k.f32, (most_rows * stride,))
    maxima = ctx.scratch(k.f32, (most_rows,))
    totals = ctx.scratch(k.f32, (most_rows,))
    panel = ctx.scratch(wide.lane, (max(depth, KEYS) // wide.pair * 2 * t.width,))

    layer = layer_of(blocks, layer_index)
    check_batch(offsets, q.shape[0], blocks, cache_lengths, lookup_table, t.width)
    for d in k.static_range(3):
        check_size("the result", out.shape[d], q.shape[d])
    # scores are scaled when they become weights; what is masked must stay the least there
    query_factor = k.f32(1) if scale[0] > 0 else k.f32(scale[0])
    factor = (k.f32(scale[0]) if scale[0] > 0 else k.f32(1)) * LOG2_E
    tasks = k.i64(0)
    longest = k.i64(0)
    most_tokens = k.i64(0)
    long_tasks = k.i64(0)
    for b in range(cache_lengths.shape[0]):
        new = k.i64(offsets[b + 1]) - k.i64(offsets[b])
        tasks += k.ceildiv(new, short_tokens) * kv_heads
        long_tasks += k.ceildiv(new, long_tokens) * kv_heads
        longest = k.max(longest, k.i64(cache_lengths[b]) + new)
        most_tokens = k.max(most_tokens, new)
    tokens_a_task = k.i64(short_tokens)
    if long_tasks >= 6 * ctx.num_workers:
        tokens_a_task = k.i64(long_tokens)
        tasks = long_tasks
    splits = k.i64(1)
    if ctx.target.batch_invariant:
        pass  # the parts would depend on how many tasks there are
    elif q.shape[0] * heads <= max(SPLIT_ROWS, heads) and tasks < 4 * ctx.num_workers:
        splits = k.min(k.ceildiv(8 * ctx.num_workers, k.max(tasks, 1)), longest // SPLIT_KEYS)
        splits = k.max(k.min(splits, MAX_SPLITS), 1)
    tiles = k.matrix_tiles(amx_tiles.SHAPES)
    if by_tiles:
        if most_tokens * group > FEW_ROWS:
            tiles.configure()

    for task, split in ctx.parallel((tasks, splits), grain=1):
        sequence, kv_head, token, tokens = find_task(task, offsets, kv_heads, tokens_a_task)
        rows = tokens * group
        first_row = k.i64(offsets[sequence]) + token
        position = k.i64(cache_lengths[sequence]) + token
        total = (
            k.i64(cache_lengths[sequence]) + k.i64(offsets[sequence + 1]) - k.i64(offsets[sequence])
        )

        for i in range(rows):
            query = q[first_row + i // group, kv_head * group + i % group]
            for j, tail in k.vectors(head_dim, t.width):
                v = k.cast(query.load(j, width=t.width, mask=tail), k.f32) * query_factor
                if rows <= few:
                    queries.store(i, j, value=v, mask=tail)
                else:
                    unpacked.store(i, j, value=v, mask=tail)
            maxima[i] = NEGATIVE_INFINITY
            totals[i] = 0
            for j in range(0, stride, t.width):
                sums.store(i * stride + j, value=k.splat(k.f32(0), t.width))
        tall = k.i64(t.height)
        if len(heights) == 2:
            if rows <= FEW_ROWS:
                tall = k.i64(heights[1])
        if rows > few:
            if by_tiles:
                amx_attention.copy_rows(packed.view(k.bf16), depth, unpacked[:rows])
            for height in k.unroll(heights):
                if height == tall:
                    for tile in range(0 if by_tiles else k.ceildiv(rows, height)):
                        for r in k.static_range(0, height, t.width):
                            if r == 0 or tile * height + r < rows:
                                source = unpacked[tile * height + r : rows]
                                target = packed[tile * height * (depth // wide.pair) + r :]
                                pack_rows(target, height, source, min(t.width, height - r), wide)

        # the part of the context that this task sees, in blocks that lie in one page
        key = first_key(position, mask, window)
        if ctx.target.batch_invariant:
            # where a block begins, counted from its page's first key
            key -= key % page_size % KEYS
        end = last_key(position + tokens - 1, total, mask) + 1
        share = k.ceildiv(end - key, splits)
        key += split * share
        end = k.min(end, key + share)
        while key < end:
            page = page_of(blocks, lookup_table, sequence, key)
            slot = key % page_size
            count = k.min(k.min(page_size - slot, KEYS), end - key)
            keys = blocks[page, 0, layer][slot : slot + count, kv_head]
            values = blocks[page, 1, layer][slot : slot + count, kv_head]
            for height in k.unroll(heights):
                if height == tall:
                    scores_of_block(
                        scores, queries, packed, keys, rows, panel, step, tiles, by_tiles,
                        of_height(t, height), of_height(wide, height),
                    )  # fmt: skip
            i = k.i64(0)
            for some in k.unroll((4, 1)):
                while i + some <= rows:
                    places = [position + (i + r) // group for r in k.static_range(some)]
                    low = [first_key(at, mask, window) - key for at in places]
                    high = [k.min(last_key(at, total, mask) - key, count - 1) for at in places]
                    mine, above = scores[i * KEYS :], sums[i * stride :]
                    if wide.pair == 2 and rows > few:
                        softmax_rows(
                            mine, factor, low, high, count, maxima[i:], totals[i:], above, stride,
                            rounded[i * KEYS :], some, t,
                        )  # fmt: skip
                    else:
                        softmax_rows(
                            mine, factor, low, high, count, maxima[i:], totals[i:], above, stride,
                            mine, some, t,
                        )  # fmt: skip
                    i += some
            weights = rounded.view(k.i32) if wide.pair == 2 else scores
            for height in k.unroll(heights):
                if height == tall:
                    add_values(
                        sums, stride, scores, weights, values, rows, panel, step, tiles, by_tiles,
                        of_height(t, height), of_height(wide, height),
                    )  # fmt: skip
            key += count

        for i in range(rows):
            row = first_row + i // group
            head = kv_head * group + i % group
            part = (row * heads + head) * MAX_SPLITS + split
            scale_of_row = k.f32(1)
            if splits > 1:
                parts[part, head_dim] = maxima[i] * factor
                parts[part, head_dim + 1] = totals[i]
            else:
                scale_of_row = 1 / totals[i] if totals[i] > 0 else k.f32(0)
            for j, tail in k.vectors(head_dim, t.width):
                v = sums.load(i * stride + j, width=t.width) * scale_of_row
                if splits > 1:
                    parts.store(part, j, value=v, mask=tail)
                else:
                    out.store(row, head, j, value=v, mask=tail)

    if by_tiles:
        if most_tokens * group > FEW_ROWS:
            tiles.release()
    if splits > 1:
        ctx.barrier()
        for row, head in ctx.parallel((q.shape[0], heads)):
            first_part = (row * heads + head) * MAX_SPLITS
            merge_parts(
                out[row, head], parts[first_part:], splits, head_dim, k.f32(1), 0.0, t.width
            )


MASKS = ("causal", "chunked_causal", "null", "sliding_window")


def _lower_attention(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    q, blocks = operands[0], operands[2]
    unsigned("mo.attention.ragged.paged", [operands[1], *operands[3:7]])
    mask = attributes.get("mask", "causal")
    window = int(attributes.get("local_window_size", -1))
    if mask not in MASKS:
        raise NotImplementedError(
            f"mo.attention.ragged.paged: mask {mask!r}; there are {', '.join(MASKS)}"
        )
    if mask in ("chunked_causal", "sliding_window") and window <= 0:
        raise NotImplementedError(
            f"mo.attention.ragged.paged: mask {mask!r} with local_window_size {window}; a positive one would fit"
        )
    heads, head_dim = q.shape[1], q.shape[2]
    kv_heads = blocks.shape[4]
    if not (isinstance(heads, int) and isinstance(head_dim, int) and isinstance(kv_heads, int)):
        raise NotImplementedError(
            f"mo.attention.ragged.paged: heads {heads}, head_dim {head_dim}, kv_heads {kv_heads}; static ones would fit"
        )
    if heads % kv_heads or blocks.shape[5] != head_dim:
        raise NotImplementedError(
            f"mo.attention.ragged.paged: {heads} heads of {head_dim} over {kv_heads} key heads of {blocks.shape[5]}"
        )
    rows = max(SPLIT_ROWS, heads)
    parts = Workspace(DType.float32, (rows * MAX_SPLITS, head_dim + 2))
    args = (
        view("result", 0, results[0]),
        view("operand", 0, q),
        view("operand", 1, operands[1], static=False),
        view("operand", 2, blocks, static=(False, True, False, True, True, True)),
        view("operand", 3, operands[3], static=False),
        view("operand", 4, operands[4], static=False),
        view("operand", 5, operands[5], static=False),
        view("operand", 6, operands[6], ((),)),
        view("operand", 7, operands[7], ((),)),
        view("workspace", 0, parts),
    )
    return KernelCall(
        attention, args, {"mask": mask, "window": max(window, 1)}, workspaces=(parts,)
    )


LOWERINGS = {"mo.attention.ragged.paged": _lower_attention}
