"""Products of many rows of bf16 with panels of a bf16 weight, by the matrix tiles of AMX.

A tile of the weight, 16 pairs in k of 16 columns, is read from the panel where it lies: its rows are 128 bytes apart. Rows of A are
copied, K block by K block, to tiles of 1 KB, one after the other, filled up with zeros: rows that a power of two lies between would share
few sets of the cache. Two tiles of A and two of the weight make four of sums, 32 × 32.

A task is some rows by some panels, as without AMX (`max._kernel_library.products.panel_blocks`): K block by K block, panel by panel, 32 rows by 32 rows.
So a K block of a panel and of 32 rows, 16 KB each, stay in the L1 cache, and the copied rows and the sums in the L2 cache.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from max import kernel as k
from max._kernel_library.products.matmul import round_up
from max._kernel_library.products.panel_blocks import plan
from max._kernel_library.tiles.amx_tiles import (
    COLUMNS,
    DEPTH,
    HEIGHT,
    SHAPES,
    TILE,
    copy_tiles,
    multiply_rows,
)
from max._kernel_library.tiles.register_tiles import Tiling
from max._kernel_library.tiles.strips import Parts, ask_for_strip, store_strip

BLOCK_DEPTH = 256
"""Most elements along k of a K block."""
ROWS = 2 * HEIGHT
"""Rows that are multiplied at once."""
BLOCK_ROWS = 256
"""Most rows of a task."""
BLOCK_SUMS = 1 << 17
"""Most sums of a task: they and the copied rows stay in the L2 cache, which has 2 MB on processors with AMX."""
LINES = DEPTH // 2 * COLUMNS * 4 // 64
"""Cache lines of a panel for one step in k."""
SPREAD = BLOCK_ROWS // ROWS
"""With so many tiles of rows each asks for its part of the next panel, with fewer the first one for all of it."""


@k.inline
def many_rows(
    out: Any, a: Any, panels: Any, extra: Any, epilogue: Any, parts: Parts, t: Tiling, ctx: Any
) -> None:
    """The product of all rows.

    Args:
        out: `[M, N]`.
        a: `[M, K]`, bf16.
        panels: `[panels, elements]`, bf16; what lies behind the last row of the weight is 0.
        extra: Further results, and the epilogue's views.
        epilogue: The epilogue.
        parts: Several products; see `max._kernel_library.tiles.strips`.
        t: The tiling of few rows.
        ctx: The context.
    """
    rows, size, strips = a.shape[0], a.shape[1], panels.shape[0]
    c = ctx.scratch(k.f32, (BLOCK_SUMS,))
    packed = ctx.scratch(k.bf16, (BLOCK_ROWS * BLOCK_DEPTH,))
    # K is cut into equal blocks of whole tiles; there is one at least, which sets the sums to 0 where K is 0
    blocks = k.max(k.ceildiv(size, BLOCK_DEPTH), 1)
    block = k.max(round_up(k.ceildiv(size, blocks), DEPTH), DEPTH)
    blocks = k.max(k.ceildiv(size, block), 1)
    tall = replace(t, height=ROWS)
    high, wanted = plan(rows, strips * COLUMNS, ctx.num_workers, tall, BLOCK_ROWS, BLOCK_SUMS)
    tasks = (k.ceildiv(rows, high * ROWS), k.ceildiv(strips, wanted))
    tiles = k.matrix_tiles(SHAPES)
    tiles.configure()
    for row_block, group in ctx.parallel(tasks, grain=1):
        first_row = row_block * high * ROWS
        count = k.min(high * ROWS, rows - first_row)
        first_strip = group * wanted
        here = k.min(wanted, strips - first_strip)
        spread = count > (SPREAD - 1) * ROWS
        for n in range(blocks):
            begin = n * block
            length = k.min(block, size - begin)
            steps = k.ceildiv(length, DEPTH)
            copy_tiles(packed, a[first_row : first_row + count, begin : begin + length])
            for strip in range(here):
                panel = panels[first_strip + strip, begin * COLUMNS :]
                after = k.min(n * here + strip + 1, blocks * here - 1)
                ahead = panels[first_strip + after % here, after // here * block * COLUMNS :]
                here_strip = first_strip + strip
                for tile in range(k.ceildiv(count, ROWS)):
                    row = tile * ROWS
                    rest = count - row
                    # sums that nothing is added to later are no longer needed once they are stored
                    place = row + strip * high * ROWS if blocks > 1 else k.i64(0)
                    sums, left = c[place * COLUMNS :], packed[tile * 2 * steps * TILE :]
                    one = rest <= HEIGHT
                    asks = k.i64(SPREAD) if spread else k.i64(1)
                    if n == blocks - 1:
                        ask_for_strip(out, extra, first_row + row, here_strip, ROWS, parts)
                    for both in k.static_range(1, 3):
                        if one == (both == 1):
                            if tile >= asks:
                                multiply_rows(
                                    tiles, sums, left, panel, steps, n == 0, both, ahead,
                                    tile, 0,
                                )  # fmt: skip
                            elif spread:
                                multiply_rows(
                                    tiles, sums, left, panel, steps, n == 0, both, ahead,
                                    tile, LINES // SPREAD,
                                )  # fmt: skip
                            else:
                                multiply_rows(
                                    tiles, sums, left, panel, steps, n == 0, both, ahead,
                                    tile, LINES,
                                )  # fmt: skip
                    if n == blocks - 1:
                        store_strip(
                            out, sums, first_row + row, k.min(rest, ROWS),
                            here_strip, extra, epilogue, parts, t.width,
                        )  # fmt: skip
    tiles.release()
