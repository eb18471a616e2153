"""Attention of a ragged batch of new tokens over the paged KV cache, where their keys and values are stored already.

A task is the queries of some tokens of a sequence for one KV head; its rows are these queries, token by token, in each
the query heads that share the KV head. The loops, from the outside: task → block of up to `KEYS` keys within a page →
scores, softmax, values. The softmax is online, in f32.

- Tasks of up to `ROW_THRESHOLD` rows (decoding) read keys and values in place.
- Tasks of more rows pack keys and values into panels and multiply by register tiles.
- With fewer than 4 tasks per worker each task is split over the context, and a second phase merges the parts::

    sequence   0          1                        blocks [pages, 2, layers, page_size, kv_heads, head_dim]
    tokens   ├────┼────┤├────┼────┼──┤             a task reads pages lookup_table[sequence, position // page_size]
    tasks      0    1     2    3   4   × kv_heads   × splits of the context

On batch-invariant targets (`Target.batch_invariant`) all tasks pack keys and values, those with few rows for lower
register tiles; no task is split, and blocks of keys begin at multiples of `KEYS` of their page.

Where queries and cache are bf16 and the target multiplies pairs of bf16, tasks with many rows do so: weights (not their
total) are rounded to bf16, sums are f32.

A cache of `i8` has a scale for each key and value (`cache_formats`). The products are those of the codes; the scores
are then multiplied by the scales of the keys, the weights by the scales of the values.

Register budget: in place, rows × keys per pass of `paged_plan.rows_per_pass` and `vectors_per_pass` (4 × 4
accumulators, 4 vectors of queries and 2 of keys: 22 of 32 registers; 3 × 2, 3 and 2: 11 of 16); packed, that of
`kernels.tiles.tiling.Tiling`. Cache budget: the panel of keys or values, two vectors wide (16 KB of f32 for
heads of 128 with AVX-512), and the scores of a register tile (12 × `KEYS` × 4 bytes, 6 KB) stay in the L1 cache; a
block of keys and values (2 × `KEYS` × 128 elements, 64 KB in bf16) in the L2 cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from max import kernel as k
from max._backends.cpu.kernels.attention.cache_formats import elements_of, scales_of
from max._backends.cpu.kernels.attention.online_softmax import (
    LOG2_E,
    MAX_SPLITS,
    SPLIT_KEYS,
    SPLIT_ROWS,
    merge_parts,
)
from max._backends.cpu.kernels.attention.paged_cache import (
    CACHE_DIMS,
    BatchRows,
    PagedCache,
    check_ancestors,
    check_batch,
    layer_of,
    page_of,
)
from max._backends.cpu.kernels.attention.paged_plan import (
    KEYS,
    ROW_THRESHOLD,
    AttentionForm,
    Plan,
    Scores,
    Scratch,
    Task,
    Trees,
    find_piece,
    first_key,
    last_key,
    paged_scratch,
    plan_paged,
    scales_before_softmax,
    split_scale,
)
from max._backends.cpu.kernels.attention.paged_rows import (
    attend_block,
    copy_scales,
    load_queries,
    pack_task,
)
from max._backends.cpu.kernels.operand_checks import check_rising, check_size
from max._backends.kernel_call import KernelCall, Operand, Workspace, view
from max.dtype import DType


class Batch(NamedTuple):
    """A ragged batch and its pages.

    Args:
        input_row_offsets: The first row of each sequence, and the number of rows.
        cache: The cache and its sequences.
        layer: The layer.
        key_offsets: The offsets of the keys that are not counted in the cached lengths; those of the rows but in cross
            attention.
        ancestors: The rows of its sequence that each row of a tree sees (`check_ancestors`); None: there are no trees.
    """

    input_row_offsets: Any
    cache: PagedCache
    layer: Any
    key_offsets: Any
    ancestors: Any = None


class ScoreOperands(NamedTuple):
    """The operands that products of queries and keys become scores with.

    Args:
        scale: The scale of the products, `[1]`.
        sinks: The logit of each head's sink, `[heads]`; not read where the call has none.
        slopes: The slope of each head's bias, `[heads]`; not read where the mask has none.
    """

    scale: k.Input
    sinks: k.Input
    slopes: k.Input


class Grid(NamedTuple):
    """How a launch is cut into tasks.

    Args:
        tasks: Tasks.
        tokens: Tokens of a task.
        splits: Parts of a task over the context.
        max_tokens: The maximum number of new tokens of a sequence.
    """

    tasks: Any
    tokens: Any
    splits: Any
    max_tokens: Any


@k.inline
def plan_paged_grid(batch: Batch, q: k.View, p: Plan, ctx: k.Context) -> Grid:
    """The tasks of a launch: long ones where they are at least 6 per worker, split ones where fewer than 4."""
    tasks, long_tasks = k.i64(0), k.i64(0)
    longest, max_tokens = k.i64(0), k.i64(0)
    # the sizes of sequences are data, so each worker counts tasks itself
    for b in range(batch.cache.cache_lengths.shape[0]):
        new = k.i64(batch.input_row_offsets[b + 1]) - k.i64(batch.input_row_offsets[b])
        tasks += k.ceildiv(new, p.short_tokens) * p.kv_heads
        long_tasks += k.ceildiv(new, p.long_tokens) * p.kv_heads
        keys = k.i64(batch.key_offsets[b + 1]) - k.i64(batch.key_offsets[b])
        longest = k.max(longest, k.i64(batch.cache.cache_lengths[b]) + keys)
        max_tokens = k.max(max_tokens, new)
    tokens = k.i64(p.short_tokens)
    # long tasks pack keys and values less often, where they still balance
    if long_tasks >= 6 * ctx.num_workers:
        tokens = k.i64(p.long_tokens)
        tasks = long_tasks
    splits = k.i64(1)
    heads = q.shape[1]
    if ctx.target.batch_invariant:
        pass  # the parts of a task depend on the number of tasks
    elif q.shape[0] * heads <= max(SPLIT_ROWS, heads) and tasks < 4 * ctx.num_workers:
        splits = k.min(k.ceildiv(8 * ctx.num_workers, k.max(tasks, 1)), longest // SPLIT_KEYS)
        splits = k.max(k.min(splits, MAX_SPLITS), 1)
    return Grid(tasks, tokens, splits, max_tokens)


@k.inline
def find_task(batch: Batch, task: k.Value, tokens_per_task: k.Value, p: Plan) -> Task:
    """The task of a number."""
    piece = find_piece(batch.input_row_offsets, task, tokens_per_task, p.kv_heads)
    sequence = piece.sequence
    cached = k.i64(batch.cache.cache_lengths[sequence])
    row = k.i64(batch.input_row_offsets[sequence]) + piece.first
    keys = k.i64(batch.key_offsets[sequence + 1]) - k.i64(batch.key_offsets[sequence])
    return Task(sequence, piece.kv_head, row, cached + piece.first, piece.rows, cached + keys)


@k.inline
def next_keys(task: Task, batch: Batch, key: k.Value, end: k.Value, head_dim: int, p: Plan) -> Any:
    """The keys that the worker is likely to read after a block: those from `key` on, or the first ones of the next
    head.

    They are prefetched only: pages of the next sequence need no check, and rows past the last key are allowed.

    Args:
        task: The task.
        batch: The batch.
        key: The key after the block.
        end: The key after the last one that the task sees, in all parts of the context.
        head_dim: The size of a head.
        p: The plan.
    """
    blocks, _, table = batch.cache
    page_size = blocks.shape[3]
    sequence, head, first = task.sequence, task.kv_head, key
    if key >= end:
        # the first key of the next head, or of the next sequence's first head
        first = first_key(task.position, p)
        head += 1
        if head >= p.kv_heads:
            head = k.i64(0)
            sequence = k.min(sequence + 1, table.shape[0] - 1)
    # clamped here; a key past the table's pages raises when it is read
    column = k.min(first // page_size, table.shape[1] - 1)
    page = k.min(k.i64(table[sequence, column]), blocks.shape[0] - 1)
    slot = first % page_size
    # a block may not leave its page
    count = k.min(page_size - slot, KEYS)
    return elements_of(blocks[page, 0, batch.layer][slot : slot + count, head], head_dim)


@k.inline
def attend(
    task: Task, batch: Batch, split: k.Value, splits: k.Value, scores: Scores, tile_height: k.Value,
    memory: Scratch, head_dim: int, value_size: int, p: Plan,
) -> None:  # fmt: skip
    """Attends with the rows of a task to its part of the context, in blocks that lie in one page.

    Args:
        task: The task.
        batch: The batch.
        split: The number of the part.
        splits: Parts of the context.
        scores: How products become scores.
        tile_height: The height of register tiles, one of the plan's.
        memory: Scratch memory.
        head_dim: The size of a head.
        value_size: Elements of a value, where it is the beginning of its key; else 0.
        p: The plan.
    """
    blocks, kind = batch.cache.blocks, 0 if value_size else 1
    scale_words = scales_of(blocks)
    page_size = blocks.shape[3]
    key = first_key(task.position, p)
    if k.target().batch_invariant:
        # where a block begins, counted from its page's first key
        key -= key % page_size % KEYS
    last_end = last_key(task.position + task.tokens - 1, task.total, p) + 1
    share = k.ceildiv(last_end - key, splits)
    trees = None
    if batch.ancestors is not None:
        trees = Trees(batch.ancestors, k.i64(batch.cache.cache_lengths[task.sequence]))
    key += split * share
    end = k.min(last_end, key + share)
    while key < end:
        page = page_of(blocks, batch.cache.lookup_table, task.sequence, key)
        slot = key % page_size
        count = k.min(k.min(page_size - slot, KEYS), end - key)
        keys = blocks[page, 0, batch.layer][slot : slot + count, task.kv_head]
        values = blocks[page, kind, batch.layer][slot : slot + count, task.kv_head]
        if p.rounded_cache:
            first_words = scale_words[page, 0, batch.layer][slot : slot + count, task.kv_head, 0]
            copy_scales(memory.key_scales, first_words, p.plain.width)
            first_words = scale_words[page, kind, batch.layer][slot : slot + count, task.kv_head, 0]
            copy_scales(memory.value_scales, first_words, p.plain.width)
        keys, values = elements_of(keys, head_dim), elements_of(values, head_dim)
        # a value is the beginning of its key: both come from the same row
        if value_size:
            values = values[:, :value_size]
        ahead = next_keys(task, batch, key + count, last_end, head_dim, p)
        attend_block(task, keys, values, key, scores, tile_height, memory, p, ahead, trees)
        key += count


@k.inline
def store_task(
    out: k.View,
    parts: k.View,
    task: Task,
    split: k.Value,
    splits: k.Value,
    factor: k.Value,
    memory: Scratch,
    p: Plan,
) -> None:
    """Stores the results of a task, or where it is split its sums, maxima and totals.

    Args:
        out: `[rows, heads, head_dim]`.
        parts: `[rows * heads * MAX_SPLITS, head_dim + 2]`.
        task: The task.
        split: The number of the part.
        splits: Parts of the context.
        factor: The factor of scores.
        memory: Scratch memory.
        p: The plan.
    """
    heads, head_dim, width = out.shape[1], out.shape[2], p.plain.width
    state = memory.state
    for i in range(task.tokens * p.group):
        row = task.row + i // p.group
        head = task.kv_head * p.group + i % p.group
        # [rows, heads, splits]
        part = (row * heads + head) * MAX_SPLITS + split
        scale = k.f32(1)
        if splits > 1:
            parts[part, head_dim] = state.maxima[i] * factor
            parts[part, head_dim + 1] = state.totals[i]
        else:
            # a row that sees no key, as of an empty sequence in cross attention, gives 0
            scale = 1 / state.totals[i] if state.totals[i] > 0 else k.f32(0)
        for j, tail in k.vectors(head_dim, width):
            v = state.sums.load(i * p.stride + j, width=width) * scale
            if splits > 1:
                parts.store(part, j, value=v, mask=tail)
            else:
                out.store(row, head, j, value=v, mask=tail)


@k.kernel
def attention(
    out: k.Output,
    q: k.Input,
    batch_rows: BatchRows,
    cache: PagedCache,
    max_lengths: k.Input,
    layer_index: k.Input,
    score_operands: ScoreOperands,
    key_offsets: k.Input,
    parts: k.InOut,
    ctx: k.Context,
    *,
    form: AttentionForm,
) -> None:
    """`out[token, head] = softmax(scale · q[token, head] · keys) · values`, over the keys that the mask leaves to the
    token.
    """
    heads, head_dim = q.shape[1], q.shape[2]
    blocks, value_size = cache.blocks, form.value_size
    input_row_offsets, ancestors = batch_rows
    scale, sinks, slopes = score_operands
    p = plan_paged(ctx.target, (q.dtype, blocks.dtype), (heads, blocks.shape[4], head_dim), form)
    width = p.plain.width
    memory = paged_scratch(head_dim, p, ctx)
    layer = layer_of(blocks, layer_index)
    # a cache of latents has one kind: values are parts of keys
    kinds = 1 if value_size else 2
    check_batch(input_row_offsets, q.shape[0], cache, width, kinds)
    for d in k.static_range(2):
        check_size("the result", out.shape[d], q.shape[d])
    check_size("the result", out.shape[2], value_size if value_size else head_dim)
    if form.cross:
        check_size("kv_input_row_offsets", key_offsets.shape[0], input_row_offsets.shape[0])
        check_rising("kv_input_row_offsets", key_offsets, width)
        if key_offsets[0] != 0:
            raise ValueError("kv_input_row_offsets[0] is {}, expected 0", key_offsets[0])
    if form.sinks:
        check_size("sinks", sinks.shape[0], heads)
    if form.mask == "causal_alibi":
        check_size("alibi_slopes", slopes.shape[0], heads)
    query_factor, factor = k.f32(1), k.f32(1)
    if not scales_before_softmax(p):
        query_factor, factor = split_scale(scale[0])
    factor *= LOG2_E
    scores = Scores(query_factor, factor, scale[0], sinks, slopes)
    branches = None
    if form.trees:
        check_ancestors(ancestors, input_row_offsets, q.shape[0])
        branches = ancestors
    batch = Batch(input_row_offsets, cache, layer, key_offsets, branches)
    grid = plan_paged_grid(batch, q, p, ctx)
    # tasks that read the cache in place use no matrix tiles
    if p.matrix_tiles:
        if grid.max_tokens * p.group > ROW_THRESHOLD:
            memory.tiles.configure()

    grain = k.i64(1)
    # neighboring heads go to one worker, which prefetches the keys of the next head
    if grid.splits == 1 and grid.tasks >= 4 * ctx.num_workers * p.kv_heads:
        grain = k.i64(p.kv_heads)
    for index, split in ctx.parallel((grid.tasks, grid.splits), grain=grain):
        task = find_task(batch, index, grid.tokens, p)
        rows = task.tokens * p.group
        load_queries(q, task, split, scores, memory, p)
        tile_height = pack_task(rows, memory, p)
        attend(
            task, batch, split, grid.splits, scores, tile_height, memory, head_dim, value_size, p
        )
        store_task(out, parts, task, split, grid.splits, factor, memory, p)

    if p.matrix_tiles:
        if grid.max_tokens * p.group > ROW_THRESHOLD:
            memory.tiles.release()
    if grid.splits > 1:
        # parts of a row come from different workers
        ctx.barrier()
        for row, head in ctx.parallel((q.shape[0], heads)):
            row_parts = parts[(row * heads + head) * MAX_SPLITS :]
            # maxima of parts have the factor already
            merge_parts(out[row, head], row_parts, grid.splits, k.f32(1), 0.0, width)


def _lower_attention(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    """The call for `mo.attention.ragged.paged`; absent operands are replaced by other ones."""
    q, blocks = operands[0], operands[2]
    mask = attributes.get("mask", "causal")
    window = int(attributes.get("local_window_size", -1))
    heads, head_dim = q.shape[1], q.shape[2]
    softcap = float(attributes.get("softcap", 0.0))
    has_sinks = bool(attributes.get("sinks", False))
    cross, value_size = bool(attributes.get("cross", False)), int(attributes.get("value_size", 0))
    trees = bool(attributes.get("trees", False))
    # an absent operand is replaced by another one of a fitting dtype; the kernel does not read it
    count = 8 + has_sinks + (mask == "causal_alibi") + cross
    sinks = 8 if has_sinks else 7
    slopes = 8 + has_sinks if mask == "causal_alibi" else 7
    key_offsets = count - 1 if cross else 1
    # last, as the declaration has them
    ancestors = count if trees else 1
    rows = max(SPLIT_ROWS, heads)
    parts = Workspace(DType.float32, (rows * MAX_SPLITS, head_dim + 2))
    args = (
        view("result", 0, results[0]),
        view("operand", 0, q),
        view("operand", 1, operands[1], static=False),
        view("operand", ancestors, operands[ancestors], static=False),
        view("operand", 2, blocks, static=CACHE_DIMS),
        view("operand", 3, operands[3], static=False),
        view("operand", 4, operands[4], static=False),
        view("operand", 5, operands[5], static=False),
        view("operand", 6, operands[6], ((),)),
        view("operand", 7, operands[7], ((),)),
        view("operand", sinks, operands[sinks], ((0,) if sinks == 8 else (),), static=False),
        view("operand", slopes, operands[slopes], ((0,) if slopes > 7 else (),), static=False),
        view("operand", key_offsets, operands[key_offsets], static=False),
        view("workspace", 0, parts),
    )
    form = AttentionForm(mask, max(window, 1), softcap, has_sinks, value_size, cross, trees)
    return KernelCall(attention, args, {"form": form}, workspaces=(parts,))


LOWERINGS = {"mo.attention.ragged.paged": _lower_attention}
