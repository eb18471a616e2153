"""Products of many rows with packed quantised weights, by the matrix tiles of AMX.

A block of 32 elements along k of an unpacked strip is a tile of 8 rows (lines) of 16 columns by four bytes, read where it lies; 16 rows of rounded x
are a tile as they are packed. What is subtracted from the weight's elements is subtracted when they are unpacked, so that both sides are signed.
The exact sums of some blocks go through memory to vectors, which convert them, scale them and add them up in f32, block by block, in the order of k:
results are those of the path without AMX, bit by bit.
"""

from __future__ import annotations

from typing import Any

from max import kernel as k
from max._kernel_library.products.quantised.packed import LINE, ROWS, PackedFormat

COLUMNS = ROWS
"""Columns of a strip."""
TILE_ROWS = 16
"""Rows of x in a tile."""
GROUP = 4
"""Blocks whose sums wait in memory: with a strip and rounded rows they stay in the L1 cache."""


def tile_shapes(form: PackedFormat) -> tuple[tuple[int, int], ...]:
    """The matrix tiles: sums of 2 × 16 columns, rows of x, and 2 × 16 columns of the weight.

    Args:
        form: The weight's format, which has one or two scales a block.
    """
    sums, columns = (TILE_ROWS, 64), (8 // form.parts, 64)
    return (sums, sums, (TILE_ROWS, 32 // form.parts), columns, columns)


@k.inline
def add_scaled(
    c: Any, products: Any, row: Any, first: int, scales: Any, zero_sums: Any, factors: Any,
    offsets: Any, begin: Any, count: Any, rows: int, form: PackedFormat, width: int,
) -> None:  # fmt: skip
    """Adds what the sums of some blocks stand for to a register tile of rows by two vectors of columns.

    Args:
        c: The sums in f32, `COLUMNS` a row.
        products: Exact sums, `[blocks * parts * TILE_ROWS, COLUMNS]`.
        row: The first row.
        first: The first column.
        scales: Scales of x `[blocks, TILE_ROWS]`.
        zero_sums: See `max._kernel_library.products.quantised.packed_matmul.round_block`.
        factors: Scales of the strip `[blocks, parts, COLUMNS]`.
        offsets: Its offsets `[blocks, COLUMNS]`.
        begin: The first block.
        count: How many blocks.
        rows: Rows at once.
        form: The weight's format.
        width: Lanes of a vector.
    """
    total = k.tile(k.f32, (rows, 2), width=width)
    for r in k.static_range(rows):
        for v in k.static_range(2):
            total[r, v] = c.load((row + r) * COLUMNS + first + v * width, width=width)
    for m in range(count):
        n = begin + m
        for p in range(form.parts):
            unit = (m * form.parts + p) * TILE_ROWS + row
            columns = [first + half * width for half in k.static_range(2)]
            at = (n * form.parts + p) * COLUMNS
            factor = [factors.load(at + column, width=width) for column in columns]
            for r in k.static_range(rows):
                scale = scales[n * TILE_ROWS + row + r]
                for half in k.static_range(2):
                    exact = products.load(unit + r, columns[half], width=width)
                    total[r, half] = k.fma(
                        k.cast(exact, k.f32), factor[half] * scale, total[r, half]
                    )
                    if form.affine:
                        taken = k.splat(-zero_sums[n * TILE_ROWS + row + r], width)
                        offset = offsets.load(n * COLUMNS + columns[half], width=width)
                        total[r, half] = k.fma(offset, taken, total[r, half])
    for r in k.static_range(rows):
        for v in k.static_range(2):
            c.store((row + r) * COLUMNS + first + v * width, value=total[r, v])


@k.inline
def multiply_strip(
    tiles: Any, c: Any, products: Any, q: Any, scales: Any, zero_sums: Any, panel: Any, factors: Any,
    offsets: Any, count: Any, form: PackedFormat, width: int,
) -> None:  # fmt: skip
    """Adds 16 rows of x by an unpacked strip, over some blocks.

    Args:
        tiles: The matrix tiles, see `tile_shapes`.
        c: The sums, `COLUMNS` a row.
        products: Room for the exact sums of `GROUP` blocks, `[GROUP * parts * TILE_ROWS, COLUMNS]`.
        q: Rounded elements of x in words `[blocks, TILE_ROWS, 8]`, from the first of the blocks on.
        scales: Scales of x `[blocks, TILE_ROWS]`.
        zero_sums: `[blocks, parts, TILE_ROWS]`, see `max._kernel_library.products.quantised.packed_matmul.round_block`.
        panel: Bytes `[block][8][COLUMNS][4]`, signed.
        factors: See `max._kernel_library.products.quantised.packed_matmul.unpack_strip`.
        offsets: See there.
        count: How many blocks.
        form: The weight's format.
        width: Lanes of a vector of sums.
    """
    lines = 8 // form.parts
    # more do not fit into registers with what is in flight
    rows = 4 if form.affine else 8
    for begin in range(0, count, GROUP):
        here = k.min(GROUP, count - begin)
        for m in range(here):
            for p in range(form.parts):
                n = begin + m
                tiles.load(2, q, n * (TILE_ROWS * 8) + p * lines, stride=8)
                for half in k.static_range(2):
                    tiles.zero(half)
                    tiles.load(3 + half, panel, (n * 8 + p * lines) * LINE + 64 * half, stride=LINE)
                    tiles.dot(half, 2, 3 + half, k.i8)
                for half in k.static_range(2):
                    tiles.store(half, products, (m * form.parts + p) * TILE_ROWS, 16 * half)
        for row in range(0, TILE_ROWS, rows):
            for first in k.static_range(0, COLUMNS, 2 * width):
                add_scaled(
                    c, products, row, first, scales, zero_sums, factors, offsets, begin, here, rows,
                    form, width,
                )  # fmt: skip
