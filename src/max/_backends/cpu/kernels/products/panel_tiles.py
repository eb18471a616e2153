"""The product of a K block of a task's rows and of one panel, register tile by register tile; for dense and int8 GEMM.

::

                           panel  32 columns
                          ┌───────┬───────┐
                          │       │       │  one K block
                          └───────┴───────┘
        rows  ┌────────┐  ┌───────┬───────┐
              │        │  │ tile 0│ tile 1│  two vectors of columns a tile
              ├────────┤  ├───────┼───────┤
              │        │  │       │       │
              └────────┘  └───────┴───────┘

The function that computes a register tile is an argument, a `MultiplyRows`: `dense.gemm.multiply_rows` or
`int8.gemm.multiply_rows_int8`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from max import kernel as k
from max._backends.cpu.kernels.products.blocking import Blocking, Task, choose_height, sums_row
from max._backends.cpu.kernels.tiles.strips import (
    COLUMNS,
    L2,
    Results,
    prefetch_adapters,
    prefetch_strip,
    store_strip,
)
from max._backends.cpu.kernels.tiles.tiling import Tiling

MultiplyRows = Callable[..., None]
"""Multiplies rows by two vectors of columns, called with:

- the sums, `COLUMNS` a row;
- the operands, a `KBlock`;
- the first row;
- the rows of the tile;
- the tiling;
- `ahead`: the K block of a panel that is multiplied next;
- `prefetches`: the data to prefetch: `NOTHING`, `PANEL` (`ahead`) or `ROWS` (of the next tile).

Its loop over k is `for_each_step`.
"""
NOTHING, PANEL, ROWS = 0, 1, 2
"""The data that a register tile prefetches. Most tiles prefetch nothing and have a loop without tests; the other two
cases share a loop with a run-time test.
"""
CACHE_LANES = 16
"""The number of 32-bit lanes of a cache line."""


class KBlock(NamedTuple):
    """A K block of a task's rows and of one panel.

    Args:
        rows: The rows, in the form that the `MultiplyRows` reads.
        panel: The panel, flat, from its first column on, with `COLUMNS` columns per lane in k.
        depth: The number of lanes in k.
        first: Whether this is the first K block, which sets the sums instead of adding to them.
        coded_block: What the first tile decodes to `panel` while it multiplies; None: the panel is complete.
    """

    rows: Any
    panel: Any
    depth: Any
    first: Any
    coded_block: Any = None


class PanelStep(NamedTuple):
    """One step of a task: a K block of one panel.

    Args:
        x: The operands.
        strip: The index of the panel in the task.
        blocks: The number of K blocks.
        n: The index of this K block.
        ahead: The panel that is multiplied next.
    """

    x: KBlock
    strip: Any
    blocks: Any
    n: Any
    ahead: Any


SHORT_DEPTH = 64
"""The depth up to which tiles leave their rows to the hardware's prefetcher: parts of a few steps take longer."""


@k.inline
def prefetch_step(
    ahead: k.View, next_row: k.View, n: k.Value, part_step: k.Value, prefetches: k.Value, height: int, lane: int,
    lines: int,
) -> None:  # fmt: skip
    """Prefetches the share of one step of a register tile.

    Args:
        ahead: The panel that is multiplied next.
        next_row: The row of the next tile that the part prefetches.
        n: The step.
        part_step: The step, relative to the part's first step.
        prefetches: The data to prefetch, `PANEL` or `ROWS`.
        height: Rows of the tile.
        lane: The number of elements of the panel's view per column of a lane.
        lines: The number of cache lines of the panel per step.
    """
    if prefetches == ROWS:
        # the steps of a part together cover the row
        next_row.prefetch(part_step * height)
    else:  # into the L2 cache: the next tiles still read the panel in the L1 cache
        for line in k.static_range(lines):
            ahead.prefetch(lane * CACHE_LANES * (n * lines + line), locality=L2)


@k.inline
def for_each_step(
    step: Callable[[Any], None], x: KBlock, row: k.Value, height: int, ahead: k.View, prefetches: k.Value,
    lane: int = 1, lines: int = COLUMNS // CACHE_LANES,
) -> None:  # fmt: skip
    """The loop over k of a register tile, with its prefetches.

    Tiles without prefetches use a separate loop: a test in the loop makes them 4 to 12 % slower. The other loop runs in
    as many parts as the tile has rows; each part prefetches one row of the next tile.

    Args:
        step: Multiplies the lane in k with the given index.
        x: The operands.
        row: The tile's first row.
        height: Rows of the tile.
        ahead: The panel that is multiplied next.
        prefetches: The data to prefetch.
        lane: The number of elements of the panel's view per column of a lane.
        lines: The number of cache lines of the panel per step.
    """
    if prefetches == NOTHING:
        for n in range(x.depth):
            step(n)
    else:
        steps = k.ceildiv(x.depth, height)
        for part in range(height):
            begin = part * steps
            next_row = x.rows.elements[(row + height + part) * x.rows.stride :]
            for n in range(begin, k.min(begin + steps, x.depth)):
                prefetch_step(ahead, next_row, n, n - begin, prefetches, height, lane, lines)
                step(n)


@k.inline
def multiply_tile_row(
    c: k.View,
    step: PanelStep,
    row: k.Value,
    height: int,
    t: Tiling,
    multiply: MultiplyRows,
    lane: int,
) -> None:
    """Multiplies `height` rows by all columns of a panel, two vectors at a time.

    The first tile of a panel prefetches the next panel; the tiles of the first panel prefetch the rows of the next
    tile.
    """
    x = step.x
    for half in range(0, COLUMNS, 2 * t.width):
        prefetches = k.i64(NOTHING)
        if half == 0:
            if height != t.height or row == 0:
                prefetches = k.i64(PANEL)
            elif step.strip == 0 and x.depth > SHORT_DEPTH:
                prefetches = k.i64(ROWS)
        tile = x._replace(panel=x.panel[lane * half :])
        multiply(c[half:], tile, row, height, t, step.ahead, prefetches)


@k.outlined
def multiply_rows_of_tile(
    c: k.View, step: PanelStep, row: k.Value, tile_height: k.Value, t: Tiling, multiply: MultiplyRows,
    heights: tuple[int, ...], lane: int,
) -> None:  # fmt: skip
    """Multiplies `tile_height` rows, one of `heights`, by all columns of a panel."""
    # a copy of the code for each height, as register tiles are unrolled
    for height in k.unroll(heights):
        if height == tile_height:
            multiply_tile_row(c, step, row, height, t, multiply, lane)


@k.inline
def multiply_panel(
    results: Results, c: k.View, step: PanelStep, task: Task, b: Blocking, t: Tiling,
    multiply: MultiplyRows, heights: tuple[int, ...], taller: k.Value, lane: int = 1,
) -> None:  # fmt: skip
    """Multiplies the rows of a task by a K block of a panel; after the last K block the results are stored.

    Args:
        results: The results.
        c: The sums of the task.
        step: The operands and their place in the task.
        task: The task.
        b: The blocking.
        t: The tiling.
        multiply: Computes a register tile.
        heights: The heights of register tiles.
        taller: The row of the task from which tiles are one row taller.
        lane: The number of elements of the panel's view per column of a lane.
    """
    row = k.i64(0)
    while row < task.rows:
        remaining = task.rows - row
        tile_height = choose_height(row, task.rows, taller, t)
        sums = c[sums_row(b, row, step.strip, step.blocks) * COLUMNS :]
        # results of the last K block are written soon
        if step.n == step.blocks - 1:
            prefetch_strip(results, task.row + row, task.strip + step.strip, t.height)
            prefetch_adapters(
                results, task.row + row, k.min(remaining, tile_height), task.strip + step.strip
            )
        multiply_rows_of_tile(sums, step, row, tile_height, t, multiply, heights, lane)
        done = k.min(remaining, tile_height)
        if step.n == step.blocks - 1:
            store_strip(results, sums, task.row + row, done, task.strip + step.strip)
        row += done
