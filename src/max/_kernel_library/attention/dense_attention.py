"""Attention over keys and values that lie in plain tensors: `softmax(scale · q · kᵀ + mask) · v`, for `mok.attention`.

Scores never go to memory. A task is a block of queries of one batch index; the query heads that share keys and values are rows of the
same task. Keys come in blocks, which are packed with their values, in scratch; then each row tile is multiplied by the keys, turned into
weights while its scores are in the L1 cache, and multiplied by the values. The softmax is online, in f32.

Tasks with few rows (decoding) read keys and values in place; where there are too few tasks for the workers each is split over the
keys, and a second phase merges the parts. All operands are strided views, contiguous along their last axis.

Where operands are bf16 and the machine multiplies pairs of them, it does so: weights (not their total) are then rounded to bf16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from max import kernel as k
from max._kernel_library.attention.dense_rows import few_rows, many_rows, plan
from max._kernel_library.attention.online_softmax import (
    MAX_SPLITS,
    SPLIT_KEYS,
    SPLIT_ROWS,
    merge_parts,
)
from max._kernel_library.lowering import KernelCall, Operand, Workspace, view
from max._kernel_library.tiles import amx_tiles
from max.dtype import DType

TASK_ROWS = 264
"""Most rows of a task; whole row tiles of them."""
LEAST_ROWS = 48
"""Rows of a task where that makes more tasks than the workers need."""


@k.inline
def find_place(place: Any, index: Any, x: Any, rank: int) -> None:
    """The coordinates of an index along the first axes of a view."""
    rest = k.i64(index)
    for reverse in k.static_range(rank):
        axis = rank - 1 - reverse
        place[axis] = rest % x.shape[axis]
        rest = rest // x.shape[axis]


@k.inline
def at(x: Any, place: Any, rank: int) -> Any:
    """The part of a view at the coordinates of its first axes."""
    for axis in k.static_range(rank):
        x = x[place[axis]]
    return x


@k.kernel
def attention_dense(
    out: k.Output,
    q: k.Input,
    keys: k.Input,
    values: k.Input,
    parts: k.InOut,
    *masks: k.Input,
    ctx: k.Context,
    scale: float,
    fills: tuple[float | None, ...],
    columns: bool,
) -> None:
    """`out[b, g, i] = softmax(scale · q[b, g, i] · keys[b] + masks[b, g, i]) · values[b]`, with any number of batch axes.

    Keys are `[…, keys, size]`, or with `columns` `[…, size, keys]`.
    """
    rank = q.rank - 3
    group = q.shape[rank]
    size = q.shape[rank + 2]
    length = values.shape[rank]
    width = values.shape[rank + 1]
    row_count = group * q.shape[rank + 1]
    p = plan(
        ctx.target,
        (q.dtype, keys.dtype, values.dtype, out.dtype),
        (size, width),
        scale,
        fills,
        columns,
    )
    t = p.plain
    most_rows = TASK_ROWS // t.height * t.height
    queries = ctx.scratch(k.f32, (max(p.few, 1), size))
    unpacked = ctx.scratch(k.bf16 if p.left.pair == 2 else k.f32, (most_rows, size))
    packed = ctx.scratch(p.left.lane, (most_rows * p.depth,))
    key_panels = ctx.scratch(p.left.lane, (p.keys * p.depth,))
    value_panels = ctx.scratch(p.right.lane, (p.keys // p.right.pair * p.stride,))
    # rows go through the softmax by fours: a row tile takes so many places
    scores = ctx.scratch(k.f32, (max(p.few, p.places) * p.keys,))
    rounded = ctx.scratch(k.bf16, (p.places * p.keys if p.right.pair == 2 else 1,))
    most = max(most_rows // t.height * p.places, p.few)
    sums = ctx.scratch(k.f32, (most * p.stride,))
    maxima = ctx.scratch(k.f32, (most,))
    totals = ctx.scratch(k.f32, (most,))
    coordinates = k.tile(k.i64, (max(rank, 1),), fill=0)
    next_coordinates = k.tile(k.i64, (max(rank, 1),), fill=0)

    batches = k.i64(1)
    for axis in k.static_range(rank):
        batches = batches * q.shape[axis]
    wanted = k.ceildiv(batches * row_count, 4 * ctx.num_workers)
    blocks = k.max(k.ceildiv(row_count, k.min(k.max(wanted, LEAST_ROWS), most_rows)), 1)
    task_rows = k.ceildiv(k.ceildiv(row_count, blocks), t.height) * t.height
    splits = k.i64(1)
    if ctx.target.batch_invariant:
        pass  # the parts would depend on how many there are
    elif batches * row_count <= SPLIT_ROWS and batches * blocks < 4 * ctx.num_workers:
        splits = k.ceildiv(8 * ctx.num_workers, k.max(batches * blocks, 1))
        splits = k.max(k.min(k.min(splits, length // SPLIT_KEYS), MAX_SPLITS), 1)
    share = k.ceildiv(length, splits)
    matrix_tiles = k.matrix_tiles(amx_tiles.SHAPES)
    if p.by_tiles:
        if task_rows > p.few:
            matrix_tiles.configure()

    for task, split in ctx.parallel((batches * blocks, splits), grain=1):
        find_place(coordinates, task // blocks, q, rank)
        my_q = at(q, coordinates, rank)
        my_keys = at(keys, coordinates, rank)
        my_values = at(values, coordinates, rank)
        my_masks = tuple(at(mask, coordinates, rank) for mask in masks)
        my_out = at(out, coordinates, rank)
        next_task = k.min(k.i64(task) + ctx.num_workers, batches * blocks - 1)
        find_place(next_coordinates, next_task // blocks, q, rank)
        next_q = at(q, next_coordinates, rank)[0, next_task % blocks * task_rows // group :]
        ahead = (next_q, at(keys, next_coordinates, rank), at(values, next_coordinates, rank))
        first = task % blocks * task_rows
        rows = k.min(task_rows, row_count - first)
        begin = k.min(split * share, length)
        end = k.min(length, begin + share)
        few = rows <= p.few
        if few:
            few_rows(
                sums,
                maxima,
                totals,
                my_q,
                my_keys,
                my_values,
                my_masks,
                first,
                rows,
                begin,
                end,
                queries,
                scores,
                p,
            )
        else:
            many_rows(
                sums,
                maxima,
                totals,
                my_q,
                my_keys,
                my_values,
                my_masks,
                first,
                rows,
                begin,
                end,
                unpacked,
                packed,
                key_panels,
                value_panels,
                scores,
                rounded,
                ahead,
                matrix_tiles,
                p,
            )
        for i in range(rows):
            row = first + i
            place = i if few else i // t.height * p.places + i % t.height
            part = (k.i64(task // blocks) * row_count + row) * MAX_SPLITS + split
            by = k.f32(1)
            if splits > 1:
                parts[part, width] = maxima[place]
                parts[part, width + 1] = totals[place]
            else:
                by = 1 / totals[place]
            for j, tail in k.vectors(width, t.width):
                v = sums.load(place * p.stride + j, width=t.width) * by
                if splits > 1:
                    parts.store(part, j, value=v, mask=tail)
                elif length > 0:
                    my_out.store(row % group, row // group, j, value=v, mask=tail)
                else:
                    # a product over nothing is 0
                    zero = k.splat(k.f32(0), t.width)
                    my_out.store(row % group, row // group, j, value=zero, mask=tail)

    if p.by_tiles:
        if task_rows > p.few:
            matrix_tiles.release()
    if splits > 1:
        ctx.barrier()
        for batch, row in ctx.parallel((batches, row_count)):
            find_place(coordinates, batch, q, rank)
            target = at(out, coordinates, rank)[row % group, row // group]
            found = parts[(batch * row_count + row) * MAX_SPLITS :]
            merge_parts(target, found, splits, width, p.factor, float("nan"), t.width)


def _lower_attention(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    """The call for operands as the kernel takes them, with the group as an axis of its own."""
    q, keys, values, *masks = operands
    rank = len(q.shape)
    known = (*[False] * (rank - 3), True, False, True)
    columns = bool(attributes.get("columns", False))
    flat = (*[False] * (rank - 3), False, True)
    parts = Workspace(DType.float32, (SPLIT_ROWS * MAX_SPLITS, values.shape[-1] + 2))
    args = (
        view("result", 0, results[0], static=known),
        view("operand", 0, q, static=known),
        view("operand", 1, keys, static=(*flat[:-2], columns, not columns)),
        view("operand", 2, values, static=flat),
        view("workspace", 0, parts),
        *(
            view("operand", 3 + i, mask, static=known[:-1] + (False,))
            for i, mask in enumerate(masks)
        ),
    )
    params = {
        "scale": float(attributes["scale"]),
        "fills": tuple(attributes.get("fills", ())),
        "columns": columns,
    }
    return KernelCall(attention_dense, args, params, workspaces=(parts,))


LOWERINGS = {"mok.attention": _lower_attention}
