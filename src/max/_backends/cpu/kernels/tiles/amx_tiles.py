"""Products of bf16 in the matrix tiles of AMX: 16 or 32 rows by panels of 32 columns, for all kernels that pack their
operands.

Rows of A are in tiles of 1 KB, zero-filled, so that rows a power of two apart do not share sets of the cache. A panel
of B has pairs of neighbors in k side by side, as without AMX; a tile of it, 16 pairs of 16 columns, is loaded in
place, with rows 128 bytes apart::

    A  [tiles of rows][tiles of k][16][32]            B  [K / 2][32][2]

       ┌────────┬────────┬──                             16 columns 16 columns
       │ 16 × 32│ 16 × 32│ …  tile 4                     ┌─────────┬─────────┐
       ├────────┼────────┼──                   16 pairs  │ tile 6  │ tile 7  │
       │ 16 × 32│ 16 × 32│ …  tile 5                     ├─────────┼─────────┤
       └────────┴────────┴──                             │    …    │    …    │

Sums are in tiles 0 … 3: ``4·6, 4·7, 5·6, 5·7``. All eight tile registers are used: each loaded tile takes part in two
products.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from max import kernel as k
from max._backends.cpu.kernels.tiles.tiling import Tiling
from max.kernel import Target

HEIGHT = 16
"""Rows of a tile."""
DEPTH = 32
"""Elements along k of a tile."""
TILE = HEIGHT * DEPTH
"""Elements of a tile."""
COLUMNS = 32
"""Columns of a panel."""
SHAPES = ((HEIGHT, 64),) * 8
"""All tiles are full, tails are zero: sums in 0 … 3, rows in 4 and 5, columns in 6 and 7."""


class Ahead(NamedTuple):
    """The data that `multiply_amx` prefetches.

    Args:
        panel: The panel that is multiplied next, flat.
        share: The number of the share of its lines.
        lines: Cache lines of a share in each step of k; none where 0.
    """

    panel: Any
    share: Any
    lines: int


def takes_tiles(target: Target, *tilings: Tiling) -> bool:
    """Whether products use matrix tiles: where all of them multiply pairs of bf16 and panels have 32 columns.

    Args:
        target: The target.
        tilings: The tilings of the products without matrix tiles.
    """
    return target.float_tile_products and all(
        # panels of register tiles are loaded as they are, so they must be 32 columns wide
        t.pair == 2 and 2 * t.width == COLUMNS
        for t in tilings
    )


def with_tile_height(t: Tiling) -> Tiling:
    """A tiling with the rows of a matrix tile."""
    return replace(t, height=HEIGHT)


@k.inline
def part_memory(ctx: k.Context) -> Any:
    """Scratch memory for the sums of a K block; see `multiply_amx`."""
    return ctx.scratch(k.f32, (2 * HEIGHT * COLUMNS,))


@k.inline
def copy_tiles(packed: k.View, rows: k.View) -> None:
    """Copies rows to tiles, with zeros for the tails along k and for rows past the last one.

    Args:
        packed: The tiles, flat.
        rows: `[rows, k]`.
    """
    count, size = rows.shape[0], rows.shape[1]
    steps = k.ceildiv(size, DEPTH)
    for r in range(count):
        # [tile of rows][tile of k][16 rows][32]
        to = r // HEIGHT * steps * TILE + r % HEIGHT * DEPTH
        for i, mask in k.vectors(size, DEPTH):
            packed.store(to + i * HEIGHT, value=rows.load(r, i, width=DEPTH, mask=mask))
    for r in range(count, k.ceildiv(count, HEIGHT) * HEIGHT):
        to = r // HEIGHT * steps * TILE + r % HEIGHT * DEPTH
        for i in range(steps):
            packed.store(to + i * TILE, value=k.splat(k.bf16(0), DEPTH))


@k.inline
def zero_panel_tail(panel: k.View, count: k.Value) -> None:
    """Zeroes the lanes of a panel behind its last row, up to whole tiles.

    Args:
        panel: Lanes `[lanes, COLUMNS]`, flat.
        count: Rows of single elements.
    """
    # pairs of k: an odd last row has a zero beside it already
    for lane in range(k.ceildiv(count, 2), k.ceildiv(count, DEPTH) * (DEPTH // 2)):
        for half in k.static_range(0, COLUMNS, 16):
            panel.store(lane * COLUMNS + half, value=k.splat(k.i32(0), 16))


@k.inline
def multiply_amx(
    tiles: Any, c: Any, packed: k.Integer, panel: k.Integer, steps: k.Integer, first: Any, high: int, ahead: Ahead,
    part: k.View | None = None,
) -> None:  # fmt: skip
    """Multiplies 16 or 32 rows by the columns of a panel.

    Args:
        tiles: The matrix tiles, of `SHAPES`.
        c: The sums, `COLUMNS` a row, flat; set where `first`, else added to.
        packed: The rows from their first tile on, flat.
        panel: The panel, flat.
        steps: Tiles along k.
        first: Whether this is the first K block.
        high: Tiles of rows, 1 or 2.
        ahead: The data to prefetch.
        part: Memory for the sums of this K block, `2 * HEIGHT * COLUMNS` elements; they begin at 0, and are added to
            those of earlier K blocks at the end. None: they are added up in the tiles.
    """
    if first or part is not None:
        for i in k.static_range(2 * high):
            tiles.zero(i)
    else:
        for i in k.static_range(2 * high):
            # tiles 0, 1 are the upper 16 rows, 2, 3 the lower: columns 0 to 15, then 16 to 31
            tiles.load(i, c, i // 2 * HEIGHT * COLUMNS + i % 2 * 16, stride=COLUMNS)
    lines = ahead.lines
    for n in range(steps):
        right = n * (DEPTH * COLUMNS)
        next_lines = right + ahead.share * (lines * 32)  # 32 elements a cache line
        # loads and products alternate, as a load takes as long as a product
        tiles.load(6, panel, right, stride=2 * COLUMNS)
        tiles.load(4, packed, n * TILE, stride=DEPTH)
        tiles.dot(0, 4, 6, k.bf16)
        for line in k.static_range(0, lines // 2):
            ahead.panel.prefetch(next_lines + line * 32, locality=2)
        tiles.load(7, panel, right + 32, stride=2 * COLUMNS)
        tiles.dot(1, 4, 7, k.bf16)
        for line in k.static_range(lines // 2, lines):
            ahead.panel.prefetch(next_lines + line * 32, locality=2)
        if high == 2:
            # tiles of the second 16 rows lie behind all those of the first
            tiles.load(5, packed, (steps + n) * TILE, stride=DEPTH)
            tiles.dot(2, 5, 6, k.bf16)
            tiles.dot(3, 5, 7, k.bf16)
    sums = c if part is None else part
    for i in k.static_range(2 * high):
        tiles.store(i, sums, i // 2 * HEIGHT * COLUMNS + i % 2 * 16, stride=COLUMNS)
    if part is not None:
        for i in range(0, high * HEIGHT * COLUMNS, 16):
            total = part.load(i, width=16)
            if not first:
                total = c.load(i, width=16) + total
            c.store(i, value=total)
