"""Prefill over a cache of latents (MLA): attention to one chunk of the context, whose keys and values are expanded.

A key of a chunk has two parts: one without positions, expanded in a buffer, and a rotated one, which all heads share
and which is the end of the cached latent. A task is some rows of a sequence and one head, as in
`kernels.attention.ragged_attention`; it joins both parts of a block of keys in scratch memory. The softmax
continues over the chunks: `info` keeps the maximum and the total of each row::

    buffer   row buffer_offsets[b] + i   is token  cache_offsets[b] + i  of sequence b
    key      │ keys[row, head]: size - rotated │ latent[-rotated:] │

Cache budget: joined keys, `KEYS` × head_dim elements (48 KB for 192 in bf16), and the values of the block stay in the
L2 cache. `mo.latents.plan.ragged` chooses between this path and attention to the latents themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from max import kernel as k
from max._backends.cpu.kernels.attention.cache_formats import copy_elements
from max._backends.cpu.kernels.attention.online_softmax import LOG2_E, NEGATIVE_INFINITY
from max._backends.cpu.kernels.attention.paged_cache import (
    CACHE_DIMS,
    PagedCache,
    check_batch,
    layer_of,
    page_of,
)
from max._backends.cpu.kernels.attention.paged_plan import (
    KEYS,
    ROW_THRESHOLD,
    AttentionForm,
    Scores,
    Scratch,
    Task,
    find_piece,
    last_key,
    paged_scratch,
    plan_paged,
    split_scale,
)
from max._backends.cpu.kernels.attention.paged_rows import (
    attend_block,
    load_queries,
    pack_task,
    store_row,
)
from max._backends.cpu.kernels.attention.ragged_attention import plan_ragged_grid
from max._backends.cpu.kernels.operand_checks import check_rising, check_size
from max._backends.kernel_call import KernelCall, Operand, view


@k.inline
def resume(
    task: Task, out: k.View, info: k.View, factor: k.Value, memory: Scratch, width: int
) -> None:
    """Sets the softmax state of a task's rows to that of the earlier chunks.

    Args:
        task: The task.
        out: The results of the earlier chunks, `[rows, heads, value_size]`.
        info: Maximum and total of each row, `[rows, heads, 2]`.
        factor: The factor of products in the exponent of 2.
        memory: Scratch memory.
        width: Lanes of a vector.
    """
    state, head = memory.state, task.kv_head
    for i in range(task.tokens):
        total = k.cast(info[task.row + i, head, 1], k.f32)
        # stored maxima are scaled scores, those of the state are products before the factor
        top = k.cast(info[task.row + i, head, 0], k.f32) * LOG2_E / factor
        # a row that has seen no key has total 0, and its stored maximum means nothing
        state.maxima[i] = top if total > 0 else k.f32(NEGATIVE_INFINITY)
        state.totals[i] = total
        for j, mask in k.vectors(out.shape[2], width):
            # results are divided by their total: this undoes it
            before = k.cast(out.load(task.row + i, head, j, width=width, mask=mask), k.f32)
            state.sums.store(i * state.stride + j, value=before * total, mask=mask)


@k.inline
def check_buffer(
    buffer_offsets: k.View, keys: k.View, values: k.View, batch: k.Integer, width: int
) -> None:
    """Raises where the rows of sequences are not in the buffers of keys and values.

    Args:
        buffer_offsets: The first row of each sequence, and the end of the last one.
        keys: The buffer of keys.
        values: The buffer of values.
        batch: The number of sequences.
        width: Lanes of a vector.
    """
    check_size("buffer_row_offsets", buffer_offsets.shape[0], batch + 1)
    check_rising("buffer_row_offsets", buffer_offsets, width)
    if k.i64(buffer_offsets[batch]) > keys.shape[0] or values.shape[0] != keys.shape[0]:
        raise ValueError(
            "buffer_row_offsets end at {}; there are {} keys and {} values",
            buffer_offsets[batch],
            keys.shape[0],
            values.shape[0],
        )


class ExpandedChunk(NamedTuple):
    """The operands of a chunk of the context.

    Args:
        q: The queries, `[rows, heads, size]`.
        keys: The buffer of keys without positions, `[buffer, heads, size - rotated]`.
        values: The buffer of values, `[buffer, heads, value_size]`.
        input_row_offsets: The first row of each sequence in the queries, `[batch + 1]`.
        buffer_offsets: The first row of each sequence in the buffers, `[batch + 1]`.
        cache_offsets: The first token of each sequence's chunk, `[batch]`.
    """

    q: k.Input
    keys: k.Input
    values: k.Input
    input_row_offsets: k.Input
    buffer_offsets: k.Input
    cache_offsets: k.Input


@k.inline
def join_keys(
    joined_keys: k.View, keys: k.View, row: k.Value, task: Task, cache: PagedCache, layer: k.Integer, token: k.Value,
    width: int,
) -> None:  # fmt: skip
    """Writes both parts of each key of a block.

    Args:
        joined_keys: The keys, `[count, head_dim]`.
        keys: The buffer of the parts without positions, `[buffer, heads, size]`.
        row: The row of the first key in the buffer.
        task: The task.
        cache: The cache, whose latents end with the rotated parts.
        layer: The layer.
        token: The first token of the block in the sequence.
        width: Lanes of a vector.
    """
    blocks, plain = cache.blocks, keys.shape[2]
    for i in range(joined_keys.shape[0]):
        page = page_of(blocks, cache.lookup_table, task.sequence, token + i)
        # latents have a single head, kind 0 of the page
        latent = blocks[page, 0, layer, (token + i) % blocks.shape[3], 0]
        rotated = latent[latent.shape[0] - (joined_keys.shape[1] - plain) :]  # [rotated]
        copy_elements(
            joined_keys[i][:plain], keys[row + i, task.kv_head], width
        )  # [size - rotated]
        copy_elements(joined_keys[i][plain:], rotated, width)


@k.kernel
def latent_prefill(
    out: k.Output,
    info: k.Output,
    chunk: ExpandedChunk,
    cache: PagedCache,
    layer_index: k.Input,
    scale: k.Input,
    *previous: k.Input,
    ctx: k.Context,
    causal: bool,
) -> None:
    """`out[row, head] = softmax(scale · q[row, head] · keys) · values` over this chunk and the earlier ones.

    `info` `[rows, heads, 2]` has the maximum and the total of each row. `previous` is empty, or `out` and `info` of the
    earlier chunks.
    """
    q, keys, values, input_row_offsets, buffer_offsets, cache_offsets = chunk
    cache_lengths = cache.cache_lengths
    heads, head_dim, value_size = q.shape[1], q.shape[2], values.shape[2]
    batch = cache_lengths.shape[0]
    # cross: the chunk may end before the row's position, which is then past its last key
    form = AttentionForm("causal" if causal else "null", value_size=value_size, cross=True)
    p = plan_paged(ctx.target, (q.dtype, keys.dtype), (heads, heads, head_dim), form)
    width = p.plain.width
    memory = paged_scratch(head_dim, p, ctx)
    # both parts of each key of a block, side by side
    joined = ctx.scratch(keys.dtype, (KEYS, head_dim))
    layer = layer_of(cache.blocks, layer_index)
    check_batch(input_row_offsets, q.shape[0], cache, width, 1)
    check_size("cache_offsets", cache_offsets.shape[0], batch)
    # data of tensors decides what is read: all of it is checked before the first access
    check_buffer(buffer_offsets, keys, values, batch, width)
    check_size("the result", out.shape[0], q.shape[0])
    check_size("the softmax's state", info.shape[0], q.shape[0])
    for part in previous:
        check_size("a result of earlier chunks", part.shape[0], q.shape[0])
    query_factor, factor = split_scale(scale[0])
    factor *= LOG2_E
    # no sinks and slopes: nothing reads the last two
    scores = Scores(query_factor, factor, scale[0], scale, scale)
    grid = plan_ragged_grid(input_row_offsets, p, ctx)
    if p.matrix_tiles:
        if grid.longest > ROW_THRESHOLD:
            memory.tiles.configure()

    for index in ctx.parallel(grid.tasks, grain=1):
        piece = find_piece(input_row_offsets, index, grid.rows, p.kv_heads)
        sequence, head = piece.sequence, piece.kv_head
        first = k.i64(cache_offsets[sequence])
        begin = k.i64(buffer_offsets[sequence])
        total = k.i64(buffer_offsets[sequence + 1]) - begin
        # positions are counted from the chunk's first token
        position = k.i64(cache_lengths[sequence]) + piece.first - first
        row = k.i64(input_row_offsets[sequence]) + piece.first
        task = Task(sequence, head, row, position, piece.rows, total)
        load_queries(q, task, k.i64(0), scores, memory, p)
        if len(previous) == 2:
            resume(task, previous[0], previous[1], factor, memory, width)
        tile_height = pack_task(task.tokens, memory, p)
        key = k.i64(0)
        # causal: the last row of the task sees most keys
        end = last_key(position + task.tokens - 1, total, p) + 1
        while key < end:
            count = k.min(k.i64(KEYS), end - key)
            join_keys(joined[:count], keys, begin + key, task, cache, layer, first + key, width)
            block = values[begin + key : begin + key + count, head]
            attend_block(task, joined[:count], block, key, scores, tile_height, memory, p)
            key += count
        state = memory.state
        for i in range(task.tokens):
            weight_total = state.totals[i]
            # as scaled scores, which `resume` reads
            info[task.row + i, head, 0] = state.maxima[i] * factor / LOG2_E
            info[task.row + i, head, 1] = weight_total
            store_row(out, task.row + i, head, state, i, weight_total, value_size, width)

    if p.matrix_tiles:
        if grid.longest > ROW_THRESHOLD:
            memory.tiles.release()


def _lower_prefill(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    """The call for `mo.mla.prefill.ragged.paged`; heads and their sizes must be static."""
    previous = operands[11:]
    rows = (False, True, True)
    args = (
        view("result", 0, results[0], static=rows),
        view("result", 1, results[1], static=rows),
        *(view("operand", i, operands[i], static=rows) for i in range(3)),
        *(view("operand", i, operands[i], static=False) for i in range(3, 6)),
        view("operand", 6, operands[6], static=CACHE_DIMS),
        view("operand", 7, operands[7], static=False),
        view("operand", 8, operands[8], static=False),
        view("operand", 9, operands[9], ((),)),
        view("operand", 10, operands[10], ((),)),
        *(view("operand", 11 + i, x, static=rows) for i, x in enumerate(previous)),
    )
    return KernelCall(latent_prefill, args, {"causal": bool(attributes["causal"])})


LOWERINGS = {"mo.mla.prefill.ragged.paged": _lower_prefill}
