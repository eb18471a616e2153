"""GEMM with packed weights of 8-bit integers: tasks of rows by panels (`kernels.products.blocking`), in
register tiles.

Register budget: `height` × 2 accumulators, two vectors of elements, a broadcast word, and with magnitudes a temporary
sum of pairs; tiles have 12 rows with 32 registers and 6 with 16. Cache budget: see
`kernels.products.blocking`; a K block of a panel is `LANES_K` × 32 × 4 bytes, 32 KB.
"""

from __future__ import annotations

from typing import Any

from max import kernel as k
from max._backends.cpu.kernels.products.blocking import (
    BLOCK_ROWS,
    BLOCK_SUMS,
    LANES_K,
    Blocking,
    cut_depth,
    next_panel,
    plan,
    task_at,
    task_grid,
    tile_heights,
)
from max._backends.cpu.kernels.products.dense.panels import COPY_STRIDE
from max._backends.cpu.kernels.products.int8.gemv import Int8Rows, add_four_products, sum_rows
from max._backends.cpu.kernels.products.int8.panels import FOUR
from max._backends.cpu.kernels.products.panel_tiles import (
    KBlock,
    PanelStep,
    for_each_step,
    multiply_panel,
)
from max._backends.cpu.kernels.tiles.micro_kernels import load_sums, store_sums
from max._backends.cpu.kernels.tiles.strips import COLUMNS, Results
from max._backends.cpu.kernels.tiles.tiling import Matrix, Tiling


@k.inline
def multiply_step_int8(
    sums: k.View, x: KBlock, row_lanes: Any, n: k.Value, height: int, second: bool, t: Tiling
) -> None:
    """Adds the products of lane `n` of `height` rows, at the offsets `row_lanes`, with two vectors of columns."""
    # [K / 4, COLUMNS, 4]: lane n of two vectors of columns
    low = x.panel.load(FOUR * n * COLUMNS, width=FOUR * t.width)
    high = x.panel.load(FOUR * (n * COLUMNS + t.width), width=FOUR * t.width)
    for i in k.static_range(height):
        word = x.rows.elements[row_lanes[i] + n]
        sums[i, 0] = add_four_products(sums[i, 0], low, word, second, x.rows.magnitude)
        sums[i, 1] = add_four_products(sums[i, 1], high, word, second, x.rows.magnitude)


@k.inline
def multiply_rows_int8(
    c: Any, x: KBlock, row: k.Value, height: int, t: Tiling, ahead: k.View, prefetches: k.Value
) -> None:
    """Multiplies `height` rows by two vectors of columns: one register tile, a `MultiplyRows`.

    With magnitudes, a second pass over the rows runs if an element is -128, whose magnitude does not fit.
    """
    a = x.rows
    sums = k.tile(k.i32, (height, 2), width=t.width, fill=0)
    if not x.first:
        load_sums(sums, Matrix(c, COLUMNS), height, 2, t.width)
    rows = [k.min(row + i, a.count - 1) for i in k.static_range(height)]
    row_lanes = [r * a.stride for r in rows]
    # the zero sums are those of this K block: the sums of earlier blocks have theirs
    if not a.magnitude:
        for i in k.static_range(height):
            for j in k.static_range(2):
                sums[i, j] = sums[i, j] + a.zero_sums[rows[i]]
    # the second pass adds what the first one lacks for elements of -128
    for second in k.unroll((False, True) if a.magnitude else (False,)):
        if second:
            if a.has_lowest == 1:
                for n in range(x.depth):
                    multiply_step_int8(sums, x, row_lanes, n, height, second, t)
        else:
            for_each_step(
                lambda n: multiply_step_int8(sums, x, row_lanes, n, height, False, t),  # pyright: ignore[reportUnknownLambdaType]
                x, row, height, ahead, prefetches, lane=FOUR,
            )  # fmt: skip
    store_sums(Matrix(c, COLUMNS), sums, height, 2, t.width)


@k.inline
def gemm_int8(
    results: Results,
    a: Matrix,
    panels: k.View,
    magnitude: bool,
    copied: bool,
    t: Tiling,
    ctx: k.Context,
) -> None:
    """Computes `results` from rows `a` and `panels` `[panels, bytes]`.

    Args:
        results: The results.
        a: Lanes of A.
        panels: The packed weights.
        magnitude: Whether magnitudes are multiplied; see `by_magnitude`.
        copied: Whether K blocks of the rows are copied instead of read in place.
        t: The tiling.
        ctx: The context.
    """
    rows, columns, stride = results.out.shape[0], results.out.shape[1], a.row
    c = ctx.scratch(k.i32, (BLOCK_SUMS + t.height * COLUMNS,))
    zero_sums = ctx.scratch(k.i32, (BLOCK_SUMS // COLUMNS,))
    copy = ctx.scratch(k.i32, (BLOCK_ROWS * COPY_STRIDE if copied else 1,))
    blocks, block = cut_depth(stride, LANES_K, t.width)
    tiles, task_panels = plan(rows, columns, ctx.num_workers, t)
    b = Blocking(rows, k.ceildiv(columns, COLUMNS), t.height, tiles, task_panels)
    for row_block, group in ctx.parallel(task_grid(b), grain=1):
        task = task_at(b, row_block, group)
        has_lowest = k.i64(0)
        for turn in range(blocks * task.strips):
            n, strip = turn // task.strips, turn % task.strips
            depth = k.min(block, stride - n * block)
            left = a.elements[task.row * stride + n * block :]
            lanes = Int8Rows(left, stride, task.rows, zero_sums, has_lowest, magnitude)
            # strip 0 sums the rows of the K block for all strips
            if strip == 0:
                has_lowest = sum_rows(lanes, depth, t.width, copy if copied else None)
            if copied:
                lanes = lanes._replace(elements=copy, stride=k.i64(COPY_STRIDE))
            # four bytes a lane and column
            panel = panels[task.strip + strip, FOUR * n * block * COLUMNS :]
            ahead = next_panel(panels, task, turn, blocks, FOUR * block * COLUMNS)
            x = KBlock(lanes._replace(has_lowest=has_lowest), panel, depth, n == 0)
            step = PanelStep(x, strip, blocks, n, ahead)
            # the sums have no room for taller tiles
            multiply_panel(
                results, c, step, task, b, t, multiply_rows_int8, tile_heights(t)[:2], task.rows, FOUR
            )  # fmt: skip
