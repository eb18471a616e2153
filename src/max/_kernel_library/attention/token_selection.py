"""Selection of the cached tokens that a new token attends to, by index keys (DeepSeek V3.2).

Each token has one index key in a paged cache of its own. Row `r` has an index query and a weight for each index head::

    score[r, t] = Σ_h weights[r, h] · max(q[r, h] · key[t], 0)        for the tokens t up to r's position

The `count` tokens of the greatest scores are selected; of equal scores the earlier tokens. Scores come in blocks of keys. Candidates lie in
scratch memory in the order of tokens; when they fill it, all but the best `count` are dropped, in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from max import kernel as k
from max._kernel_library.attention.cache_formats import elements_of, row_size
from max._kernel_library.attention.paged_cache import (
    check_batch,
    check_size,
    layer_of,
    page_of,
    sequence_of,
    unsigned,
)
from max._kernel_library.attention.paged_rows import (
    KEYS,
    Plan,
    Scores,
    Scratch,
    Task,
    load_queries,
    of_height,
    pack_paged_queries,
    paged_scratch,
    plan_paged,
    score_block,
)
from max._kernel_library.lowering import KernelCall, Operand, view
from max.dtype import DType

MOST_SELECTED = 1 << 16
"""The greatest number of selected tokens; a worker's scratch memory holds 16 bytes for each."""
LOWEST = -(1 << 31)


class Candidates(NamedTuple):
    """The candidates of a row, in the order of tokens.

    Args:
        ranks: Scores as integers of the same order, i32.
        tokens: Their tokens, i32.
    """

    ranks: Any
    tokens: Any


@k.inline
def rank_of(score: Any, width: int) -> Any:
    """Integers in the order of f32 scores; NaN ranks last, and zeros of either sign are equal."""
    ordered = k.select(score == score, score, k.splat(k.f32(float("-inf")), width))
    bits = k.bitcast(ordered + k.splat(k.f32(0), width), k.i32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@k.inline
def count_from(ranks: Any, size: Any, least: Any, width: int) -> Any:
    """The number of ranks that are at least `least`."""
    total = k.splat(k.i32(0), width)
    for j, mask in k.vectors(size, width):
        hit = ranks.load(j, width=width, mask=mask) >= least
        if mask is not None:
            hit = hit & mask
        total = total + k.select(hit, k.splat(k.i32(1), width), k.splat(k.i32(0), width))
    return k.i64(k.reduce_add(total))


@k.inline
def keep_best(candidates: Candidates, size: Any, count: Any, width: int) -> None:
    """Moves the `count` best of `size` candidates to the front, in their order; of equal ranks the first ones.

    Args:
        candidates: The candidates.
        size: Their number, more than `count`.
        count: How many are kept.
        width: Lanes of a vector.
    """
    # the greatest rank that at least `count` candidates reach, bit by bit
    least = k.i64(LOWEST)
    step = k.i64(1 << 31)
    while step > 0:
        higher = k.i32(least + step)
        if count_from(candidates.ranks, size, higher, width) >= count:
            least += step
        step = step // 2
    equals = count
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
    weights: Any, first: Any, end: Any, size: Any, candidates: Candidates, memory: Scratch, p: Plan
) -> None:
    """Appends the tokens of a block of keys, whose products with each head are in the scratch memory, to the candidates.

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


@k.kernel
def select_tokens(
    out: k.Output,
    q: k.Input,
    weights: k.Input,
    offsets: k.Input,
    blocks: k.InOut,
    cache_lengths: k.Input,
    lookup_table: k.Input,
    layer_index: k.Input,
    ctx: k.Context,
) -> None:
    """Row `r` of `out` `[rows, count]` has the tokens that row `r` attends to, in rising order, then -1.

    `q` is `[rows, heads, size]`, `weights` `[rows, heads]`, a row of `blocks` the index key of a token.
    """
    heads, head_dim, count = q.shape[1], q.shape[2], out.shape[1]
    p = plan_paged(ctx.target, (q.dtype, blocks.dtype), (heads, 1, head_dim), "null", 1, 0.0, False)
    width = p.plain.width
    memory = paged_scratch(head_dim, p, ctx)
    ranks = ctx.scratch(k.i32, (2 * count + KEYS + 32,))
    tokens = ctx.scratch(k.i32, (2 * count + KEYS + 32,))
    candidates = Candidates(ranks, tokens)
    layer = layer_of(blocks, layer_index)
    check_batch(offsets, q.shape[0], blocks, cache_lengths, lookup_table, width, 1)
    check_size("the result", out.shape[0], q.shape[0])
    check_size("weights", weights.shape[0], q.shape[0])
    page_size = blocks.shape[3]
    # no sinks and slopes: nothing reads the last two
    scores = Scores(k.f32(1), k.f32(1), k.f32(1), layer_index, layer_index)
    if p.matrix_tiles:
        memory.tiles.configure()
    for row in ctx.parallel(q.shape[0], grain=1):
        sequence = sequence_of(offsets, cache_lengths.shape[0], row)
        position = k.i64(cache_lengths[sequence]) + row - k.i64(offsets[sequence])
        end = position + 1
        size = k.min(end, k.i64(count))
        if end <= count:
            for i in range(end):
                candidates.tokens[i] = k.i32(i)
        else:
            task = Task(sequence, k.i64(0), row, position, k.i64(1), end)
            load_queries(q, task, k.i64(0), scores, memory, p)
            tile_height = k.i64(p.plain.height)
            if heads > p.row_threshold:
                pack_paged_queries(k.i64(heads), memory, tile_height, p)
            size = k.i64(0)
            key = k.i64(0)
            while key < end:
                page = page_of(blocks, lookup_table, sequence, key)
                slot = key % page_size
                block_end = k.min(k.min(key + page_size - slot, key + KEYS), end)
                keys = blocks[page, 0, layer][slot : slot + block_end - key, 0]
                keys = elements_of(keys, head_dim)
                score_block(keys, k.i64(heads), memory, of_height(p, p.plain.height))
                add_block(weights[row], key, block_end, size, candidates, memory, p)
                size += block_end - key
                key = block_end
                if size > 2 * count:
                    keep_best(candidates, size, k.i64(count), width)
                    size = k.i64(count)
            if size > count:
                keep_best(candidates, size, k.i64(count), width)
                size = k.i64(count)
        for i in range(size):
            out[row, i] = candidates.tokens[i]
        for i in range(size, count):
            out[row, i] = k.i32(-1)
    if p.matrix_tiles:
        memory.tiles.release()


def _lower_selection(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    op = "mo.tokens.select.ragged.paged"
    q, weights, blocks = operands[0], operands[1], operands[3]
    unsigned(op, [operands[2], *operands[4:7]])
    heads, head_dim, count = q.shape[1], q.shape[2], results[0].shape[1]
    if not all(isinstance(size, int) for size in (heads, head_dim, count)):
        raise NotImplementedError(
            f"{op}: queries {q.shape} and {count} tokens, expected static sizes"
        )
    if weights.shape[1] != heads:
        raise NotImplementedError(f"{op}: weights {weights.shape} of {heads} heads")
    if not 0 < count <= MOST_SELECTED:
        raise NotImplementedError(f"{op}: {count} tokens, expected 1 to {MOST_SELECTED}")
    if blocks.dtype is DType.int8 or blocks.shape[4:] != (1, row_size(blocks.dtype, head_dim)):
        raise NotImplementedError(
            f"{op}: queries of {head_dim} elements over {blocks.dtype.name} keys of {blocks.shape[4:]}; expected one float "
            "key of the queries' size"
        )
    args = (
        view("result", 0, results[0], static=(False, True)),
        view("operand", 0, q, static=(False, True, True)),
        view("operand", 1, weights, static=(False, True)),
        view("operand", 2, operands[2], static=False),
        view("operand", 3, blocks, static=(False, True, False, True, True, True)),
        view("operand", 4, operands[4], static=False),
        view("operand", 5, operands[5], static=False),
        view("operand", 6, operands[6], ((),)),
    )
    return KernelCall(select_tokens, args)


LOWERINGS = {"mo.tokens.select.ragged.paged": _lower_selection}
