"""The products of attention in the matrix tiles of AMX: 16 rows of queries or weights by panels of 32 keys or columns
of values.

Rows are copied one after the other, zero-filled to whole tiles along k; panels are those of register tiles, pairs of
bf16 in lanes.
"""

from __future__ import annotations

from typing import Any

from max import kernel as k
from max._backends.cpu.kernels.tiles.amx_tiles import COLUMNS, DEPTH, HEIGHT
from max._backends.cpu.kernels.tiles.tiling import Matrix


@k.inline
def copy_rows_padded(packed: k.View, stride: int, rows: k.View) -> None:
    """Copies rows of bf16, each zero-filled to whole tiles.

    Args:
        packed: The result, flat.
        stride: Elements of the result from row to row, a multiple of `DEPTH`.
        rows: `[rows, size]`.
    """
    for r in range(rows.shape[0]):
        # a whole `DEPTH` is stored even at the end of a row: masked lanes load 0, which is the padding
        for i, tail in k.vectors(rows.shape[1], DEPTH):
            packed.store(r * stride + i, value=rows.load(r, i, width=DEPTH, mask=tail))


@k.inline
def zero_weights_tail(rows: k.View, stride: int, count: k.Value) -> None:
    """Zeroes the weights of 16 rows behind the last key, up to whole tiles.

    Args:
        rows: Weights, flat; those up to a multiple of 16 are 0 already.
        stride: Elements from row to row.
        count: Keys.
    """
    # softmax pads with 0 to 16 keys only, but a tile along k is `DEPTH` keys deep
    begin = k.ceildiv(count, 16) * 16
    if begin % DEPTH != 0:
        for r in k.static_range(HEIGHT):
            # [16], the rest of the last tile
            rows.store(r * stride + begin, value=k.splat(k.bf16(0), 16))


@k.inline
def multiply_tile_amx(
    tiles: Any, c: Matrix, a: Matrix, panel: k.Integer, steps: k.Integer, first: Any
) -> None:
    """Multiplies 16 rows by a panel.

    Args:
        tiles: The matrix tiles, of `kernels.tiles.amx_tiles`.
        c: The sums; set where `first`, else added to.
        a: The rows, bf16.
        panel: Lanes `[lanes, COLUMNS]`, flat.
        steps: Tiles along k.
        first: Whether nothing was summed before.
    """
    if first:
        for half in k.static_range(2):
            tiles.zero(half)
    else:
        for half in k.static_range(2):
            tiles.load(half, c.elements, 16 * half, stride=c.row)
    for n in range(steps):
        tiles.load(4, a.elements, n * DEPTH, stride=a.row)
        for side in k.static_range(2):
            # [16 lanes, 16 columns]
            tiles.load(6 + side, panel, n * (16 * COLUMNS) + 16 * side, stride=COLUMNS)
            tiles.dot(side, 4, 6 + side, k.bf16)
    for half in k.static_range(2):
        tiles.store(half, c.elements, 16 * half, stride=c.row)
