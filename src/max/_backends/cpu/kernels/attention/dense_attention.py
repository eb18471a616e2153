"""Attention over keys and values in plain tensors: `softmax(scale · q · kᵀ + mask) · v`, for `mok.attention`.

The matrix of scores is not materialized. A task is a block of queries of one batch index; the query heads that share
keys and values are rows of the same task. The loops, from the outside: task → block of keys, packed with its values →
row tile → scores, weights, products with the values. The softmax is online, in f32. Tasks with few rows (decoding) read
keys and values in place. With fewer than 4 tasks per worker each task is split over the keys, and a second phase merges
the parts. All operands are strided views, contiguous along their last axis.

Register budget: that of `kernels.tiles.tiling.Tiling`. Cache budget: the packed keys and values of a block
(`dense_plan.BLOCK_ELEMENTS`) stay in the L2 cache, the scores of a row tile (12 × 512 × 4 bytes, 24 KB) in the L1
cache.

bf16 operands are multiplied in pairs where the target can: weights (not their total) are then rounded to bf16.

Where the graph rounds its probabilities, weights are divided by their total before they are rounded and summed: a task
with more keys than a block computes its scores twice, first for the totals, and tasks are not split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from max import kernel as k
from max._backends.cpu.kernels.attention.dense_plan import (
    DenseForm,
    Plan,
    Scratch,
    Task,
    plan_dense,
)
from max._backends.cpu.kernels.attention.dense_rows import attend_in_place, attend_packed
from max._backends.cpu.kernels.attention.online_softmax import (
    MAX_SPLITS,
    SPLIT_KEYS,
    SPLIT_ROWS,
    RowState,
    merge_parts,
    round_up,
)
from max._backends.cpu.kernels.tiles import amx_tiles
from max._backends.kernel_call import KernelCall, Operand, Workspace, view
from max.dtype import DType

TASK_ROWS = 264
"""The maximum number of rows of a task, in whole row tiles."""
MIN_TASK_ROWS = 48
"""Rows of a task are not cut below this to make more tasks."""


class Grid(NamedTuple):
    """How a launch is cut into tasks.

    Args:
        batches: Batch indices.
        rows: Rows of a batch index.
        blocks: Tasks of a batch index.
        task_rows: Rows of a task.
        splits: Parts of a task over the keys.
        share: Keys of a part.
    """

    batches: Any
    rows: Any
    blocks: Any
    task_rows: Any
    splits: Any
    share: Any


@k.inline
def unflatten(coordinates: k.View, index: k.Value, x: k.View, rank: int) -> None:
    """Writes the coordinates of a flat index along the first axes of a view."""
    remaining = k.i64(index)
    for reverse in k.static_range(rank):
        # the last axis changes fastest
        axis = rank - 1 - reverse
        coordinates[axis] = remaining % x.shape[axis]
        remaining = remaining // x.shape[axis]


@k.inline
def part_at(x: Any, coordinates: Any, rank: int) -> Any:
    """The part of a view at the coordinates of its first axes."""
    for axis in k.static_range(rank):
        x = x[coordinates[axis]]
    return x


@k.inline
def plan_dense_grid(q: k.View, length: k.Value, max_rows: int, p: Plan, ctx: k.Context) -> Grid:
    """The tasks of a launch.

    Args:
        q: `[…, group, queries, size]`.
        length: Keys.
        max_rows: The maximum number of rows of a task.
        p: The plan.
        ctx: The context.
    """
    rank = q.rank - 3
    rows = q.shape[rank] * q.shape[rank + 1]
    batches = k.i64(1)
    for axis in k.static_range(rank):
        batches = batches * q.shape[axis]
    # whole row tiles, so that only the last task of a batch index has a partial tile
    height = p.plain.height
    # at least 4 tasks per worker where tasks stay above the minimum
    even_rows = k.ceildiv(batches * rows, 4 * ctx.num_workers)
    blocks = k.max(k.ceildiv(rows, k.min(k.max(even_rows, MIN_TASK_ROWS), max_rows)), 1)
    task_rows = k.ceildiv(k.ceildiv(rows, blocks), height) * height
    splits = k.i64(1)
    if ctx.target.batch_invariant or p.weight_dtype is not None:
        pass  # parts depend on the number of tasks, and rounded weights on the total of all parts
    elif batches * rows <= SPLIT_ROWS and batches * blocks < 4 * ctx.num_workers:
        splits = k.ceildiv(8 * ctx.num_workers, k.max(batches * blocks, 1))
        splits = k.max(k.min(k.min(splits, length // SPLIT_KEYS), MAX_SPLITS), 1)
    return Grid(batches, rows, blocks, task_rows, splits, k.ceildiv(length, splits))


@k.inline
def dense_scratch(max_rows: int, size: int, width: int, p: Plan, ctx: k.Context) -> Scratch:
    """The scratch memory of a worker.

    Args:
        max_rows: The maximum number of rows of a task.
        size: The size of a query.
        width: The size of a value.
        p: The plan.
        ctx: The context.
    """
    queries = ctx.scratch(k.f32, (max(p.row_threshold, 1), size))
    unpacked = ctx.scratch(k.bf16 if p.left.pair == 2 else k.f32, (max_rows, size))
    packed = ctx.scratch(p.left.lane, (max_rows * p.depth,))
    key_panels = ctx.scratch(p.left.lane, (p.keys * p.depth,))
    value_panels = ctx.scratch(p.right.lane, (p.keys // p.right.pair * p.stride,))
    # rows go through the softmax by fours: a row tile takes `state_rows` rows
    max_scores = max(p.row_threshold * p.in_place.keys, p.state_rows * p.keys)
    max_scores = round_up(max_scores, p.in_place.keys)  # whole rows of either plan
    scores = ctx.scratch(k.f32, (max_scores,))
    rounded = ctx.scratch(k.bf16, (p.state_rows * p.keys if p.right.pair == 2 else 1,))
    state_rows = max(max_rows // p.plain.height * p.state_rows, p.row_threshold)
    sums = ctx.scratch(k.f32, (state_rows * p.stride,))
    maxima = ctx.scratch(k.f32, (state_rows,))
    totals = ctx.scratch(k.f32, (state_rows,))
    state = RowState(maxima, totals, sums, p.stride, width)
    tiles = k.matrix_tiles(amx_tiles.SHAPES)
    return Scratch(
        queries, unpacked, packed, key_panels, value_panels, scores, rounded, state, tiles
    )


@k.inline
def is_void(total: k.Value, guard: str) -> Any:
    """Whether a row of this total of weights is 0; see `guard` of `Plan`."""
    if guard == "nan":
        return not total > 0
    return guard == "masked" and total == 0


@k.inline
def store_rows(
    out: k.View,
    parts: k.View,
    task: Task,
    part: k.Value,
    splits: k.Value,
    state: RowState,
    p: Plan,
) -> None:
    """Stores the results of a task, or where it is split its sums, maxima and totals.

    Args:
        out: `[group, queries, width]`.
        parts: `[rows * MAX_SPLITS, width + 2]`.
        task: The task.
        part: The part of the task's first row.
        splits: Parts of a task.
        state: The state of its rows.
        p: The plan.
    """
    t, group, width = p.plain, task.q.shape[0], task.values.shape[1]
    in_place = task.rows <= p.row_threshold
    for i in range(task.rows):
        row = task.first + i
        # packed tiles keep `state_rows` rows each, rows read in place follow each other
        state_row = i if in_place else i // t.height * p.state_rows + i % t.height
        part_row = part + i * MAX_SPLITS
        # the parts of a row are adjacent, those of the next row `MAX_SPLITS` further
        scale = k.f32(1)
        if splits > 1:
            parts[part_row, width] = state.maxima[state_row]
            parts[part_row, width + 1] = state.totals[state_row]
        elif p.weight_dtype is None:
            # rounded weights were divided by their total before they were summed
            scale = 1 / state.totals[state_row]
        for j, tail in k.vectors(width, t.width):
            v = state.sums.load(state_row * p.stride + j, width=t.width) * scale
            if splits > 1:
                parts.store(part_row, j, value=v, mask=tail)
            elif task.values.shape[0] > 0 and not is_void(state.totals[state_row], p.guard):
                out.store(row % group, row // group, j, value=v, mask=tail)
            else:
                # a sum over no keys is 0, and so is one whose weights are guarded
                zero = k.splat(k.f32(0), t.width)
                out.store(row % group, row // group, j, value=zero, mask=tail)


@k.kernel
def attention_dense(
    out: k.Output,
    q: k.Input,
    keys: k.Input,
    values: k.Input,
    parts: k.InOut,
    *masks: k.Input,
    ctx: k.Context,
    form: DenseForm,
) -> None:
    """`out[b, g, i] = softmax(scale · q[b, g, i] · keys[b] + masks[b, g, i]) · values[b]`, with any number of batch
    axes.

    Keys are `[…, keys, size]`, or with `form.columns` `[…, size, keys]`.
    """
    rank = q.rank - 3
    group, size = q.shape[rank], q.shape[rank + 2]
    length, width = values.shape[rank], values.shape[rank + 1]
    dtypes = (q.dtype, keys.dtype, values.dtype, out.dtype)
    p = plan_dense(ctx.target, dtypes, (size, width), form)
    max_rows = TASK_ROWS // p.plain.height * p.plain.height
    memory = dense_scratch(max_rows, size, width, p, ctx)
    coordinates = k.tile(k.i64, (max(rank, 1),), fill=0)
    next_coordinates = k.tile(k.i64, (max(rank, 1),), fill=0)
    grid = plan_dense_grid(q, length, max_rows, p, ctx)
    blocks, task_rows = grid.blocks, grid.task_rows
    # tasks that read keys and values in place use no matrix tiles
    if p.matrix_tiles:
        if task_rows > p.row_threshold:
            memory.tiles.configure()

    for index, split in ctx.parallel((grid.batches * blocks, grid.splits), grain=1):
        unflatten(coordinates, index // blocks, q, rank)
        first = index % blocks * task_rows
        begin = k.min(split * grid.share, length)
        task = Task(
            part_at(q, coordinates, rank), part_at(keys, coordinates, rank),
            part_at(values, coordinates, rank), tuple(part_at(x, coordinates, rank) for x in masks),
            first, k.min(task_rows, grid.rows - first), begin, k.min(length, begin + grid.share),
        )  # fmt: skip
        # the next task of this worker's share
        next_index = k.min(k.i64(index) + 1, grid.batches * blocks - 1)
        unflatten(next_coordinates, next_index // blocks, q, rank)
        # row r is query r // group
        next_row = next_index % blocks * task_rows // group
        next_q = part_at(q, next_coordinates, rank)[0, next_row:]
        next_keys = part_at(keys, next_coordinates, rank)
        ahead = (next_q, next_keys, part_at(values, next_coordinates, rank))
        if task.rows <= p.row_threshold:
            attend_in_place(task, memory, p.in_place)
        else:
            attend_packed(task, memory, ahead, p)
        part = (k.i64(index // blocks) * grid.rows + first) * MAX_SPLITS + split
        target = part_at(out, coordinates, rank)
        store_rows(target, parts, task, part, grid.splits, memory.state, p)

    if p.matrix_tiles:
        if task_rows > p.row_threshold:
            memory.tiles.release()
    if grid.splits > 1:
        # parts of a row come from different workers
        ctx.barrier()
        for batch, row in ctx.parallel((grid.batches, grid.rows)):
            unflatten(coordinates, batch, q, rank)
            target = part_at(out, coordinates, rank)[row % group, row // group]
            row_parts = parts[(batch * grid.rows + row) * MAX_SPLITS :]  # [splits, width + 2]
            empty = 0.0 if p.guard else float("nan")
            nan_is_zero = p.guard == "nan"
            merge_parts(target, row_parts, grid.splits, p.factor, empty, p.plain.width, nan_is_zero)


def _lower_attention(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    """The call for operands as the kernel takes them, with the group as an axis of its own."""
    q, keys, values, *masks = operands
    rank = len(q.shape)
    sizes = (*[False] * (rank - 3), True, False, True)
    columns = bool(attributes.get("columns", False))
    flat = (*[False] * (rank - 3), False, True)
    roundings = attributes.get("roundings", (None,) * (len(masks) + 2))
    # [rows * MAX_SPLITS, sums + maximum + total]; only launches of up to `SPLIT_ROWS` rows are split
    parts = Workspace(DType.float32, (SPLIT_ROWS * MAX_SPLITS, values.shape[-1] + 2))
    args = (
        view("result", 0, results[0], static=sizes),
        view("operand", 0, q, static=sizes),
        view("operand", 1, keys, static=(*flat[:-2], columns, not columns)),
        view("operand", 2, values, static=flat),
        view("workspace", 0, parts),
        *(
            view("operand", 3 + i, mask, static=sizes[:-1] + (False,))
            for i, mask in enumerate(masks)
        ),
    )
    form = DenseForm(
        float(attributes["scale"]),
        tuple(attributes.get("fills", ())),
        tuple(None if dtype is None else k.scalar_type(dtype) for dtype in roundings),
        columns,
        attributes.get("guard", ""),
    )
    return KernelCall(attention_dense, args, {"form": form}, workspaces=(parts,))


LOWERINGS = {"mok.attention": _lower_attention}
