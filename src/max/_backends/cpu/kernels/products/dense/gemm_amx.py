"""GEMM with packed bf16 weights in the matrix tiles of AMX; see `kernels.tiles.amx_tiles` for their layout.

Tasks are those of `kernels.products.blocking`: K block by K block, panel by panel, 32 rows by 32 rows. Rows
of A are copied to tiles, K block by K block.

Cache budget: a K block of a panel and of 32 rows, 16 KB each, stay in the L1 cache; the copied rows and the sums in the
L2 cache.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from max import kernel as k
from max._backends.cpu.kernels.products.blocking import (
    Blocking,
    Task,
    cut_depth,
    plan,
    sums_row,
    task_at,
    task_grid,
)
from max._backends.cpu.kernels.products.dense.coded import coded_panel, decode_rows
from max._backends.cpu.kernels.products.dense.gemm import (
    Cut,
    block_ahead,
    count_panels,
)
from max._backends.cpu.kernels.tiles.amx_tiles import (
    COLUMNS,
    DEPTH,
    HEIGHT,
    SHAPES,
    TILE,
    Ahead,
    copy_tiles,
    multiply_amx,
    part_memory,
)
from max._backends.cpu.kernels.tiles.strips import Results, prefetch_strip, store_strip
from max._backends.cpu.kernels.tiles.tiling import Tiling

BLOCK_DEPTH = 256
"""The maximum number of elements along k of a K block."""
ROWS = 2 * HEIGHT
"""Rows per pass: two tiles."""
BLOCK_ROWS = 256
"""The maximum number of rows of a task."""
BLOCK_SUMS = 1 << 17
"""The maximum number of sums of a task: with the copied rows they fit the L2 cache, 2 MB on processors with AMX."""
LINES = DEPTH // 2 * COLUMNS * 4 // 64
"""Cache lines of a panel per step in k."""
SPREAD = BLOCK_ROWS // ROWS
"""The number of passes over the rows of a full task; they share the prefetches of the next panel. In smaller tasks the
first pass prefetches all of it.
"""


@k.inline
def multiply_tiles(
    tiles: Any, sums: Any, left: k.Integer, panel: k.Integer, steps: k.Integer, first: Any, remaining: k.Value,
    tile: k.Value, shares_prefetches: Any, ahead: Any, part: k.View,
) -> None:  # fmt: skip
    """Multiplies one or two row tiles by a panel; the passes share the prefetches of the next panel.

    Args:
        tiles: The matrix tiles.
        sums: The sums of the rows, flat.
        left: The tiles of the rows, flat.
        panel: The panel, flat.
        steps: The number of tiles along k.
        first: Whether this is the first K block.
        remaining: The number of rows from the first of these tiles to the end of the task.
        tile: The index of the pass over the rows.
        shares_prefetches: Whether several passes share the prefetches.
        ahead: The next panel, flat.
        part: Memory for the sums of a K block; see `multiply_amx`.
    """
    # the last pass of a task may have the rows of one tile only
    single = remaining <= HEIGHT
    prefetching = k.i64(SPREAD) if shares_prefetches else k.i64(1)
    for high in k.static_range(1, 3):
        if single == (high == 1):
            # the next panel is prefetched already
            if tile >= prefetching:
                multiply_amx(
                    tiles, sums, left, panel, steps, first, high, Ahead(ahead, tile, 0), part
                )
            elif shares_prefetches:
                share = Ahead(ahead, tile, LINES // SPREAD)
                multiply_amx(tiles, sums, left, panel, steps, first, high, share, part)
            else:
                whole = Ahead(ahead, tile, LINES)
                multiply_amx(tiles, sums, left, panel, steps, first, high, whole, part)


def pair_tiling(t: Tiling) -> Tiling:
    """The tiling of the pairs that matrix tiles read."""
    return replace(t, lane=k.i32, pair=2)


class AmxMemory(NamedTuple):
    """Scratch memory of a worker: sums, the tiles of a K block of rows, the sums of a K block or None, and a decoded
    K block of a panel.
    """

    sums: Any
    rows: Any
    part: Any
    decoded_panel: Any


@k.inline
def amx_memory(folds: bool, coded: bool, ctx: k.Context) -> AmxMemory:
    """The scratch memory of a launch; see `gemm_panels_amx`."""
    return AmxMemory(
        ctx.scratch(k.f32, (BLOCK_SUMS,)),
        ctx.scratch(k.bf16, (BLOCK_ROWS * BLOCK_DEPTH,)),
        part_memory(ctx) if folds else None,
        ctx.scratch(k.i32, (BLOCK_DEPTH // 2 * COLUMNS if coded else 1,)),
    )


@k.inline
def gemm_task_amx(
    results: Results, a: k.View, panels: Any, memory: AmxMemory, tiles: Any, task: Task, b: Blocking,
    t: Tiling,
) -> None:  # fmt: skip
    """Multiplies the rows of a task by its panels; `tiles` are the matrix tiles, see `gemm_task` for the others."""
    size = a.shape[1]
    blocks, block = cut_depth(size, BLOCK_DEPTH, DEPTH)
    # a full task has as many passes as shares of the next panel
    spread = task.rows > (SPREAD - 1) * ROWS
    for n in range(blocks):
        begin = n * block
        length = k.min(block, size - begin)
        # the panel is padded with zeros to whole steps
        steps = k.ceildiv(length, DEPTH)
        # rows of A are copied once for all panels of the task
        copy_tiles(memory.rows, a[task.row : task.row + task.rows, begin : begin + length])
        for strip in range(task.strips):
            # [steps, lanes, COLUMNS]
            if t.coded:
                source = coded_panel(panels, task.strip + strip, size)
                decode_rows(memory.decoded_panel, source, begin, length, pair_tiling(t))
                panel = memory.decoded_panel.view(k.bf16)
            else:
                panel = panels[task.strip + strip, begin * COLUMNS :]
            ahead = block_ahead(
                panels, task, n * task.strips + strip, Cut(blocks, block, size), t
            ).view(k.bf16)
            for tile in range(k.ceildiv(task.rows, ROWS)):
                row = tile * ROWS
                remaining = task.rows - row
                sums = memory.sums[sums_row(b, row, strip, blocks) * COLUMNS :]  # [ROWS, COLUMNS]
                left = memory.rows[tile * 2 * steps * TILE :]  # [2, steps, TILE]
                if n == blocks - 1:
                    # in the last K block the results are stored next
                    prefetch_strip(results, task.row + row, task.strip + strip, ROWS)
                multiply_tiles(
                    tiles, sums, left, panel, steps, n == 0, remaining, tile, spread, ahead,
                    memory.part,
                )  # fmt: skip
                if n == blocks - 1:
                    done = k.min(remaining, ROWS)
                    store_strip(results, sums, task.row + row, done, task.strip + strip)


@k.inline
def gemm_panels_amx(results: Results, a: k.View, panels: Any, t: Tiling, ctx: k.Context) -> None:
    """Computes `results` from `a` `[M, K]` and `panels` `[panels, elements]`, both bf16.

    Args:
        results: The results.
        a: The left operand.
        panels: The packed weights; rows past K are 0.
        t: The tiling of the GEMV path.
        ctx: The context.
    """
    rows, strips = a.shape[0], count_panels(panels, t)
    memory = amx_memory(t.folds, t.coded, ctx)
    tall = replace(t, height=ROWS)
    task_tiles, task_panels = plan(
        rows, strips * COLUMNS, ctx.num_workers, tall, BLOCK_ROWS, BLOCK_SUMS
    )
    b = Blocking(rows, strips, ROWS, task_tiles, task_panels)
    tiles = k.matrix_tiles(SHAPES)
    tiles.configure()
    # grain 1: tasks are long, and few
    for row_block, group in ctx.parallel(task_grid(b), grain=1):
        gemm_task_amx(results, a, panels, memory, tiles, task_at(b, row_block, group), b, t)
    tiles.release()
