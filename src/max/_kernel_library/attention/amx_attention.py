"""The products of attention in the matrix tiles of AMX: 16 rows of queries or weights by panels of 32 keys or columns of values.

Rows lie one after the other, filled up to whole tiles with zeros; panels are those of the other path, pairs of bf16 in lanes.
"""

from __future__ import annotations

from typing import Any

from max import kernel as k
from max._kernel_library.tiles.amx_tiles import COLUMNS, DEPTH, HEIGHT


@k.inline
def copy_rows(packed: Any, stride: int, rows: Any) -> None:
    """Copies rows of bf16, each filled up with zeros to whole tiles.

    Args:
        packed: Where they go, flat.
        stride: Elements from row to row there, a multiple of `DEPTH`.
        rows: `[rows, size]`.
    """
    for r in range(rows.shape[0]):
        for i, tail in k.vectors(rows.shape[1], DEPTH):
            packed.store(r * stride + i, value=rows.load(r, i, width=DEPTH, mask=tail))


@k.inline
def end_weights(rows: Any, stride: int, count: Any) -> None:
    """Sets to zero what follows the last weights of 16 rows, up to whole tiles.

    Args:
        rows: Weights, flat; they end with zeros up to a multiple of 16.
        stride: Elements from row to row.
        count: How many there are in a row.
    """
    begin = k.ceildiv(count, 16) * 16
    if begin % DEPTH != 0:
        for r in k.static_range(HEIGHT):
            rows.store(r * stride + begin, value=k.splat(k.bf16(0), 16))


@k.inline
def multiply_tile(
    tiles: Any, c: Any, c_row: int, a: Any, a_row: int, panel: Any, steps: Any, first: Any
) -> None:
    """Multiplies 16 rows by a panel.

    Args:
        tiles: The matrix tiles, of `max._kernel_library.tiles.amx_tiles`.
        c: Sums, flat; set where `first`, else added to.
        c_row: Elements from row to row.
        a: bf16, flat.
        a_row: Elements from row to row.
        panel: Lanes `[lanes, COLUMNS]`, flat.
        steps: Tiles along k.
        first: Whether nothing was summed yet.
    """
    if first:
        for half in k.static_range(2):
            tiles.zero(half)
    else:
        for half in k.static_range(2):
            tiles.load(half, c, 16 * half, stride=c_row)
    for n in range(steps):
        tiles.load(4, a, n * DEPTH, stride=a_row)
        for side in k.static_range(2):
            tiles.load(6 + side, panel, n * (16 * COLUMNS) + 16 * side, stride=COLUMNS)
            tiles.dot(side, 4, 6 + side, k.bf16)
    for half in k.static_range(2):
        tiles.store(half, c, 16 * half, stride=c_row)
