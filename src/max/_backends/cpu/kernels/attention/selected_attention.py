"""Attention of each new token over the cached tokens that were selected for it, in a cache of latents.

The rows of a task are the query heads of a token. A latent is the key of all heads, and its beginning their value. A
task gathers blocks of up to `KEYS` selected latents into scratch memory and attends to them as
`kernels.attention.paged_attention` does to blocks of a page. With fewer than 4 tasks per worker, each task
is split over its selected tokens, and a second phase merges the parts::

    selected [rows, count]   row r   │ 0 │ 2 │ 7 │ … │ -1 │ -1 │     rising tokens, then -1
                                     └─ part 0 ─┘└─ part 1

Cache budget: the gathered block, `KEYS` × head_dim elements (144 KB for latents of 576 in bf16), stays in the L2 cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from max import kernel as k
from max._backends.cpu.kernels.attention.cache_formats import copy_elements
from max._backends.cpu.kernels.attention.online_softmax import (
    LOG2_E,
    MAX_SPLITS,
    SPLIT_KEYS,
    SPLIT_ROWS,
    merge_parts,
)
from max._backends.cpu.kernels.attention.paged_attention import store_task
from max._backends.cpu.kernels.attention.paged_cache import (
    CACHE_DIMS,
    PagedCache,
    check_batch,
    layer_of,
    page_of,
    place_of,
)
from max._backends.cpu.kernels.attention.paged_plan import (
    KEYS,
    AttentionForm,
    Scores,
    Task,
    paged_scratch,
    plan_paged,
    split_scale,
)
from max._backends.cpu.kernels.attention.paged_rows import (
    attend_block,
    load_queries,
    pack_paged_queries,
)
from max._backends.cpu.kernels.operand_checks import check_size
from max._backends.kernel_call import KernelCall, Operand, Workspace, view
from max.dtype import DType


@k.inline
def selected_count(selected: k.View, row: k.Integer) -> Any:
    """The number of tokens selected for a row, by bisection for the first negative one; see `check_rest`."""
    low = k.i64(0)
    high = k.i64(selected.shape[1])
    while low < high:
        middle = (low + high) // 2
        if selected[row, middle] >= 0:
            low = middle + 1
        else:
            high = middle
    return low


@k.inline
def check_rest(selected: k.View, row: k.Integer, count: k.Value, width: int) -> None:
    """Raises where a token follows the negative ones.

    Args:
        selected: `[rows, tokens]`.
        row: The row.
        count: The number of its tokens.
        width: Lanes of a vector.
    """
    for j, mask in k.vectors(selected.shape[1] - count, width):
        tokens = selected.load(row, count + j, width=width, mask=mask)
        later = tokens >= k.splat(k.i32(0), width)
        if mask is not None:
            later = later & mask
        if k.any(later):
            raise ValueError(
                "row {}: a selected token after {} tokens and a negative number, expected negative numbers to the end",
                row,
                count,
            )


@k.inline
def gather_latents(
    keys: k.View, selected: k.View, first: k.Value, task: Task, position: k.Value, cache: PagedCache, layer: k.Integer,
    width: int,
) -> None:  # fmt: skip
    """Copies the latents of a block of selected tokens; raises where tokens do not rise, or are not visible.

    Args:
        keys: The copies, `[count, head_dim]`.
        selected: `[rows, tokens]`.
        first: The first selected token of the block.
        task: The task.
        position: The position of the task's row: the last token that it sees.
        cache: The cache.
        layer: The layer.
        width: Lanes of a vector.
    """
    blocks, row = cache.blocks, task.row
    for i in range(keys.shape[0]):
        token = k.i64(selected[row, first + i])
        if token < 0 or token > position:
            raise IndexError(
                "row {}: selected token {}; it sees the tokens up to {}", row, token, position
            )
        # rising tokens also exclude duplicates, which would count twice in the softmax
        if first + i > 0:
            if token <= k.i64(selected[row, first + i - 1]):
                raise ValueError(
                    "row {}: selected token {} follows {}, expected rising tokens",
                    row,
                    token,
                    selected[row, first + i - 1],
                )
        # one kind and one head: a latent
        page = page_of(blocks, cache.lookup_table, task.sequence, token)
        copy_elements(keys[i], blocks[page, 0, layer, token % blocks.shape[3], 0], width)


@k.kernel
def attention_selected(
    out: k.Output,
    q: k.Input,
    selected: k.Input,
    input_row_offsets: k.Input,
    cache: PagedCache,
    layer_index: k.Input,
    scale: k.Input,
    parts: k.InOut,
    ctx: k.Context,
) -> None:
    """`out[row, head] = softmax(scale · q[row, head] · latents) · values`, over the tokens `selected[row]`, which rise
    and end before -1.
    """
    heads, head_dim, value_size = q.shape[1], q.shape[2], out.shape[2]
    blocks = cache.blocks
    # the selection is the mask
    form = AttentionForm("null", value_size=value_size)
    p = plan_paged(ctx.target, (q.dtype, blocks.dtype), (heads, 1, head_dim), form)
    width = p.plain.width
    memory = paged_scratch(head_dim, p, ctx)
    gathered = ctx.scratch(blocks.dtype, (KEYS, head_dim))
    layer = layer_of(blocks, layer_index)
    check_batch(input_row_offsets, q.shape[0], cache, width, 1)
    check_size("selected", selected.shape[0], q.shape[0])
    for d in k.static_range(2):
        check_size("the result", out.shape[d], q.shape[d])
    query_factor, factor = split_scale(scale[0])
    factor *= LOG2_E
    # no sinks and slopes: nothing reads the last two
    scores = Scores(query_factor, factor, scale[0], layer_index, layer_index)
    splits = k.i64(1)
    if ctx.target.batch_invariant:
        pass  # parts would depend on the number of rows
    elif q.shape[0] * heads <= max(SPLIT_ROWS, heads) and q.shape[0] < 4 * ctx.num_workers:
        # as many as keep every worker busy, in parts of at least `SPLIT_KEYS` tokens
        splits = k.min(
            k.ceildiv(8 * ctx.num_workers, k.max(q.shape[0], 1)), selected.shape[1] // SPLIT_KEYS
        )
        splits = k.max(k.min(splits, MAX_SPLITS), 1)
    if p.matrix_tiles:
        memory.tiles.configure()

    for row, split in ctx.parallel((q.shape[0], splits), grain=1):
        sequence, position = place_of(input_row_offsets, cache, row)
        end = selected_count(selected, row)
        # one worker checks all of the row
        if split == 0:
            check_rest(selected, row, end, width)
        share = k.ceildiv(end, splits)
        first = split * share
        end = k.min(end, first + share)
        # position 0 and as many keys as a row can select: the null mask leaves every gathered key
        task = Task(sequence, k.i64(0), row, k.i64(0), k.i64(1), selected.shape[1])
        load_queries(q, task, split, scores, memory, p)
        tile_height = k.i64(p.plain.height)
        if heads > p.row_threshold:
            pack_paged_queries(k.i64(heads), memory, tile_height, p)
        while first < end:
            count = k.min(k.i64(KEYS), end - first)
            keys = gathered[:count]
            gather_latents(keys, selected, first, task, position, cache, layer, width)
            # a value is the beginning of its key
            values = keys[:, :value_size]
            attend_block(task, keys, values, first, scores, tile_height, memory, p)
            first += count
        store_task(out, parts, task, split, splits, factor, memory, p)

    if p.matrix_tiles:
        memory.tiles.release()
    if splits > 1:
        ctx.barrier()
        for row, head in ctx.parallel((q.shape[0], heads)):
            row_parts = parts[(row * heads + head) * MAX_SPLITS :]
            merge_parts(out[row, head], row_parts, splits, k.f32(1), 0.0, width)


def _lower_attention(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    """The call for `mo.attention.selected.paged`; heads and sizes must be static, the cache cannot be int8."""
    q, selected, blocks = operands[0], operands[1], operands[3]
    heads, value_size = q.shape[1], results[0].shape[2]
    parts = Workspace(DType.float32, (max(SPLIT_ROWS, heads) * MAX_SPLITS, value_size + 2))
    args = (
        view("result", 0, results[0], static=(False, True, True)),
        view("operand", 0, q, static=(False, True, True)),
        view("operand", 1, selected, static=False),
        view("operand", 2, operands[2], static=False),
        view("operand", 3, blocks, static=CACHE_DIMS),
        view("operand", 4, operands[4], static=False),
        view("operand", 5, operands[5], static=False),
        view("operand", 6, operands[6], ((),)),
        view("operand", 7, operands[7], ((),)),
        view("workspace", 0, parts),
    )
    return KernelCall(attention_selected, args, workspaces=(parts,))


LOWERINGS = {"mo.attention.selected.paged": _lower_attention}
