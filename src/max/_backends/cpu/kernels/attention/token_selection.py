"""Selection of the cached tokens that a new token attends to, by index keys (DeepSeek V3.2).

Each token has one index key in a paged cache of its own. Row `r` has an index query and a weight for each index head::

    score[r, t] = Σ_h weights[r, h] · max(q[r, h] · key[t], 0)        for the tokens t up to r's position

The `count` tokens of the greatest scores are selected; of equal scores the earlier tokens. A task is a row. It computes
the scores of a block of keys at a time and appends them to its candidates, which are in scratch memory in the order of
tokens. When there are more than `2 * count`, all but the best `count` are dropped, in the same order::

    candidates   │ best of the tokens before: count │ scores since: up to count + KEYS │
                   ranks and tokens, i32 each

A launch of up to `SPLIT_ROWS` rows splits each row over its tokens; a second phase merges the candidates of the parts.

Cache budget: candidates take 16 bytes for each selected token (32 KB for 2,048) in the L1 or L2 cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from max import kernel as k
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
    Plan,
    Scores,
    Scratch,
    Task,
    of_height,
    paged_scratch,
    plan_paged,
)
from max._backends.cpu.kernels.attention.paged_rows import (
    load_queries,
    pack_paged_queries,
    score_block,
)
from max._backends.cpu.kernels.operand_checks import check_size
from max._backends.kernel_call import KernelCall, Operand, Workspace, view
from max.dtype import DType

MAX_SELECTED = 1 << 16
"""The greatest number of selected tokens; a worker's scratch memory holds 16 bytes for each."""
LOWEST_RANK = -(1 << 31)
"""The least integer that `rank_of` may give."""
SPLIT_ROWS = 8
"""The maximum number of rows of a launch that splits them over tokens."""
MAX_SPLITS = 16
"""The maximum number of parts of a row."""


class Candidates(NamedTuple):
    """The candidates of a row, in the order of tokens.

    Args:
        ranks: Scores as integers of the same order, i32.
        tokens: Their tokens, i32.
    """

    ranks: Any
    tokens: Any


class IndexKeys(NamedTuple):
    """The cache of index keys.

    Args:
        blocks: The cache.
        lookup_table: Pages of each sequence.
        layer: The layer.
    """

    blocks: Any
    lookup_table: Any
    layer: Any


@k.inline
def rank_of(score: k.Value, width: int) -> Any:
    """Integers in the order of f32 scores; NaN ranks last, and zeros of either sign are equal."""
    # NaN has no order of its own
    ordered = k.select(score == score, score, k.splat(k.f32(float("-inf")), width))
    # adding +0 turns -0 into +0, whose bits differ
    bits = k.bitcast(ordered + k.splat(k.f32(0), width), k.i32)
    # of negative floats a greater magnitude has the greater bits: flips all but the sign
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@k.inline
def count_from(ranks: k.View, size: k.Integer, least: k.Value, width: int) -> Any:
    """The number of ranks that are at least `least`."""
    total = k.splat(k.i32(0), width)
    for j, mask in k.vectors(size, width):
        hit = ranks.load(j, width=width, mask=mask) >= least
        if mask is not None:
            hit = hit & mask
        total = total + k.select(hit, k.splat(k.i32(1), width), k.splat(k.i32(0), width))
    return k.i64(k.reduce_add(total))


@k.inline
def compact_best(candidates: Candidates, size: k.Integer, count: k.Value, width: int) -> None:
    """Moves the `count` best of `size` candidates to the front, in their order; of equal ranks the first ones.

    Args:
        candidates: The candidates.
        size: Their number, more than `count`.
        count: How many are kept.
        width: Lanes of a vector.
    """
    # the greatest rank that at least `count` candidates reach, bit by bit
    least = k.i64(LOWEST_RANK)
    # integers of 32 bits, in i64 so that the greatest step has room
    step = k.i64(1 << 31)
    while step > 0:
        higher = k.i32(least + step)
        if count_from(candidates.ranks, size, higher, width) >= count:
            least += step
        step = step // 2
    # of the candidates with the least rank only as many as are missing are kept
    equals = count
    # no rank is above the greatest integer
    if least < (1 << 31) - 1:
        equals = count - count_from(candidates.ranks, size, k.i32(least + 1), width)
    kept = k.i64(0)
    for i in range(size):
        rank = k.i64(candidates.ranks[i])
        keeps = rank > least
        if rank == least:
            keeps = equals > 0
            equals -= 1
        if keeps:
            candidates.ranks[kept] = candidates.ranks[i]
            candidates.tokens[kept] = candidates.tokens[i]
            kept += 1


@k.inline
def add_block(
    weights: k.View,
    first: k.Value,
    end: k.Value,
    size: k.Value,
    candidates: Candidates,
    memory: Scratch,
    p: Plan,
) -> None:
    """Appends the tokens of a block of keys, whose products with each head are in the scratch memory, to the
    candidates.

    Args:
        weights: The weight of each head.
        first: The block's first token.
        end: The token after its last one.
        size: The number of candidates before.
        candidates: The candidates.
        memory: Scratch memory.
        p: The plan.
    """
    width = p.plain.width
    for j, mask in k.vectors(end - first, width):
        score = k.splat(k.f32(0), width)
        for head in range(p.group):
            product = memory.scores.load(head * KEYS + j, width=width)
            product = k.select(product > 0.0, product, k.splat(k.f32(0), width))
            score = k.fma(product, k.splat(k.cast(weights[head], k.f32), width), score)
        candidates.ranks.store(size + j, value=rank_of(score, width), mask=mask)
        tokens = k.iota(k.i32, width) + k.i32(first + j)
        candidates.tokens.store(size + j, value=tokens, mask=mask)


@k.inline
def best_of_part(
    row: k.Integer, task: Task, begin: k.Value, end: k.Value, weights: k.View, cache: IndexKeys, count: int,
    candidates: Candidates, memory: Scratch, p: Plan,
) -> Any:  # fmt: skip
    """Scores the tokens from `begin` to `end` of a row's sequence, keeps the best `count`, and gives their number.

    Args:
        row: The row.
        task: Its task; the queries are in the scratch memory.
        begin: The first token.
        end: The token after the last one.
        weights: `[rows, heads]`.
        cache: The index keys.
        count: How many are kept.
        candidates: The candidates.
        memory: Scratch memory.
        p: The plan.
    """
    page_size = cache.blocks.shape[3]
    size, key = k.i64(0), k.i64(0) + begin
    while key < end:
        page = page_of(cache.blocks, cache.lookup_table, task.sequence, key)
        slot = key % page_size
        # a block lies in one page
        block_end = k.min(k.min(key + page_size - slot, key + KEYS), end)
        keys = cache.blocks[page, 0, cache.layer][slot : slot + block_end - key, 0]
        score_block(keys, k.i64(p.group), memory, of_height(p, p.plain.height))
        add_block(weights[row], key, block_end, size, candidates, memory, p)
        size += block_end - key
        key = block_end
        if size > 2 * count:
            compact_best(candidates, size, k.i64(count), p.plain.width)
            size = k.i64(count)
    if size > count:
        compact_best(candidates, size, k.i64(count), p.plain.width)
        size = k.i64(count)
    return size


@k.inline
def selection_splits(
    input_row_offsets: k.View, cache_lengths: k.View, rows: k.Value, count: int, ctx: k.Context
) -> Any:
    """The parts into which each row of a launch is split: parts have at least twice as many tokens as they keep."""
    splits = k.i64(1)
    if ctx.target.batch_invariant:
        pass  # the parts depend on the number of rows
    elif rows <= SPLIT_ROWS:
        longest = k.i64(0)
        for b in range(cache_lengths.shape[0]):
            new = k.i64(input_row_offsets[b + 1]) - k.i64(input_row_offsets[b])
            longest = k.max(longest, k.i64(cache_lengths[b]) + new)
        splits = k.min(k.ceildiv(4 * ctx.num_workers, k.max(rows, 1)), longest // (2 * count))
        splits = k.max(k.min(splits, MAX_SPLITS), 1)
    return splits


@k.inline
def store_tokens(out: k.View, row: k.Integer, candidates: Candidates, size: k.Integer) -> None:
    """Stores the tokens of `size` candidates as a row, then -1."""
    for i in range(size):
        out[row, i] = candidates.tokens[i]
    for i in range(size, out.shape[1]):
        out[row, i] = k.i32(-1)


@k.inline
def merge_candidates(
    candidates: Candidates, parts: k.View, row: k.Value, splits: k.Integer, count: int, width: int
) -> Any:
    """Collects the best `count` candidates of a row from its parts, in the order of tokens; returns their number."""
    size = k.i64(0)
    for split in range(splits):
        part = row * MAX_SPLITS + split
        for i in range(k.i64(parts[part, 2 * count])):
            candidates.ranks[size] = parts[part, i]
            candidates.tokens[size] = parts[part, count + i]
            size += 1
        if size > count:
            compact_best(candidates, size, k.i64(count), width)
            size = k.i64(count)
    return size


@k.kernel
def select_tokens(
    out: k.Output,
    q: k.Input,
    weights: k.Input,
    input_row_offsets: k.Input,
    cache: PagedCache,
    layer_index: k.Input,
    parts: k.InOut,
    ctx: k.Context,
) -> None:
    """Row `r` of `out` `[rows, count]` has the tokens that row `r` attends to, in rising order, then -1.

    `q` is `[rows, heads, size]`, `weights` `[rows, heads]`, a row of `blocks` the index key of a token; `parts`
    `[SPLIT_ROWS * MAX_SPLITS, 2 * count + 1]` takes ranks and tokens of the best candidates of each part, and their
    number.
    """
    heads, head_dim, count = q.shape[1], q.shape[2], out.shape[1]
    blocks, cache_lengths, lookup_table = cache
    form = AttentionForm("null")
    p = plan_paged(ctx.target, (q.dtype, blocks.dtype), (heads, 1, head_dim), form)
    width = p.plain.width
    memory = paged_scratch(head_dim, p, ctx)
    ranks = ctx.scratch(k.i32, (2 * count + KEYS + 32,))
    tokens = ctx.scratch(k.i32, (2 * count + KEYS + 32,))
    candidates = Candidates(ranks, tokens)
    index_keys = IndexKeys(blocks, lookup_table, layer_of(blocks, layer_index))
    check_batch(input_row_offsets, q.shape[0], cache, width, 1)
    check_size("the result", out.shape[0], q.shape[0])
    check_size("weights", weights.shape[0], q.shape[0])
    splits = selection_splits(input_row_offsets, cache_lengths, q.shape[0], count, ctx)
    # no sinks and slopes: nothing reads the last two
    scores = Scores(k.f32(1), k.f32(1), k.f32(1), layer_index, layer_index)
    if p.matrix_tiles:
        memory.tiles.configure()
    for row, split in ctx.parallel((q.shape[0], splits), grain=1):
        sequence, position = place_of(input_row_offsets, cache, row)
        end = position + 1
        share = k.ceildiv(end, splits)
        begin = k.min(split * share, end)
        part_end = k.min(begin + share, end)
        size = part_end - begin
        # a row that sees no more tokens than are selected takes all of them, without scores
        if end <= count:
            for i in range(size):
                candidates.ranks[i] = k.i32(0)
                candidates.tokens[i] = k.i32(begin + i)
        else:
            task = Task(sequence, k.i64(0), row, position, k.i64(1), end)
            load_queries(q, task, k.i64(0), scores, memory, p)
            if heads > p.row_threshold:
                pack_paged_queries(k.i64(heads), memory, k.i64(p.plain.height), p)
            size = best_of_part(
                row, task, begin, part_end, weights, index_keys, count, candidates, memory, p
            )  # fmt: skip
        if splits > 1:
            part = row * MAX_SPLITS + split
            parts[part, 2 * count] = k.i32(size)  # the last element holds the number of candidates
            for i in range(size):
                parts[part, i] = candidates.ranks[i]
                parts[part, count + i] = candidates.tokens[i]
        else:
            store_tokens(out, row, candidates, size)
    if p.matrix_tiles:
        memory.tiles.release()
    if splits > 1:
        ctx.barrier()
        # candidates of a row's parts are those of several workers
        for row in ctx.parallel(q.shape[0], grain=1):
            size = merge_candidates(candidates, parts, row, splits, count, width)
            store_tokens(out, row, candidates, size)


def _lower_selection(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    """The call for `mo.tokens.select.ragged.paged`, with a workspace for the parts of split tasks."""
    q, weights, blocks, count = operands[0], operands[1], operands[3], results[0].shape[1]
    if not 0 < count <= MAX_SELECTED:
        raise NotImplementedError(
            f"mo.tokens.select.ragged.paged: {count} tokens, expected 1 to {MAX_SELECTED}"
        )
    parts = Workspace(DType.int32, (SPLIT_ROWS * MAX_SPLITS, 2 * count + 1))
    args = (
        view("result", 0, results[0], static=(False, True)),
        view("operand", 0, q, static=(False, True, True)),
        view("operand", 1, weights, static=(False, True)),
        view("operand", 2, operands[2], static=False),
        view("operand", 3, blocks, static=CACHE_DIMS),
        view("operand", 4, operands[4], static=False),
        view("operand", 5, operands[5], static=False),
        view("operand", 6, operands[6], ((),)),
        view("workspace", 0, parts),
    )
    return KernelCall(select_tokens, args, workspaces=(parts,))


LOWERINGS = {"mo.tokens.select.ragged.paged": _lower_selection}
