"""Attention of a ragged batch without a cache: the rows of a text attend to the keys and values of the same text.

Used by encoders. Tasks, blocks of keys and budgets are those of `kernels.attention.paged_attention`, with
keys and values in plain tensors::

    texts    0          1                   q [total, heads, head_dim], keys and values [total, kv_heads, head_dim]
    rows   ├────┼────┤├────┼────┼──┤        a task attends with some rows of a text and one KV head
    tasks    0    1     2    3   4   × kv_heads

A bias is added to the scaled scores by the distance of key and query, `bias[head, key - query + n - 1]` for texts of up
to `n` rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from max import kernel as k
from max._backends.cpu.kernels.attention.online_softmax import LOG2_E
from max._backends.cpu.kernels.attention.paged_plan import (
    KEYS,
    ROW_THRESHOLD,
    AttentionForm,
    Plan,
    Scores,
    Scratch,
    Task,
    find_piece,
    first_key,
    last_key,
    of_height,
    paged_scratch,
    plan_paged,
    split_scale,
)
from max._backends.cpu.kernels.attention.paged_rows import (
    add_values,
    load_queries,
    pack_task,
    score_block,
    softmax_block,
    store_row,
)
from max._backends.cpu.kernels.operand_checks import check_offsets, check_size
from max._backends.kernel_call import KernelCall, Operand, view


class Grid(NamedTuple):
    """How a launch is cut into tasks.

    Args:
        tasks: Tasks.
        rows: Rows of a text that a task takes.
        longest: Rows of the longest text.
    """

    tasks: Any
    rows: Any
    longest: Any


class TextTask(NamedTuple):
    """A task, and the first row of its text.

    Args:
        task: The task.
        begin: The first row.
    """

    task: Task
    begin: Any


@k.inline
def plan_ragged_grid(input_row_offsets: k.View, p: Plan, ctx: k.Context) -> Grid:
    """The tasks of a launch: long ones where they are at least 6 per worker."""
    tasks, long_tasks, longest = k.i64(0), k.i64(0), k.i64(0)
    # the sizes of texts are data, so each worker counts tasks itself
    for b in range(input_row_offsets.shape[0] - 1):
        rows = k.i64(input_row_offsets[b + 1]) - k.i64(input_row_offsets[b])
        tasks += k.ceildiv(rows, p.short_tokens) * p.kv_heads
        long_tasks += k.ceildiv(rows, p.long_tokens) * p.kv_heads
        longest = k.max(longest, rows)
    rows_per_task = k.i64(p.short_tokens)
    if long_tasks >= 6 * ctx.num_workers:
        rows_per_task = k.i64(p.long_tokens)
        tasks = long_tasks
    return Grid(tasks, rows_per_task, longest)


@k.inline
def find_text_task(
    input_row_offsets: k.View, index: k.Value, rows_per_task: k.Value, p: Plan
) -> TextTask:
    """The task of a number."""
    piece = find_piece(input_row_offsets, index, rows_per_task, p.kv_heads)
    begin, first = k.i64(input_row_offsets[piece.sequence]), piece.first
    task = Task(
        piece.sequence, piece.kv_head, begin + first, first, piece.rows, piece.sequence_rows
    )
    return TextTask(task, begin)


@k.inline
def add_bias(
    task: Task,
    bias: k.View,
    key: k.Value,
    count: k.Integer,
    scale: k.Value,
    memory: Scratch,
    p: Plan,
) -> None:
    """Adds the bias of each row and key to the scores of a block of keys, divided by their later factor.

    Args:
        task: The task.
        bias: `[heads, 2 * n - 1]`; the middle is that of distance 0.
        key: The first key of the block in the text.
        count: Keys of the block.
        scale: The factor that scores get later.
        memory: Scratch memory.
        p: The plan.
    """
    width = p.plain.width
    middle = bias.shape[1] // 2  # [2 * n - 1]: distance 0 is in the middle
    # the softmax multiplies scores by the scale, the bias must not be
    inverse = 1 / scale
    for i in range(task.tokens * p.group):
        head = task.kv_head * p.group + i % p.group
        first = middle + key - (task.position + i // p.group)  # the bias of the block's first key
        for j, tail in k.vectors(count, width):
            added = bias.load(head, first + j, width=width, mask=tail) * inverse
            score = memory.scores.load(i * KEYS + j, width=width) + added
            memory.scores.store(i * KEYS + j, value=score)


@k.inline
def attend_text(
    text_task: TextTask, keys: k.View, values: k.View, biases: Any, scale: k.Value, tile_height: k.Value,
    memory: Scratch, p: Plan,
) -> None:  # fmt: skip
    """Attends with the rows of a task to the keys of its text that one of them sees.

    Args:
        text_task: The task.
        keys: `[total, kv_heads, head_dim]`.
        values: The same shape.
        biases: The bias, or nothing.
        scale: The factor of scores when they become weights.
        tile_height: The height of register tiles, one of the plan's.
        memory: Scratch memory.
        p: The plan.
    """
    task, begin = text_task.task, text_task.begin
    key = first_key(task.position, p)
    if k.target().batch_invariant:
        # blocks begin at multiples of `KEYS` of the text, whatever the task
        key -= key % KEYS
    end = last_key(task.position + task.tokens - 1, task.total, p) + 1
    rows = task.tokens * p.group
    while key < end:
        count = k.min(k.i64(KEYS), end - key)
        block = keys[begin + key : begin + key + count, task.kv_head]
        value_block = values[begin + key : begin + key + count, task.kv_head]
        for height in k.unroll(p.heights):
            if height == tile_height:
                score_block(block, rows, memory, of_height(p, height), value_block)
        for bias in k.unroll(biases):
            add_bias(task, bias, key, count, scale, memory, p)
        softmax_block(task, key, count, scale * LOG2_E, memory, p)
        for height in k.unroll(p.heights):
            if height == tile_height:
                add_values(value_block, rows, memory, of_height(p, height))
        key += count


@k.kernel
def attention_ragged(
    out: k.Output,
    q: k.Input,
    keys: k.Input,
    values: k.Input,
    input_row_offsets: k.Input,
    scale: k.Input,
    *biases: k.Input,
    ctx: k.Context,
    form: AttentionForm,
) -> None:
    """`out[row, head] = softmax(scale · q[row, head] · keys + bias) · values`, over the keys of the row's text that the
    mask leaves.
    """
    heads, head_dim, kv_heads = q.shape[1], q.shape[2], keys.shape[1]
    p = plan_paged(ctx.target, (q.dtype, keys.dtype), (heads, kv_heads, head_dim), form)
    memory = paged_scratch(head_dim, p, ctx)
    check_offsets("input_row_offsets", input_row_offsets, q.shape[0], p.plain.width)
    check_size("the result", out.shape[0], q.shape[0])
    check_size("keys", keys.shape[0], q.shape[0])
    check_size("values", values.shape[0], q.shape[0])
    query_factor, factor = split_scale(scale[0])
    # no sinks and slopes: nothing reads the last two
    scores = Scores(query_factor, factor * LOG2_E, scale[0], scale, scale)
    grid = plan_ragged_grid(input_row_offsets, p, ctx)
    for bias in k.unroll(biases):
        if grid.longest > bias.shape[1] // 2 + 1:
            raise ValueError(
                "a text has {} rows; the bias is for up to {}",
                grid.longest,
                bias.shape[1] // 2 + 1,
            )
    if p.matrix_tiles:
        # tasks that read in place use no matrix tiles
        if grid.longest * p.group > ROW_THRESHOLD:
            memory.tiles.configure()

    for index in ctx.parallel(grid.tasks, grain=1):
        text_task = find_text_task(input_row_offsets, index, grid.rows, p)
        task = text_task.task
        rows = task.tokens * p.group
        load_queries(q, task, k.i64(0), scores, memory, p)
        tile_height = pack_task(rows, memory, p)
        attend_text(text_task, keys, values, biases, factor, tile_height, memory, p)
        for i in range(rows):
            row, head = task.row + i // p.group, task.kv_head * p.group + i % p.group
            total = memory.state.totals[i]
            store_row(out, row, head, memory.state, i, total, head_dim, p.plain.width)

    if p.matrix_tiles:
        if grid.longest * p.group > ROW_THRESHOLD:
            memory.tiles.release()


def _lower_attention(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    """The call for `mo.attention.ragged`; heads and their size must be static."""
    q, keys, values, input_row_offsets, scale, *biases = operands
    mask, window = attributes.get("mask", "null"), int(attributes.get("local_window_size", -1))
    rows = (False, True, True)
    args = (
        view("result", 0, results[0], static=rows),
        view("operand", 0, q, static=rows),
        view("operand", 1, keys, static=rows),
        view("operand", 2, values, static=rows),
        view("operand", 3, input_row_offsets, static=False),
        view("operand", 4, scale, ((),)),
        *(view("operand", 5 + i, bias, static=(True, False)) for i, bias in enumerate(biases)),
    )
    params = {"form": AttentionForm(mask, max(window, 1))}
    return KernelCall(attention_ragged, args, params)


LOWERINGS = {"mo.attention.ragged": _lower_attention}
