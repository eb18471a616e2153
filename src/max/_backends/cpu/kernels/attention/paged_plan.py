"""The plan of paged attention: compile-time facts, the records of a task, scratch memory, and the bounds of masks.

In: the target, dtypes and attributes of a call. Out: a `Plan`, which `kernels.attention.paged_rows`
    follows.

A row is the query of a new token for one head. With two query heads per KV head the rows of a task are::

    token 0, head 0 │ token 0, head 1 │ token 1, head 0 │ token 1, head 1 │ …

Every mask leaves an interval of keys to a query, `first_key` to `last_key`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from max import kernel as k
from max._backends.cpu.kernels.attention.cache_formats import is_rounded
from max._backends.cpu.kernels.attention.online_softmax import (
    RowState,
    round_up,
)
from max._backends.cpu.kernels.tiles import amx_tiles
from max._backends.cpu.kernels.tiles.tiling import Tiling, tiling
from max._dataclass import dataclass

KEYS = 128
"""Keys of a block; a block lies in one page."""
AHEAD = 16
"""Prefetch distance, in keys, where keys are read in place."""
ROW_THRESHOLD = 8
"""The maximum number of rows of a task that reads the cache in place."""
TASK_ROWS = 48
"""Rows of a task, unless a KV head has more query heads."""
LONG_TASKS = 4
"""Factor of the rows of a task in launches with many tasks: keys and values are packed less often."""


@dataclass(frozen=True)
class Plan:
    """The compile-time facts of a call.

    Args:
        plain: Tiling of products in f32.
        wide: Tiling of packed operands: pairs of bf16, else `plain`.
        heights: Heights of register tiles; batch-invariant targets have a lower one for few rows.
        group: Query heads of a KV head.
        kv_heads: KV heads.
        gemv_rows: Rows per pass where the cache is read in place.
        gemv_vectors: Keys, or vectors of a value, that are multiplied by them at once.
        row_threshold: The maximum number of rows of a task that reads the cache in place.
        short_tokens: Tokens of a task.
        long_tokens: Tokens of a task in launches with many tasks.
        depth: Elements of a packed query or key.
        stride: Elements from row to row of the sums.
        max_rows: Rows of scratch memory.
        matrix_tiles: Whether packed operands are multiplied in matrix tiles.
        mask: The mask.
        window: Its window.
        softcap: The bound of soft-capped scores; 0 for none.
        sinks: Whether each head has a sink.
        cross: Whether a sequence has its own number of keys: then positions may be past the last one.
        rounded_cache: Whether keys and values are codes, with a scale each.
    """

    plain: Tiling
    wide: Tiling
    heights: tuple[int, ...]
    group: int
    kv_heads: int
    gemv_rows: int
    gemv_vectors: int
    row_threshold: int
    short_tokens: int
    long_tokens: int
    depth: int
    stride: int
    max_rows: int
    matrix_tiles: bool
    mask: str
    window: int
    softcap: float
    sinks: bool
    cross: bool
    rounded_cache: bool


class AttentionForm(NamedTuple):
    """The compile-time parameters of a kernel of attention.

    Args:
        mask: The mask.
        window: Its window.
        softcap: The bound of soft-capped scores; 0 for none.
        sinks: Whether each head has a sink.
        value_size: Elements of a value, where it is the beginning of its key; 0: values are as long as keys.
        cross: Whether a sequence has its own number of keys: then positions may be past the last one.
        trees: Whether the new rows of a sequence may be a tree.
    """

    mask: str
    window: int = 1
    softcap: float = 0.0
    sinks: bool = False
    value_size: int = 0
    cross: bool = False
    trees: bool = False


class Scores(NamedTuple):
    """How products of queries and keys become the logits of the softmax.

    Args:
        query_factor: The factor of queries.
        factor: The factor of scores in the exponent of 2.
        scale: The scale of the products, where `rescaled` turns them into scores.
        sinks: The logit of each head's sink, `[heads]`.
        slopes: The slope of each head's bias, `[heads]`.
    """

    query_factor: Any
    factor: Any
    scale: Any
    sinks: Any
    slopes: Any


class Scratch(NamedTuple):
    """Scratch memory of a worker.

    Args:
        queries: Rows that are read in place, `[rows, head_dim]`, f32.
        unpacked: Rows before they are packed, `[rows, head_dim]`.
        packed: Packed rows, flat lanes.
        panel: A panel of keys or values, flat lanes.
        scores: Scores, `KEYS` a row, flat.
        rounded_weights: Weights as bf16, as the scores.
        key_scales: The scales of a block's keys, `[KEYS]`, where the cache has scales.
        value_scales: Those of its values.
        state: The state of all rows.
        tiles: The matrix tiles.
    """

    queries: Any
    unpacked: Any
    packed: Any
    panel: Any
    scores: Any
    rounded_weights: Any
    key_scales: Any
    value_scales: Any
    state: RowState
    tiles: Any


class Task(NamedTuple):
    """New tokens of a sequence, for one KV head.

    Args:
        sequence: The sequence.
        kv_head: The KV head.
        row: The row of the first token in the ragged batch.
        position: Its position in the sequence.
        tokens: Tokens.
        total: Tokens of the sequence, cached and new.
    """

    sequence: Any
    kv_head: Any
    row: Any
    position: Any
    tokens: Any
    total: Any


class Trees(NamedTuple):
    """What the new rows of a task's sequence see of each other.

    Args:
        ancestors: As in `paged_cache.check_ancestors`.
        new_key: The first of the new keys, after the cached ones.
    """

    ancestors: Any
    new_key: Any


class Piece(NamedTuple):
    """New rows of a sequence, for one KV head.

    Args:
        sequence: The sequence.
        kv_head: The KV head.
        first: The first row, counted from the sequence's.
        rows: Rows.
        sequence_rows: All new rows of the sequence.
    """

    sequence: Any
    kv_head: Any
    first: Any
    rows: Any
    sequence_rows: Any


@k.inline
def find_piece(
    input_row_offsets: k.View, task: k.Value, rows_per_task: k.Value, kv_heads: int
) -> Piece:
    """The piece of a task: pieces are numbered sequence by sequence, KV head by KV head, from the last rows to the
    first.
    """
    sequence = k.i64(0)
    index = k.i64(task)
    rows = k.i64(input_row_offsets[1]) - k.i64(input_row_offsets[0])
    pieces = k.ceildiv(rows, rows_per_task)
    # sequences without rows have no pieces
    while index >= pieces * kv_heads:
        index -= pieces * kv_heads
        sequence += 1
        rows = k.i64(input_row_offsets[sequence + 1]) - k.i64(input_row_offsets[sequence])
        pieces = k.ceildiv(rows, rows_per_task)
    # the last rows of a causal mask see most keys: they come first
    first = (pieces - 1 - index % pieces) * rows_per_task
    return Piece(sequence, index // pieces, first, k.min(rows_per_task, rows - first), rows)


def rows_per_pass(group: int, target: k.Target) -> int:
    """Rows per pass where the cache is read in place: a divisor of the group where possible, as no row is wasted then.

    Args:
        group: Query heads of a KV head.
        target: The target.
    """
    # 32 registers hold 4 x 4 accumulators with their operands, 16 only 3 x 2
    counts = (4, 3, 5, 2) if target.registers >= 32 else (3, 2)
    return next((n for n in counts if group % n == 0), 1 if group == 1 else counts[0])


def vectors_per_pass(group: int, target: k.Target) -> int:
    """Keys, or vectors of a value, that are multiplied at once by the rows of a pass.

    Three rows by four would take 12 accumulators, three queries and two keys: with 16 registers LLVM keeps one
    accumulator in memory, whose latency takes twice as long as the products.

    Args:
        group: Query heads of a KV head.
        target: The target.
    """
    return 2 if rows_per_pass(group, target) == 3 and target.registers < 32 else 4


def tile_heights_of(group: int, t: Tiling, target: k.Target) -> tuple[int, ...]:
    """The heights of register tiles; on batch-invariant targets, which pack few rows too, a lower one for these.

    Args:
        group: Query heads of a KV head.
        t: The tiling.
        target: The target.
    """
    low = min(group, ROW_THRESHOLD)
    return (t.height, low) if target.batch_invariant and low < t.height else (t.height,)


def plan_paged(
    target: k.Target,
    dtypes: tuple[k.ScalarType, k.ScalarType],
    heads: tuple[int, int, int],
    form: AttentionForm,
) -> Plan:
    """The plan of a call.

    Args:
        target: The target.
        dtypes: Element types of queries and cache.
        heads: Query heads, KV heads, and the size of a head.
        form: The compile-time parameters of the kernel.
    """
    query_heads, kv_heads, head_dim = heads
    group = query_heads // kv_heads
    t = tiling(target, k.f32, k.f32)
    # f32 again, except for pairs of bf16
    pairs = tiling(target, *dtypes)
    wide = pairs if pairs.pair == 2 else t
    matrix_tiles = amx_tiles.takes_tiles(target, wide)
    if matrix_tiles:
        t, wide = amx_tiles.with_tile_height(t), amx_tiles.with_tile_height(wide)
    long_tokens = max(LONG_TASKS * TASK_ROWS // group, 1)
    return Plan(
        plain=t,
        wide=wide,
        heights=tile_heights_of(group, t, target),
        group=group,
        kv_heads=kv_heads,
        gemv_rows=rows_per_pass(group, target),
        gemv_vectors=vectors_per_pass(group, target),
        row_threshold=0 if target.batch_invariant else ROW_THRESHOLD,
        short_tokens=max(TASK_ROWS // group, 1),
        long_tokens=long_tokens,
        # packed queries and keys are padded to whole vectors, rows of sums to whole strips of columns
        depth=round_up(head_dim, wide.step),
        stride=round_up(form.value_size or head_dim, 4 * t.width),
        # passes in place may reach past the last of `ROW_THRESHOLD` rows
        max_rows=round_up(max(long_tokens * group, 2 * ROW_THRESHOLD), t.height),
        matrix_tiles=matrix_tiles,
        mask=form.mask,
        window=form.window,
        softcap=form.softcap,
        sinks=form.sinks,
        cross=form.cross,
        rounded_cache=is_rounded(dtypes[1]),
    )


@k.inline
def split_scale(scale: k.Value) -> Any:
    """The factors of queries and of scores whose product is the scale of the products.

    Queries, which may be rounded to bf16, take the sign only, which is exact: a negative scale must be applied before
    the maximum of the scores is taken. A scale of 0 is theirs too, as the factor of scores divides.
    """
    factor = k.f32(scale)
    query_factor = k.select(factor > 0, k.f32(1), k.select(factor < 0, k.f32(-1), factor))
    return query_factor, k.select(factor == 0, k.f32(1), k.abs(factor))


def scales_before_softmax(p: Plan) -> bool:
    """Whether products are scaled before the softmax, as a soft cap or a bias needs."""
    return p.softcap > 0 or p.mask == "causal_alibi"


def of_height(p: Plan, height: int) -> Plan:
    """A plan with register tiles of another height."""
    return replace(p, plain=replace(p.plain, height=height), wide=replace(p.wide, height=height))


@k.inline
def paged_scratch(head_dim: int, p: Plan, ctx: k.Context) -> Scratch:
    """The scratch memory of a worker."""
    # sized for the largest task
    wide, max_rows = p.wide, p.max_rows
    queries = ctx.scratch(k.f32, (2 * ROW_THRESHOLD, head_dim))
    unpacked = ctx.scratch(k.bf16 if wide.pair == 2 else k.f32, (max_rows, head_dim))
    packed = ctx.scratch(wide.lane, (max_rows * p.depth // wide.pair,))
    scores = ctx.scratch(k.f32, (max_rows * KEYS,))  # [max_rows, KEYS]
    rounded = ctx.scratch(k.bf16, (max_rows * KEYS if wide.pair == 2 else 1,))
    sums = ctx.scratch(k.f32, (max_rows * p.stride,))
    maxima = ctx.scratch(k.f32, (max_rows,))
    totals = ctx.scratch(k.f32, (max_rows,))
    # a panel of keys is `depth` deep, one of values `KEYS`
    panel = ctx.scratch(wide.lane, (max(p.depth, KEYS) // wide.pair * 2 * p.plain.width,))
    state = RowState(maxima, totals, sums, p.stride, p.stride)
    tiles = k.matrix_tiles(amx_tiles.SHAPES)
    scales = [ctx.scratch(k.f32, (KEYS if p.rounded_cache else 1,)) for _ in k.static_range(2)]
    return Scratch(
        queries, unpacked, packed, panel, scores, rounded, scales[0], scales[1], state, tiles
    )


@k.inline
def first_key(position: k.Value, p: Plan) -> Any:
    """The first key that a query at a position sees."""
    if p.mask == "sliding_window" or p.mask == "symmetric_window":
        # a window of `w` tokens includes the query's own
        return k.max(position - p.window + 1, 0)
    elif p.mask == "chunked_causal":
        # chunks begin at multiples of the window, whatever the position of the query
        return position // p.window * p.window
    else:
        # an expression of the position, so that the result has its type
        return position * 0


@k.inline
def last_key(position: k.Value, total: k.Value, p: Plan) -> Any:
    """The last key that a query at a position sees, of a sequence of `total` tokens."""
    if p.mask == "null":
        return total - 1
    elif p.mask == "symmetric_window":
        return k.min(position + p.window - 1, total - 1)
    elif p.cross:
        # the query may be past the last key of its sequence
        return k.min(position, total - 1)
    else:
        return position
