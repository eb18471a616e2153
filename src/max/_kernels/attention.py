"""Attention of a ragged batch of new tokens over the paged KV cache, which holds them already.

Online softmax over blocks of keys, in f32. The query heads that share a key head are worked on together: a task is some tokens'
queries of one key head. Tasks with many rows pack keys and values and multiply by register tiles, those with few rows (decoding)
read the cache in place. Where there are too few tasks for the workers, each is split over the context, and a second phase
merges the parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from max import kernel as k
from max._kernels.lowering import KernelCall, Operand, Workspace, view
from max._kernels.paged import layer_of, page_of
from max._kernels.tiles import (
    dot_rows,
    multiply_columns,
    multiply_tile,
    pack_columns,
    pack_rows,
    tile_rows,
)
from max.dtype import DType

KEYS = 128
"""Keys of a block; a block lies in one page."""
FEW_ROWS = 8
"""Up to so many rows a task reads the cache in place."""
TASK_ROWS = 48
"""Rows of a task, but for more query heads a key head."""
MAX_SPLITS = 16
SPLIT_ROWS = 64
"""Splitting is for at most so many rows of queries (or those of one token)."""
SPLIT_KEYS = 128
"""A part of the context has at least so many keys."""
LOG2_E = 1.4426950408889634
NEGATIVE_INFINITY = float("-inf")


def rows_at_once(group: int, target: k.Target) -> int:
    """Rows that a task with few of them works on together: rows past the last one are computed for nothing.

    Args:
        group: Query heads of a key head.
        target: The machine.
    """
    if target.registers < 32:
        return 2 if group % 2 == 0 else 1
    return next((count for count in (4, 3, 5, 2) if group % count == 0), 1 if group == 1 else 4)


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
    depth: int,
    keys: Any,
    first: Any,
    count: Any,
    rows: Any,
    step: Any,
    panel: Any,
    head_dim: int,
    height: int,
    width: int,
) -> None:
    """`scores[row, key] = queries[row] · keys[first + key]` for the keys of a block."""
    if rows <= FEW_ROWS:
        last = first + count - 1
        for j in range(0, count, 4):
            for i in range(0, rows, step):
                dot_rows(
                    scores,
                    i * KEYS + j,
                    KEYS,
                    queries,
                    i,
                    keys,
                    first + j,
                    last,
                    step,
                    k.f32,
                    1,
                    width,
                    1,
                )
    else:
        for j in range(0, count, 2 * width):
            for half in range(2):
                pack_rows(
                    panel,
                    half * width,
                    2 * width,
                    keys,
                    first + j + half * width,
                    first + count - 1,
                    0,
                    head_dim,
                    width,
                    1,
                    width,
                )
            for tile in range((rows + height - 1) // height):
                multiply_tile(
                    scores,
                    tile * height * KEYS + j,
                    KEYS,
                    packed,
                    tile * height * depth,
                    1,
                    height,
                    panel,
                    0,
                    head_dim,
                    True,
                    height,
                    2,
                    width,
                )


@k.inline
def add_values(
    sums: Any,
    stride: Any,
    scores: Any,
    values: Any,
    first: Any,
    count: Any,
    rows: Any,
    step: Any,
    panel: Any,
    head_dim: int,
    height: int,
    width: int,
) -> None:
    """`sums[row] += Σ scores[row, key] · values[first + key]`."""
    if rows <= FEW_ROWS:
        weights = scores.reshape(-1, KEYS)
        whole = head_dim % (4 * width) == 0
        for column in range(0, stride, 4 * width):
            columns = 4 * width if whole else head_dim - column
            for i in range(0, rows, step):
                multiply_columns(
                    sums,
                    i * stride + column,
                    stride,
                    weights,
                    i,
                    count,
                    values,
                    first,
                    column,
                    columns,
                    True,
                    step,
                    4,
                    width,
                )
    else:
        for column in range(0, stride, 2 * width):
            pack_columns(panel, 0, values, first, count, column, head_dim - column, 2, 1, width)
            for tile in range((rows + height - 1) // height):
                row = tile * height
                multiply_tile(
                    sums,
                    row * stride + column,
                    stride,
                    scores,
                    row * KEYS,
                    KEYS,
                    1,
                    panel,
                    0,
                    count,
                    False,
                    height,
                    2,
                    width,
                )


@k.inline
def softmax_row(
    scores: Any,
    start: Any,
    low: Any,
    high: Any,
    count: Any,
    row: Any,
    maxima: Any,
    totals: Any,
    sums: Any,
    stride: Any,
    width: int,
) -> None:
    """Turns a row of scores into weights, relative to the row's maximum so far, to which its sums are brought."""
    largest = k.splat(k.f32(NEGATIVE_INFINITY), width)
    for j in range(0, count, width):
        position = k.iota(k.i32, width)
        inside = (position >= k.i32(low - j)) & (position <= k.i32(high - j))
        score = k.select(
            inside, scores.load(start + j, width=width), k.splat(k.f32(NEGATIVE_INFINITY), width)
        )
        scores.store(start + j, value=score)
        largest = k.max(largest, score)
    before = maxima[row]
    now = k.max(before, k.reduce_max(largest))
    if now > NEGATIVE_INFINITY:
        total = k.splat(k.f32(0), width)
        for j in range(0, count, width):
            weight = k.exp2(scores.load(start + j, width=width) - now)
            scores.store(start + j, value=weight)
            total = total + weight
        factor = k.exp2(before - now)
        maxima[row] = now
        totals[row] = totals[row] * factor + k.reduce_add(total)
        if factor != 1:
            for j in range(0, stride, width):
                sums.store(
                    row * stride + j, value=sums.load(row * stride + j, width=width) * factor
                )
    else:
        for j in range(0, count, width):
            scores.store(start + j, value=k.splat(k.f32(0), width))


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
    """`out[token, head] = softmax(scale · q[token, head] · keys) · values`, over the keys that the mask leaves of the token's sequence."""
    heads = q.shape[1]
    head_dim = q.shape[2]
    kv_heads = blocks.shape[4]
    group = heads // kv_heads
    width = ctx.target.width(k.f32)
    height = tile_rows(ctx.target)
    block_tokens = max(TASK_ROWS // group, 1)
    max_rows = -(-max(block_tokens * group, FEW_ROWS) // height) * height
    step = rows_at_once(group, ctx.target)
    # a row of sums is a whole number of the widest column strips
    stride = -(-head_dim // (4 * width)) * (4 * width)
    # packed queries and keys are filled up to whole vectors
    depth = -(-head_dim // width) * width
    queries = ctx.scratch(k.f32, (max_rows, head_dim))
    packed = ctx.scratch(k.f32, (max_rows * depth,))
    scores = ctx.scratch(k.f32, (max_rows * KEYS,))
    sums = ctx.scratch(k.f32, (max_rows * stride,))
    maxima = ctx.scratch(k.f32, (max_rows,))
    totals = ctx.scratch(k.f32, (max_rows,))
    panel = ctx.scratch(k.f32, (max(depth, KEYS) * 2 * width,))

    batch = cache_lengths.shape[0]
    layer = layer_of(blocks, layer_index)
    page_size = blocks.shape[3]
    factor = scale[0] * LOG2_E
    tasks = k.i64(0)
    longest = k.i64(0)
    for b in range(batch):
        new = k.i64(offsets[b + 1]) - k.i64(offsets[b])
        tasks += (new + block_tokens - 1) // block_tokens * kv_heads
        longest = k.max(longest, k.i64(cache_lengths[b]) + new)
    splits = k.i64(1)
    if q.shape[0] * heads <= max(SPLIT_ROWS, heads) and tasks < 4 * ctx.num_workers:
        splits = k.min((8 * ctx.num_workers + tasks - 1) // k.max(tasks, 1), longest // SPLIT_KEYS)
        splits = k.max(k.min(splits, MAX_SPLITS), 1)

    for task, split in ctx.parallel((tasks, splits), grain=1):
        # which sequence, key head and tokens
        b = k.i64(0)
        rest = k.i64(task)
        new = k.i64(offsets[1]) - k.i64(offsets[0])
        here = (new + block_tokens - 1) // block_tokens
        while rest >= here * kv_heads:
            rest -= here * kv_heads
            b += 1
            new = k.i64(offsets[b + 1]) - k.i64(offsets[b])
            here = (new + block_tokens - 1) // block_tokens
        kv_head = rest // here
        # the last tokens see most keys: they come first
        token = (here - 1 - rest % here) * block_tokens
        tokens = k.min(block_tokens, new - token)
        rows = tokens * group
        start = k.i64(cache_lengths[b])
        total = start + new
        first_row = k.i64(offsets[b]) + token

        for i in range(rows):
            for j, tail in k.vectors(head_dim, width):
                v = q.load(
                    first_row + i // group, kv_head * group + i % group, j, width=width, mask=tail
                )
                queries.store(i, j, value=k.cast(v, k.f32) * factor, mask=tail)
            maxima[i] = NEGATIVE_INFINITY
            totals[i] = 0
            for j in range(0, stride, width):
                sums.store(i * stride + j, value=k.splat(k.f32(0), width))
        if rows > FEW_ROWS:
            for tile in range((rows + height - 1) // height):
                for r in k.static_range(0, height, width):
                    pack_rows(
                        packed,
                        tile * height * depth + r,
                        height,
                        queries,
                        tile * height + r,
                        rows - 1,
                        0,
                        head_dim,
                        min(width, height - r),
                        1,
                        width,
                    )

        # the part of the context that this task sees, in blocks that lie in one page
        begin = first_key(start + token, mask, window)
        end = last_key(start + token + tokens - 1, total, mask) + 1
        share = (end - begin + splits - 1) // splits
        key = begin + split * share
        end = k.min(end, key + share)
        while key < end:
            page = page_of(blocks, lookup_table, b, key)
            slot = key % page_size
            count = k.min(k.min(page_size - slot, KEYS), end - key)
            keys = blocks[page, 0, layer][:, kv_head]
            values = blocks[page, 1, layer][:, kv_head]
            scores_of_block(
                scores,
                queries,
                packed,
                depth,
                keys,
                slot,
                count,
                rows,
                step,
                panel,
                head_dim,
                height,
                width,
            )
            for i in range(rows):
                position = start + token + i // group
                low = first_key(position, mask, window) - key
                high = k.min(last_key(position, total, mask) - key, count - 1)
                softmax_row(
                    scores, i * KEYS, low, high, count, i, maxima, totals, sums, stride, width
                )
            add_values(
                sums,
                stride,
                scores,
                values,
                slot,
                count,
                rows,
                step,
                panel,
                head_dim,
                height,
                width,
            )
            key += count

        for i in range(rows):
            row = first_row + i // group
            head = kv_head * group + i % group
            if splits == 1:
                share_of_one = 1 / totals[i] if totals[i] > 0 else k.f32(0)
                for j, tail in k.vectors(head_dim, width):
                    out.store(
                        row,
                        head,
                        j,
                        value=sums.load(i * stride + j, width=width) * share_of_one,
                        mask=tail,
                    )
            else:
                part = (row * heads + head) * MAX_SPLITS + split
                parts[part, head_dim] = maxima[i]
                parts[part, head_dim + 1] = totals[i]
                for j, tail in k.vectors(head_dim, width):
                    parts.store(part, j, value=sums.load(i * stride + j, width=width), mask=tail)

    if splits > 1:
        ctx.barrier()
        for row, head in ctx.parallel((q.shape[0], heads)):
            part = (row * heads + head) * MAX_SPLITS
            largest = k.f32(NEGATIVE_INFINITY)
            for s in range(splits):
                largest = k.max(largest, parts[part + s, head_dim])
            total = k.f32(0)
            for s in range(splits):
                if parts[part + s, head_dim + 1] > 0:
                    total += parts[part + s, head_dim + 1] * k.exp2(
                        parts[part + s, head_dim] - largest
                    )
            share_of_one = 1 / total if total > 0 else k.f32(0)
            for j, tail in k.vectors(head_dim, width):
                v = k.splat(k.f32(0), width)
                for s in range(splits):
                    if parts[part + s, head_dim + 1] > 0:
                        weight = k.exp2(parts[part + s, head_dim] - largest) * share_of_one
                        v = k.fma(
                            parts.load(part + s, j, width=width, mask=tail),
                            k.splat(weight, width),
                            v,
                        )
                out.store(row, head, j, value=v, mask=tail)


MASKS = ("causal", "chunked_causal", "null", "sliding_window")


def _lower_attention(
    operands: Sequence[Operand], results: Sequence[Operand], attributes: Mapping[str, Any]
) -> KernelCall:
    q, blocks = operands[0], operands[2]
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
