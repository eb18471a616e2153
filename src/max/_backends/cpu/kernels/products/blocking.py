"""The division of products with packed weights into tasks, K blocks and register tiles; shared by all GEMM paths and
convolutions.

A task is a range of row tiles by a range of panels (strips of 32 columns). Its loops, from the outside, are over K
blocks, panels and tiles::

                    K block 0  K block 1                 panels of B
                   ┌──────────┬──────────┐             p0     p1     p2
      tiles of A   │ tile 0   │          │           ┌──────┬──────┬──────┐
                   ├──────────┼──────────┤           │ sums │      │      │   one task
                   │ tile 1   │          │           ├──────┼──────┼──────┤
                   ├──────────┼──────────┤           │      │      │      │

Cache budget: a K block of one panel (32 KB) stays in the L1 cache; a K block of the task's rows and the sums (at most
`BLOCK_SUMS`, 256 KB) stay in the L2 cache.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from max import kernel as k
from max._backends.cpu.kernels.tiles.strips import COLUMNS
from max._backends.cpu.kernels.tiles.tiling import Tiling, round_up

STEP = 32
"""Panels are zero-padded to a multiple of this along k."""
LANES_K = 256
"""Lanes of a K block along k; the K block of a panel takes 32 KB of the L1 cache."""
BLOCK_ROWS = 252
"""The maximum number of rows of a task, a multiple of each tile height: their K block stays in the L2 cache."""
BLOCK_PANELS = 16
"""The maximum number of panels of a task."""
BLOCK_SUMS = 1 << 16
"""The maximum number of sums of a task, which stay in the L2 cache between K blocks."""
MIN_TILES, MIN_PANELS = 4, 1
"""The minimum number of tiles and panels of a task: smaller tasks cost more than their balance gains."""
TASKS_PER_WORKER = 8
"""The minimum number of tasks per worker, so that workers stay balanced if other programs slow one of them down."""


FOLDED_SIZE = 4096
"""The maximum K whose sums stay in one accumulator. For a larger K each K block has accumulators of its own, which are
then added to the sums in memory, so that the error does not grow with K but with the number of K blocks."""


def is_long(size: object) -> bool:
    """Whether a product may have a K above `FOLDED_SIZE`: if so, or if K is known only at run time."""
    return not isinstance(size, int) or size > FOLDED_SIZE


class Blocking(NamedTuple):
    """The division of a product into tasks.

    Args:
        rows: The number of rows of A.
        strips: The number of strips of columns.
        height: The number of rows of a register tile.
        tiles: The number of row tiles of a task.
        panels: The number of panels of a task.
    """

    rows: Any
    strips: Any
    height: int
    tiles: Any
    panels: Any


class Task(NamedTuple):
    """The first row, the number of rows, the first strip and the number of strips of a task."""

    row: Any
    rows: Any
    strip: Any
    strips: Any


def tile_heights(t: Tiling) -> tuple[int, ...]:
    """The heights of register tiles: the common one, two thirds of it, and with 32 registers the common one plus 1."""
    common = (t.height, t.height * 2 // 3)
    return (*common, t.height + 1) if t.height >= 12 else common


@k.inline
def taller_from(count: k.Value, t: Tiling) -> Any:
    """The first of `count` rows whose tiles are one row taller, which avoids a remainder; `count` if no tile is taller.

    49 rows take 5 % less time as 3 × 12 + 13 than as 4 × 12 + 1.
    """
    # r remainder rows go to r taller tiles, if there are that many
    rows = count % t.height * (t.height + 1)
    first = count
    if len(tile_heights(t)) == 3 and rows <= count:
        first = count - rows
    return first


@k.inline
def choose_height(row: k.Value, count: k.Value, taller: k.Value, t: Tiling) -> Any:
    """The height of the tile that begins at `row`. Two lower tiles take less time than a full tile and a remainder.

    Args:
        row: The tile's first row.
        count: The number of rows of the task.
        taller: The row from which tiles are one row taller.
        t: The tiling.
    """
    common, lower = tile_heights(t)[:2]
    remaining = count - row
    height = k.i64(common)
    if row >= taller:
        height = k.i64(common + 1)
    # the rest fits a lower tile, or two of them
    elif remaining <= lower or (remaining > common and remaining <= 2 * lower):
        height = k.i64(lower)
    return height


@k.inline
def cut_depth(size: k.Value, max_size: int, multiple: int) -> Any:
    """Cuts K into equal blocks of whole steps.

    There is at least one block, even if K is 0, as the first block zeroes the sums.

    Args:
        size: K.
        max_size: The maximum size of a block.
        multiple: Blocks are a multiple of this.

    Returns:
        The number of blocks, and the size of a block.
    """
    blocks = k.max(k.ceildiv(size, max_size), 1)
    block = k.max(round_up(k.ceildiv(size, blocks), multiple), multiple)
    # rounding the size up to whole steps may leave fewer blocks
    return k.max(k.ceildiv(size, block), 1), block


@k.inline
def plan(
    rows: k.Value, columns: k.Value, workers: k.Value, t: Tiling, max_rows: int = BLOCK_ROWS,
    max_sums: Any = BLOCK_SUMS, repeats: Any = 1,
) -> Any:  # fmt: skip
    """The number of row tiles and the number of panels of a task.

    Tasks are as large as the caches allow, unless that leaves too few tasks. Then the longer side is cut
    repeatedly: a task reads its rows and its columns, so a square task reads the least data per product.

    Args:
        rows: The number of rows of A.
        columns: The number of columns of B.
        workers: The number of workers.
        t: The tiling.
        max_rows: The maximum number of rows of a task.
        max_sums: The maximum number of sums of a task.
        repeats: How often an element of A is multiplied by the same column, as in the patches of a convolution.
    """
    # an outlined function writes its results to memory
    sizes = k.tile(k.i64, 2)
    plan_sizes(sizes, rows, columns, workers, max_sums, repeats, t.height, max_rows)
    # bounds that always hold, so that the compiler proves the divisors positive
    max_tiles = max(max_rows // t.height, MIN_TILES)
    return k.min(k.max(sizes[0], 1), max_tiles), k.min(k.max(sizes[1], 1), BLOCK_PANELS)


@k.outlined
def plan_sizes(
    sizes: k.View, rows: k.Value, columns: k.Value, workers: k.Value, max_sums: k.i64, repeats: k.i64,  # pyright: ignore
    height: int, max_rows: int,
) -> None:  # fmt: skip
    """Writes the number of row tiles and of panels of a task to `sizes`; see `plan`."""
    tiles = k.max(k.ceildiv(rows, height), 1)
    strips = k.max(k.ceildiv(columns, COLUMNS), 1)
    blocks = k.ceildiv(tiles, max_rows // height)
    task_tiles = k.max(k.ceildiv(tiles, blocks), 1)
    max_panels = k.min(max_sums // (task_tiles * height * COLUMNS), BLOCK_PANELS)
    groups = k.max(k.ceildiv(strips, k.max(max_panels, 1)), 1)
    panels = k.ceildiv(strips, groups)
    min_tasks = TASKS_PER_WORKER * workers
    while _pieces(tiles, task_tiles) * _pieces(strips, panels) < min_tasks and (
        task_tiles > MIN_TILES or panels > MIN_PANELS
    ):
        # an element of A is read once for `repeats` products
        tall = task_tiles * height >= panels * COLUMNS * repeats or panels <= MIN_PANELS  # pyright: ignore
        if tall and task_tiles > MIN_TILES:
            blocks += 1
            task_tiles = k.max(_pieces(tiles, blocks), MIN_TILES)
        else:
            groups += 1
            panels = k.max(_pieces(strips, groups), MIN_PANELS)
    sizes[0] = task_tiles
    sizes[1] = panels


@k.inline
def _pieces(total: k.Value, size: k.Value) -> Any:
    """The number of pieces of `size` in `total`, at least one."""
    return k.ceildiv(total, k.min(k.max(size, 1), total))


@k.inline
def task_grid(b: Blocking) -> Any:
    """The shape of the task index space: row blocks, groups of panels."""
    return (k.ceildiv(b.rows, b.tiles * b.height), k.ceildiv(b.strips, b.panels))


@k.inline
def task_at(b: Blocking, row_block: k.Value, group: k.Value) -> Task:
    """The task at an index of `task_grid`."""
    row = row_block * b.tiles * b.height
    rows = k.min(b.tiles * b.height, b.rows - row)
    strip = group * b.panels
    # no task is empty; the maximum lets the compiler prove the divisors positive
    return Task(row, k.max(rows, 1), strip, k.max(k.min(b.panels, b.strips - strip), 1))


@k.inline
def sums_row(b: Blocking, row: k.Value, strip: k.Value, blocks: k.Value) -> Any:
    """The first row of a tile's sums in scratch memory.

    With a single K block the sums of a tile are final at once, so all tiles share the first rows.
    """
    return row + strip * b.tiles * b.height if blocks > 1 else k.i64(0)


@k.inline
def next_panel(
    panels: k.View, task: Task, turn: k.Value, blocks: k.Value, elements: k.Value
) -> Any:
    """The K block of a panel that a task multiplies after turn `turn`; at the end the last one again.

    Args:
        panels: `[panels, elements]`.
        task: The task.
        turn: The index of the turn: K block times strips, plus strip.
        blocks: The number of K blocks.
        elements: The number of elements of a panel's K block.
    """
    # turns go through the strips of a K block, then to the next block
    after = k.min(turn + 1, blocks * task.strips - 1)
    return panels[task.strip + after % task.strips, after // task.strips * elements :]
