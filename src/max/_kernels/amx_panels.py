"""Products of many rows of bf16 with panels of a bf16 weight, by the matrix tiles of AMX.

A tile of the weight, 16 pairs in k of 16 columns, is read from the panel where it lies: its rows are 128 bytes apart. Rows of A are
copied, K block by K block, to tiles of 1 KB, one after the other, filled up with zeros: rows that a power of two lies between would share
few sets of the cache. Two tiles of A and two of the weight make four of sums, 32 × 32.

A task is some rows by some panels, as without AMX (`max._kernels.panel_blocks`): K block by K block, panel by panel, 32 rows by 32 rows.
So a K block of a panel and of 32 rows, 16 KB each, stay in the L1 cache, and the copied rows and the sums in the L2 cache.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from max import kernel as k
from max._kernels.matmul import round_up
from max._kernels.panel_blocks import COLUMNS, plan
from max._kernels.strips import Parts, ask_for_strip, store_strip
from max._kernels.tiles import Tiling

TILE_ROWS = 16
"""Rows of a tile."""
DEPTH = 32
"""Elements along k of a tile."""
BLOCK_DEPTH = 256
"""Most elements along k of a K block."""
HEIGHT = 2 * TILE_ROWS
"""Rows that are multiplied at once."""
BLOCK_ROWS = 256
"""Most rows of a task."""
BLOCK_SUMS = 1 << 17
"""Most sums of a task: they and the copied rows stay in the L2 cache, which has 2 MB on processors with AMX."""
SHAPES = ((TILE_ROWS, 64),) * 8
"""All tiles are full: what is missing is zero."""
LINES = DEPTH // 2 * COLUMNS * 4 // 64
"""Cache lines of a panel for one step in k."""
SPREAD = BLOCK_ROWS // HEIGHT
"""With so many tiles of rows each asks for its part of the next panel, with fewer the first one for all of it."""


@k.inline
def copy_tiles(packed: Any, rows: Any) -> None:
    """Copies a K block of some rows to tiles `[tiles of rows][tiles of k][16][32]`, filled up with zeros.

    Args:
        packed: `[rows of tiles, 32]`.
        rows: `[rows, k]`.
    """
    count, size = rows.shape[0], rows.shape[1]
    steps = k.ceildiv(size, DEPTH)
    for r in range(count):
        to = r // TILE_ROWS * steps * TILE_ROWS + r % TILE_ROWS
        for i, mask in k.vectors(size, DEPTH):
            packed.store(
                to + i // DEPTH * TILE_ROWS, 0, value=rows.load(r, i, width=DEPTH, mask=mask)
            )
    nothing = k.splat(k.bf16(0), DEPTH)
    for r in range(count, round_up(count, TILE_ROWS)):
        to = r // TILE_ROWS * steps * TILE_ROWS + r % TILE_ROWS
        for i in range(steps):
            packed.store(to + i * TILE_ROWS, 0, value=nothing)


@k.inline
def multiply_rows(
    tiles: Any, c: Any, place: Any, packed: Any, at: Any, panel: Any, steps: Any, first: Any,
    high: int, ahead: Any, part: Any, lines: int,
) -> None:  # fmt: skip
    """Multiplies 16 or 32 rows by the columns of a panel.

    Args:
        tiles: The matrix tiles: sums in 0 … 3, rows in 4 and 5, columns in 6 and 7.
        c: The sums `[rows, COLUMNS]`.
        place: Their first row there; set where `first`, else added to.
        packed: The rows, see `copy_tiles`.
        at: Their first tile there.
        panel: The panel, flat.
        steps: Tiles along k.
        first: Whether nothing was summed yet.
        high: Tiles of rows, 1 or 2.
        ahead: What is multiplied next, to be asked for meanwhile: a panel, flat.
        part: Which part of it.
        lines: Cache lines of a part in each step; none where 0.
    """
    if first:
        for i in k.static_range(2 * high):
            tiles.zero(i)
    else:
        for i in k.static_range(2 * high):
            tiles.load(i, c, place + i // 2 * TILE_ROWS, i % 2 * 16)
    for n in range(steps):
        right = n * (DEPTH * COLUMNS)
        next_lines = right + part * (lines * 32)
        # a product between any two loads: loads take as long as products
        tiles.load(6, panel, right, stride=2 * COLUMNS)
        tiles.load(4, packed, (at + n) * TILE_ROWS, 0)
        tiles.dot(0, 4, 6, k.bf16)
        for line in k.static_range(0, lines // 2):
            ahead.prefetch(next_lines + line * 32, locality=2)
        tiles.load(7, panel, right + 32, stride=2 * COLUMNS)
        tiles.dot(1, 4, 7, k.bf16)
        for line in k.static_range(lines // 2, lines):
            ahead.prefetch(next_lines + line * 32, locality=2)
        if high == 2:
            tiles.load(5, packed, (at + steps + n) * TILE_ROWS, 0)
            tiles.dot(2, 5, 6, k.bf16)
            tiles.dot(3, 5, 7, k.bf16)
    for i in k.static_range(2 * high):
        tiles.store(i, c, place + i // 2 * TILE_ROWS, i % 2 * 16)


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
        parts: Several products; see `max._kernels.strips`.
        t: The tiling of few rows.
        ctx: The context.
    """
    rows, size, strips = a.shape[0], a.shape[1], panels.shape[0]
    c = ctx.scratch(k.f32, (BLOCK_SUMS // COLUMNS, COLUMNS))
    flat = c.reshape(BLOCK_SUMS)
    packed = ctx.scratch(k.bf16, (BLOCK_ROWS * BLOCK_DEPTH // DEPTH, DEPTH))
    # K is cut into equal blocks of whole tiles; there is one at least, which sets the sums to 0 where K is 0
    blocks = k.max(k.ceildiv(size, BLOCK_DEPTH), 1)
    block = k.max(round_up(k.ceildiv(size, blocks), DEPTH), DEPTH)
    blocks = k.max(k.ceildiv(size, block), 1)
    tall = replace(t, height=HEIGHT)
    high, wanted = plan(rows, strips * COLUMNS, ctx.num_workers, tall, BLOCK_ROWS, BLOCK_SUMS)
    tasks = (k.ceildiv(rows, high * HEIGHT), k.ceildiv(strips, wanted))
    tiles = k.matrix_tiles(SHAPES)
    tiles.configure()
    for row_block, group in ctx.parallel(tasks, grain=1):
        first_row = row_block * high * HEIGHT
        count = k.min(high * HEIGHT, rows - first_row)
        first_strip = group * wanted
        here = k.min(wanted, strips - first_strip)
        spread = count > (SPREAD - 1) * HEIGHT
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
                for tile in range(k.ceildiv(count, HEIGHT)):
                    row = tile * HEIGHT
                    rest = count - row
                    # sums that nothing is added to later are no longer needed once they are stored
                    place = row + strip * high * HEIGHT if blocks > 1 else k.i64(0)
                    at = tile * 2 * steps
                    one = rest <= TILE_ROWS
                    asks = k.i64(SPREAD) if spread else k.i64(1)
                    if n == blocks - 1:
                        ask_for_strip(out, extra, first_row + row, here_strip, HEIGHT, parts)
                    for both in k.static_range(1, 3):
                        if one == (both == 1):
                            if tile >= asks:
                                multiply_rows(
                                    tiles, c, place, packed, at, panel, steps, n == 0, both, ahead,
                                    tile, 0,
                                )  # fmt: skip
                            elif spread:
                                multiply_rows(
                                    tiles, c, place, packed, at, panel, steps, n == 0, both, ahead,
                                    tile, LINES // SPREAD,
                                )  # fmt: skip
                            else:
                                multiply_rows(
                                    tiles, c, place, packed, at, panel, steps, n == 0, both, ahead,
                                    tile, LINES,
                                )  # fmt: skip
                    if n == blocks - 1:
                        store_strip(
                            out, flat[place * COLUMNS :], first_row + row, k.min(rest, HEIGHT),
                            here_strip, extra, epilogue, parts, t.width,
                        )  # fmt: skip
    tiles.release()
