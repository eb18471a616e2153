"""GEMM with packed quantized weights in the matrix tiles of AMX.

A block of 32 elements along k of an unpacked strip is a tile of 8 lines of 16 columns by four bytes, loaded in place;
16 rows of rounded x are a tile in their packed order::

    x  [block][16 rows][8 words]      strip  [block][8 lines][32 columns][4]      sums  2 tiles of 16 × 16, exact i32
Zero points are subtracted when elements are unpacked, so that both operands are signed. The exact sums of `GROUP`
blocks are stored to memory and loaded as vectors, which are converted, scaled and added in f32, block by block in the
order of k, so results are bit-identical to those without AMX.
"""

from __future__ import annotations

from typing import Any

from max import kernel as k
from max._backends.cpu.kernels.products.quantized.activations import Rounded
from max._backends.cpu.kernels.products.quantized.packed import LINE, PackedFormat
from max._backends.cpu.kernels.products.quantized.unpacking import QuantizedTiling, UnpackedStrip
from max._backends.cpu.kernels.tiles.micro_kernels import load_sums, store_sums
from max._backends.cpu.kernels.tiles.strips import COLUMNS
from max._backends.cpu.kernels.tiles.tiling import Matrix

TILE_ROWS = 16
"""The number of rows of x in a tile."""
GROUP = 4
"""The number of blocks whose exact sums are in memory at once (8 KB, Q6_K 16 KB), to fit the L1 cache with a strip."""


def tile_shapes(packed_format: PackedFormat) -> tuple[tuple[int, int], ...]:
    """The matrix tiles: sums of 2 × 16 columns, rows of x, and 2 × 16 columns of the weight.

    Args:
        packed_format: The weight's format, which has one or two scales per block.
    """
    sums, columns = (TILE_ROWS, 64), (8 // packed_format.parts, 64)
    return (sums, sums, (TILE_ROWS, 32 // packed_format.parts), columns, columns)


@k.inline
def add_scaled(
    c: k.View, products: k.View, q: Rounded, strip: UnpackedStrip, row: k.Value, first: int, begin: k.Value,
    count: k.Integer, rows: int, t: QuantizedTiling,
) -> None:  # fmt: skip
    """Scales the exact sums of some blocks and adds them to a register tile of rows by two vectors of columns.

    Args:
        c: The sums in f32, `COLUMNS` per row.
        products: Exact sums, `[blocks * parts * TILE_ROWS, COLUMNS]`.
        q: The rounded rows.
        strip: The unpacked strip.
        row: The first row.
        first: The first column.
        begin: The first block.
        count: The number of blocks.
        rows: The number of rows of the register tile.
        t: The tiling.
    """
    packed_format, width = t.packed_format, t.width
    total = k.tile(k.f32, (rows, 2), width=width)
    tile = Matrix(c[row * COLUMNS + first :], COLUMNS)
    load_sums(total, tile, rows, 2, width)
    columns = [first + half * width for half in k.static_range(2)]
    for m in range(count):
        n = begin + m
        for p in range(packed_format.parts):
            # [block][part][TILE_ROWS] of the exact sums
            unit = (m * packed_format.parts + p) * TILE_ROWS + row
            at = (n * packed_format.parts + p) * COLUMNS
            factor = [strip.scales.load(at + column, width=width) for column in columns]
            for r in k.static_range(rows):
                scale = q.scales[n * TILE_ROWS + row + r]
                # scaled in f32 block by block, the order of the paths without AMX
                for half in k.static_range(2):
                    exact = products.load(unit + r, columns[half], width=width)
                    total[r, half] = k.fma(
                        k.cast(exact, k.f32), factor[half] * scale, total[r, half]
                    )
                    if packed_format.affine:
                        zero_sum = q.zero_sums[(n * packed_format.parts + p) * TILE_ROWS + row + r]
                        scaled_sum = k.splat(-zero_sum, width)
                        offset = strip.offsets.load(at + columns[half], width=width)
                        total[r, half] = k.fma(offset, scaled_sum, total[r, half])
    store_sums(tile, total, rows, 2, width)


@k.inline
def multiply_strip_amx(
    tiles: Any, c: k.View, products: Any, q: Rounded, strip: UnpackedStrip, count: k.Integer,
    t: QuantizedTiling,
) -> None:  # fmt: skip
    """Adds the products of 16 rows of x with an unpacked strip, over some blocks.

    Args:
        tiles: The matrix tiles, see `tile_shapes`.
        c: The sums, `COLUMNS` per row.
        products: Scratch memory for the exact sums of `GROUP` blocks, `[GROUP * parts * TILE_ROWS, COLUMNS]`.
        q: The rounded rows, from the first block on.
        strip: The unpacked strip, of signed bytes.
        count: The number of blocks.
        t: The tiling.
    """
    packed_format = t.packed_format
    lines = 8 // packed_format.parts
    # taller register tiles would spill
    rows = 4 if packed_format.affine else 8
    for begin in range(0, count, GROUP):
        group = k.min(GROUP, count - begin)
        for m in range(group):
            for p in range(packed_format.parts):
                n = begin + m
                # a row has 8 words a block, of which a part takes `lines`
                tiles.load(2, q.words, n * (TILE_ROWS * 8) + p * lines, stride=8)
                for half in k.static_range(2):
                    # an exact sum is of one part, as each part has a scale of its own
                    tiles.zero(half)
                    at = (n * 8 + p * lines) * LINE + 64 * half
                    tiles.load(3 + half, strip.elements, at, stride=LINE)
                    tiles.dot(half, 2, 3 + half, k.i8)
                for half in k.static_range(2):
                    tiles.store(
                        half, products, (m * packed_format.parts + p) * TILE_ROWS, 16 * half
                    )
        for row in range(0, TILE_ROWS, rows):
            for first in k.static_range(0, COLUMNS, 2 * t.width):
                add_scaled(c, products, q, strip, row, first, begin, group, rows, t)
