"""GEMM with packed weights of 8-bit integers in the matrix tiles of AMX; exact.

A tile of the weight, 16 lanes of four bytes by 16 columns, is loaded from the panel in place; its rows are 128 bytes
apart. Panels end with a whole tile or half a tile, for which separate tile shapes are configured. Rows of A are
copied to zero-padded tiles, K block by K block (see `kernels.tiles.amx_tiles` for the cache budget)::

    A  [tiles of rows][tiles of k][16][64]        panel  [K / 4][32][4]        sums  2 tiles of 16 × 16
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from max import kernel as k
from max._backends.cpu.kernels.products.blocking import (
    Blocking,
    cut_depth,
    next_panel,
    plan,
    sums_row,
    task_at,
    task_grid,
)
from max._backends.cpu.kernels.tiles.strips import COLUMNS, Results, prefetch_strip, store_strip
from max._backends.cpu.kernels.tiles.tiling import Matrix, Tiling

HEIGHT = 16
"""Rows of a tile."""
LANES = 16
"""Lanes of four bytes along k of a tile."""
TILE = HEIGHT * LANES
"""Lanes of a tile."""
SHAPES = ((16, 64), (16, 64), (16, 64), (16, 64), (16, 64), (16, 32), (8, 64), (8, 64))
"""Sums are in tiles 0 and 1, rows in 2, columns in 3 and 4; tiles 5, 6 and 7 hold the half tile at the end of k."""
BLOCK_LANES = 128
"""The maximum number of lanes along k of a K block; the K block of a panel takes 16 KB."""
ROWS = 32
"""The number of rows of a task is a multiple of this."""
BLOCK_ROWS = 256
"""The maximum number of rows of a task."""
BLOCK_SUMS = 1 << 17
"""The maximum number of sums of a task: with the copied rows they fit the L2 cache."""
LINES = LANES * COLUMNS * 4 // 64
"""Cache lines of a panel per step in k."""


@k.inline
def copy_rows_amx(
    packed: k.View, zero_sums: k.View, a: Matrix, count: k.Value, depth: k.Integer, first: Any
) -> None:
    """Copies a K block of rows to tiles, and adds -128 times the sums of their elements to the zero sums.

    Args:
        packed: The tiles: lanes, flat.
        zero_sums: -128 times the sum of each row so far.
        a: Lanes of A, from the first row and the block's start on.
        count: The number of rows.
        depth: The number of lanes in k.
        first: Whether this is the first K block.
    """
    steps = k.ceildiv(depth, LANES)
    for r in range(k.ceildiv(count, HEIGHT) * HEIGHT):
        # [tile of rows][tile of k][16 rows][16 lanes]
        to = r // HEIGHT * steps * TILE + r % HEIGHT * LANES
        if r < count:
            total = k.splat(k.i32(0), LANES)
            for i, mask in k.vectors(depth, LANES):
                four = a.elements.load(r * a.row + i, width=LANES, mask=mask)
                # the masked lanes of the last tile along k are stored as 0
                packed.store(to + i * HEIGHT, value=four)
                # products with 1 add four bytes a lane
                total = k.dot_i8(total, k.splat(k.u8(1), 4 * LANES), k.bitcast(four, k.i8))
            before = k.i32(0) if first else zero_sums[r]
            zero_sums[r] = before + k.reduce_add(total) * -128
        else:
            # missing rows are 0, as matrix tiles multiply all 16
            for i in range(steps):
                packed.store(to + i * TILE, value=k.splat(k.i32(0), LANES))


@k.inline
def multiply_amx_int8(
    tiles: Any,
    c: k.Integer,
    packed: k.Integer,
    panel: k.Integer,
    lanes: k.Value,
    first: Any,
    ahead: k.View | None,
) -> None:
    """Multiplies 16 rows by the columns of a panel.

    Args:
        tiles: The matrix tiles, of `SHAPES`.
        c: The sums, `COLUMNS` per row, flat; set if `first`, else added to.
        packed: The rows from their first tile on, flat.
        panel: Bytes of the panel, flat.
        lanes: The number of lanes of the panel along k, a multiple of 8.
        first: Whether this is the first K block.
        ahead: The bytes of the panel that is multiplied next, to be prefetched; None: nothing is prefetched.
    """
    if first:
        for half in k.static_range(2):
            tiles.zero(half)
    else:
        for half in k.static_range(2):
            tiles.load(half, c, 16 * half, stride=COLUMNS)
    full_tiles = lanes // LANES
    for n in range(full_tiles):
        tiles.load(2, packed, n * TILE, stride=LANES)
        for side in k.static_range(2):
            right = n * (LANES * COLUMNS * 4)
            tiles.load(3 + side, panel, right + 64 * side, stride=4 * COLUMNS)
            # unsigned weights by signed rows: the zero sums correct the +128
            tiles.dot(side, 2, 3 + side, k.i8, k.u8)
            if ahead is not None:
                for line in k.static_range(side * LINES // 2, (side + 1) * LINES // 2):
                    ahead.prefetch(right + line * 64, locality=2)
    if full_tiles * LANES < lanes:
        # half a tile's depth
        tiles.load(5, packed, full_tiles * TILE, stride=LANES)
        for side in k.static_range(2):
            right = full_tiles * (LANES * COLUMNS * 4)
            tiles.load(6 + side, panel, right + 64 * side, stride=4 * COLUMNS)
            tiles.dot(side, 5, 6 + side, k.i8, k.u8)
    for half in k.static_range(2):
        tiles.store(half, c, 16 * half, stride=COLUMNS)


@k.inline
def add_zero_sums(sums: k.View, zero_sums: k.View, rows: k.Integer, width: int) -> None:
    """Adds the zero sum of each row to its sums."""
    for r in range(rows):
        for j in k.static_range(0, COLUMNS, width):
            at = r * COLUMNS + j
            corrected = sums.load(at, width=width) + zero_sums[r]
            sums.store(at, value=corrected)


@k.inline
def gemm_int8_amx(results: Results, a: Matrix, panels: k.View, t: Tiling, ctx: k.Context) -> None:
    """Computes `results` from rows `a` and `panels` `[panels, bytes]`.

    Args:
        results: The results.
        a: Lanes of A.
        panels: The packed weights.
        t: The tiling of the GEMV path.
        ctx: The context.
    """
    rows, columns, stride = results.out.shape[0], results.out.shape[1], a.row
    c = ctx.scratch(k.i32, (BLOCK_SUMS,))
    packed = ctx.scratch(k.i32, (BLOCK_ROWS * BLOCK_LANES,))
    zero_sums = ctx.scratch(k.i32, (BLOCK_ROWS,))
    blocks, block = cut_depth(stride, BLOCK_LANES, LANES)
    tall = replace(t, height=ROWS)
    task_tiles, task_panels = plan(rows, columns, ctx.num_workers, tall, BLOCK_ROWS, BLOCK_SUMS)
    b = Blocking(rows, k.ceildiv(columns, COLUMNS), ROWS, task_tiles, task_panels)
    tiles = k.matrix_tiles(SHAPES)
    tiles.configure()
    for row_block, group in ctx.parallel(task_grid(b), grain=1):
        task = task_at(b, row_block, group)
        for n in range(blocks):
            begin = n * block
            depth = k.min(block, stride - begin)
            steps = k.ceildiv(depth, LANES)
            left = Matrix(a.elements[task.row * stride + begin :], stride)
            copy_rows_amx(packed, zero_sums, left, task.rows, depth, n == 0)
            for strip in range(task.strips):
                panel = panels[task.strip + strip, begin * (4 * COLUMNS) :]
                turn = n * task.strips + strip
                ahead = next_panel(panels, task, turn, blocks, block * (4 * COLUMNS))
                for tile in range(k.ceildiv(task.rows, HEIGHT)):
                    row = tile * HEIGHT
                    sums = c[sums_row(b, row, strip, blocks) * COLUMNS :]
                    tile_rows = packed[tile * steps * TILE :]
                    # panels are padded to half a tile along k
                    lanes = k.ceildiv(depth, 8) * 8
                    if n == blocks - 1:
                        prefetch_strip(results, task.row + row, task.strip + strip, HEIGHT)
                    # one tile of rows prefetches the next panel for all
                    if tile == 0:
                        multiply_amx_int8(tiles, sums, tile_rows, panel, lanes, n == 0, ahead)
                    else:
                        multiply_amx_int8(tiles, sums, tile_rows, panel, lanes, n == 0, None)
                    if n == blocks - 1:
                        done = k.min(task.rows - row, HEIGHT)
                        # the zero sums are complete after the last K block
                        add_zero_sums(sums, zero_sums[row:], done, t.width)
                        store_strip(results, sums, task.row + row, done, task.strip + strip)
    tiles.release()
