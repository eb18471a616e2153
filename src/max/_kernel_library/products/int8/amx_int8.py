"""Exact products of many rows of 8-bit integers with panels of an 8-bit weight, by the matrix tiles of AMX.

A tile of the weight, 16 lanes of four bytes by 16 columns, is read from the panel where it lies, its rows 128 bytes apart; panels end with whole tiles or
with half of one, which has tiles of its own. Rows of A are copied, K block by K block, to tiles `[tiles of rows][tiles of k][16][64]`, filled up with zeros.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from max import kernel as k
from max._kernel_library.products.matmul import round_up
from max._kernel_library.products.panel_blocks import plan
from max._kernel_library.tiles.register_tiles import Tiling
from max._kernel_library.tiles.strips import COLUMNS, ask_for_strip, store_strip

HEIGHT = 16
"""Rows of a tile."""
LANES = 16
"""Lanes of four bytes along k of a tile."""
TILE = HEIGHT * LANES
"""Lanes of a tile."""
SHAPES = ((16, 64), (16, 64), (16, 64), (16, 64), (16, 64), (16, 32), (8, 64), (8, 64))
"""Sums are in tiles 0 and 1, rows in 2, columns in 3 and 4; the last half of a tile's depth in 5, 6 and 7."""
BLOCK_LANES = 128
"""Most lanes along k of a K block: that of a panel takes 16 KB."""
ROWS = 32
"""Rows of a task are a multiple of this."""
BLOCK_ROWS = 256
"""Most rows of a task."""
BLOCK_SUMS = 1 << 17
"""Most sums of a task: they and the copied rows stay in the L2 cache."""
LINES = LANES * COLUMNS * 4 // 64
"""Cache lines of a panel for one step in k."""


@k.inline
def copy_tiles(
    packed: Any, zeros: Any, a: Any, stride: Any, count: Any, depth: Any, first: Any
) -> None:
    """Copies a K block of some rows to tiles, and takes 128 times their sums from what is there.

    Args:
        packed: Where they go: lanes, flat.
        zeros: -128 times the sums of the rows so far.
        a: Lanes of A from the first row and the block on, flat.
        stride: Of them from row to row.
        count: Rows.
        depth: Lanes in k.
        first: Whether this is the first block.
    """
    steps = k.ceildiv(depth, LANES)
    for r in range(k.ceildiv(count, HEIGHT) * HEIGHT):
        to = r // HEIGHT * steps * TILE + r % HEIGHT * LANES
        if r < count:
            total = k.splat(k.i32(0), LANES)
            for i, mask in k.vectors(depth, LANES):
                four = a.load(r * stride + i, width=LANES, mask=mask)
                packed.store(to + i * HEIGHT, value=four)
                total = k.dot_i8(total, k.splat(k.u8(1), 4 * LANES), k.bitcast(four, k.i8))
            before = k.i32(0) if first else zeros[r]
            zeros[r] = before + k.reduce_add(total) * -128
        else:
            for i in range(steps):
                packed.store(to + i * TILE, value=k.splat(k.i32(0), LANES))


@k.inline
def multiply_rows(
    tiles: Any, c: Any, packed: Any, panel: Any, lanes: Any, first: Any, ahead: Any
) -> None:
    """Multiplies 16 rows by the columns of a panel.

    Args:
        tiles: The matrix tiles, of `SHAPES`.
        c: The sums, `COLUMNS` a row, flat; set where `first`, else added to.
        packed: The rows from their first tile on, flat.
        panel: Bytes of the panel, flat.
        lanes: Lanes along k of the panel, a multiple of 8.
        first: Whether nothing was summed yet.
        ahead: What is multiplied next, to be asked for meanwhile: bytes, flat; None: nothing.
    """
    if first:
        for half in k.static_range(2):
            tiles.zero(half)
    else:
        for half in k.static_range(2):
            tiles.load(half, c, 16 * half, stride=COLUMNS)
    whole = lanes // LANES
    for n in range(whole):
        tiles.load(2, packed, n * TILE, stride=LANES)
        for side in k.static_range(2):
            right = n * (LANES * COLUMNS * 4)
            tiles.load(3 + side, panel, right + 64 * side, stride=4 * COLUMNS)
            tiles.dot(side, 2, 3 + side, k.i8, k.u8)
            if ahead is not None:
                for line in k.static_range(side * LINES // 2, (side + 1) * LINES // 2):
                    ahead.prefetch(right + line * 64, locality=2)
    if whole * LANES < lanes:
        tiles.load(5, packed, whole * TILE, stride=LANES)
        for side in k.static_range(2):
            right = whole * (LANES * COLUMNS * 4)
            tiles.load(6 + side, panel, right + 64 * side, stride=4 * COLUMNS)
            tiles.dot(side, 5, 6 + side, k.i8, k.u8)
    for half in k.static_range(2):
        tiles.store(half, c, 16 * half, stride=COLUMNS)


@k.inline
def many_rows(
    out: Any, a: Any, stride: Any, panels: Any, extra: Any, epilogue: Any, t: Tiling, ctx: Any
) -> None:
    """The product of all rows.

    Args:
        out: `[M, N]`.
        a: Lanes of A, flat.
        stride: Of them from row to row.
        panels: `[panels, bytes]`.
        extra: The epilogue's views.
        epilogue: The epilogue.
        t: The tiling of few rows.
        ctx: The context.
    """
    rows, columns = out.shape[0], out.shape[1]
    c = ctx.scratch(k.i32, (BLOCK_SUMS,))
    packed = ctx.scratch(k.i32, (BLOCK_ROWS * BLOCK_LANES,))
    zeros = ctx.scratch(k.i32, (BLOCK_ROWS,))
    # K is cut into equal blocks of whole tiles; there is one at least, which sets the sums to 0 where K is 0
    blocks = k.max(k.ceildiv(stride, BLOCK_LANES), 1)
    block = k.max(round_up(k.ceildiv(stride, blocks), LANES), LANES)
    blocks = k.max(k.ceildiv(stride, block), 1)
    strips = k.ceildiv(columns, COLUMNS)
    tall = replace(t, height=ROWS)
    high, wanted = plan(rows, columns, ctx.num_workers, tall, BLOCK_ROWS, BLOCK_SUMS)
    tasks = (k.ceildiv(rows, high * ROWS), k.ceildiv(strips, wanted))
    tiles = k.matrix_tiles(SHAPES)
    tiles.configure()
    for row_block, group in ctx.parallel(tasks, grain=1):
        first_row = row_block * high * ROWS
        count = k.min(high * ROWS, rows - first_row)
        first_strip = group * wanted
        here = k.min(wanted, strips - first_strip)
        for n in range(blocks):
            begin = n * block
            depth = k.min(block, stride - begin)
            steps = k.ceildiv(depth, LANES)
            copy_tiles(packed, zeros, a[first_row * stride + begin :], stride, count, depth, n == 0)
            for strip in range(here):
                panel = panels[first_strip + strip, begin * (4 * COLUMNS) :]
                after = k.min(n * here + strip + 1, blocks * here - 1)
                next_begin = after // here * block * (4 * COLUMNS)
                ahead = panels[first_strip + after % here, next_begin:]
                for tile in range(k.ceildiv(count, HEIGHT)):
                    row = tile * HEIGHT
                    # sums that nothing is added to later are no longer needed once they are stored
                    place = row + strip * high * ROWS if blocks > 1 else k.i64(0)
                    sums, left = c[place * COLUMNS :], packed[tile * steps * TILE :]
                    lanes = k.ceildiv(depth, 8) * 8
                    if n == blocks - 1:
                        ask_for_strip(out, extra, first_row + row, first_strip + strip, HEIGHT, ())
                    if tile == 0:
                        multiply_rows(tiles, sums, left, panel, lanes, n == 0, ahead)
                    else:
                        multiply_rows(tiles, sums, left, panel, lanes, n == 0, None)
                    if n == blocks - 1:
                        done = k.min(count - row, HEIGHT)
                        for r in range(done):
                            for j in k.static_range(0, COLUMNS, t.width):
                                at = r * COLUMNS + j
                                less = sums.load(at, width=t.width) + zeros[row + r]
                                sums.store(at, value=less)
                        store_strip(
                            out, sums, first_row + row, done, first_strip + strip, extra, epilogue,
                            (), t.width,
                        )  # fmt: skip
    tiles.release()
