"""GEMM with packed dense weights: tasks of rows by panels (`kernels.products.blocking`), in register tiles.

A is not packed, so that no worker waits for a packing phase: elements of a tile's rows are broadcast in place, each row
at its own offset. K blocks of rows are copied to scratch memory if elements must be widened, if rows are not aligned
to whole lanes, or if rows map to the same sets of the L1 cache. The loops, from the outside::

    task (rows × panels, of a counter) → K block → panel → register tile (12 × 2 vectors, AVX2 6 × 2) → k

Register budget: see `kernels.tiles.tiling.Tiling`. Cache budget: see
`kernels.products.blocking`; the copy of rows takes `BLOCK_ROWS` × `COPY_STRIDE` × 4 bytes (268 KB) of the
L2 cache, a widened K block of a panel 32 KB of the L1 cache.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from max import kernel as k
from max._backends.cpu.kernels.products.blocking import (
    BLOCK_ROWS,
    BLOCK_SUMS,
    LANES_K,
    STEP,
    Blocking,
    Task,
    cut_depth,
    is_long,
    next_panel,
    plan,
    taller_from,
    task_at,
    task_grid,
    tile_heights,
)
from max._backends.cpu.kernels.products.dense.coded import (
    CODED,
    PLAIN,
    UNIT_BYTES,
    UNIT_DEPTH,
    UNIT_PLACES,
    Coding,
    bytes_from,
    coded_panel,
    decode_rows,
    decode_step,
    decode_units,
    escapes_of,
    first_escape,
)
from max._backends.cpu.kernels.products.dense.panels import (
    COPY_STRIDE,
    copy_rows,
    storage,
    widen_block,
)
from max._backends.cpu.kernels.products.panel_tiles import (
    CACHE_LANES,
    KBlock,
    PanelStep,
    for_each_step,
    multiply_panel,
)
from max._backends.cpu.kernels.tiles.micro_kernels import add_sums, load_sums, store_sums
from max._backends.cpu.kernels.tiles.strips import CACHE_LINE, COLUMNS, L2, SET_PERIOD, Results
from max._backends.cpu.kernels.tiles.tiling import Matrix, Tiling, multiply_add
from max.dtype import DType


class DenseRows(NamedTuple):
    """A K block of the rows of a task.

    Args:
        elements: Flat lanes of A, from the first row and lane on.
        stride: Lanes from row to row.
        last: The last row; tiles that reach past it read it again (their results are discarded).
    """

    elements: Any
    stride: Any
    last: Any


@k.inline
def multiply_step(
    sums: k.View, a: Any, rows: Any, b: k.View, n: k.Value, height: int, t: Tiling
) -> None:
    """Adds the products of lane `n` of `height` rows, at the offsets `rows`, with two vectors of columns."""
    # two of the vectors of lane n, [COLUMNS]
    low = b.load(n * COLUMNS, width=t.width)
    high = b.load(n * COLUMNS + t.width, width=t.width)
    for i in k.static_range(height):
        # a row's lane is broadcast to all columns: no sum crosses lanes
        left = k.splat(a[rows[i] + n], t.width)
        sums[i, 0] = multiply_add(sums[i, 0], left, low)
        sums[i, 1] = multiply_add(sums[i, 1], left, high)


@k.inline
def multiply_rows(
    c: Any, x: KBlock, row: k.Value, height: int, t: Tiling, ahead: k.View, prefetches: k.Value
) -> None:
    """Multiplies `height` rows by two vectors of columns: one register tile, a `MultiplyRows`."""
    if x.coded_block is not None:
        if row == 0 and x.coded_block.active > 0:
            multiply_decoding(c, x, height, t, ahead)
            return
    a = x.rows
    sums = k.tile(t.sums, (height, 2), width=t.width, fill=0)
    # folded sums begin at 0 and are added to those in memory at the end
    if not t.folds:
        if not x.first:
            load_sums(sums, Matrix(c, COLUMNS), height, 2, t.width)
    # rows past the last one are read again: the tile has no tests in its loop
    rows = [k.min(row + i, a.last) * a.stride for i in k.static_range(height)]
    # a widened panel has two steps per row of pairs, so each step prefetches half a row
    widens = ahead.dtype != x.panel.dtype
    lines = COLUMNS // CACHE_LANES // (2 if widens else 1)
    for_each_step(
        lambda n: multiply_step(sums, a.elements, rows, x.panel, n, height, t),  # pyright: ignore[reportUnknownLambdaType]
        x, row, height, ahead, prefetches, lines=lines,
    )  # fmt: skip
    if t.folds:
        if not x.first:
            add_sums(sums, Matrix(c, COLUMNS), height, 2, t.width)
    store_sums(Matrix(c, COLUMNS), sums, height, 2, t.width)


@k.inline
def multiply_decoding(c: Any, x: KBlock, height: int, t: Tiling, ahead: k.View) -> None:
    """`multiply_rows` for the first tile of a coded panel, which decodes the K block for the tiles after it."""
    sums = k.tile(t.sums, (height, 2), width=t.width, fill=0)
    if not t.folds:
        if not x.first:
            load_sums(sums, Matrix(c, COLUMNS), height, 2, t.width)
    rows = [k.min(k.i64(i), x.rows.last) * x.rows.stride for i in k.static_range(height)]
    panel, begin = x.coded_block.panel, x.coded_block.unit
    escapes = escapes_of(panel)
    escape = k.i64(0)
    if panel.escapes > 0:
        escape = first_escape(escapes, panel.escapes, begin * UNIT_PLACES)
    number, end = k.i64(0), x.depth // 2
    while number < end:
        stop = end
        if escape < panel.escapes:
            stop = k.min(end, k.i64(escapes[escape] >> 8) // UNIT_PLACES - begin)
        for plain in range(number, stop):
            for line in k.static_range(UNIT_BYTES // CACHE_LINE):
                ahead.prefetch(CACHE_LANES * (3 * plain + line), locality=L2)
            unit = panel.bytes[(begin + plain) * UNIT_BYTES :]
            for step in k.static_range(2):
                low, high = decode_step(unit, panel.table, step, 0, t)
                n = 2 * plain + step
                x.panel.store(n * COLUMNS, value=low)
                x.panel.store(n * COLUMNS + t.width, value=high)
                for i in k.static_range(height):
                    left = k.splat(x.rows.elements[rows[i] + n], t.width)
                    sums[i, 0] = multiply_add(sums[i, 0], left, low)
                    sums[i, 1] = multiply_add(sums[i, 1], left, high)
        number = stop
        if number < end:
            block = x.panel[2 * number * COLUMNS :]
            decode_units(block, panel, (begin + number) * UNIT_DEPTH, k.i64(UNIT_DEPTH), t)
            for step in range(2):
                n = 2 * number + step
                multiply_step(sums, x.rows.elements, rows, x.panel, n, height, t)
            number += 1
            while escape < panel.escapes and (
                k.i64(escapes[escape] >> 8) < (begin + number) * UNIT_PLACES
            ):
                k.brief()
                escape += 1
    if t.folds:
        if not x.first:
            add_sums(sums, Matrix(c, COLUMNS), height, 2, t.width)
    store_sums(Matrix(c, COLUMNS), sums, height, 2, t.width)


def decodes_in_tiles(t: Tiling) -> bool:
    """Whether the first register tile decodes a coded panel: if it has all columns, in pairs."""
    return t.coded and t.pair == 2 and 2 * t.width == COLUMNS


class CodedBlock(NamedTuple):
    """The K block of a coded panel that the first tile decodes.

    Args:
        panel: The panel.
        unit: The first unit of the K block.
        active: Not 0 if the panel is coded; else the K block is complete.
    """

    panel: Any
    unit: Any
    active: Any


def reads_rows_in_place(x: DType, panels: DType, inner: object) -> bool:
    """Whether the rows of the left operand are read in place; otherwise their K blocks are copied.

    They are copied if a row of pairs does not end with a pair, and if all rows of a tile share the sets of the
    L1 cache: with 12 rows in 8 ways no element is read from it.

    Args:
        x: The dtype of the rows.
        panels: The dtype of the packed weights.
        inner: K; not an int if it is known only at run time.
    """
    is_static = isinstance(inner, int)
    whole_pairs = DType.bfloat16 not in (x, panels) or (is_static and inner % 2 == 0)
    shares_sets = is_static and inner * x.size_in_bytes % SET_PERIOD == 0
    return whole_pairs and not shares_sets


class InnerSize(NamedTuple):
    """What kernels know of K, and of the number of rows, at compile time.

    Args:
        in_place: Whether rows are read in place; see `reads_rows_in_place`.
        folds: Whether each K block has accumulators of its own; see `Tiling`.
        coding: The coding of the weights (`kernels.products.dense.coded`); None: they are not coded.
        many_rows: Whether there are never few rows, so that the kernel needs no GEMV path.
    """

    in_place: bool
    folds: bool
    coding: Coding | None = None
    many_rows: bool = False


def inner_size(
    x: DType, panels: DType, inner: object, coding: Coding | None = None, many_rows: bool = False
) -> InnerSize:
    """The facts of K; see `reads_rows_in_place`."""
    # weights that are coded have the dtype of the rows
    in_place = reads_rows_in_place(x, panels if coding is None else x, inner)
    return InnerSize(in_place, is_long(inner), coding, many_rows)


class GemmMemory(NamedTuple):
    """Scratch memory of a worker: sums, a widened K block of a panel, a copy of K blocks of rows."""

    sums: Any
    wide: Any
    copy: Any


@k.inline
def gemm_memory(panels: Any, in_place: bool, t: Tiling, ctx: k.Context) -> GemmMemory:
    """The scratch memory of a launch; see `gemm_panels`."""
    widens = t.coded or storage(k.target(), panels.dtype).pair != t.pair
    # room for one tile more, as the last one may reach past the rows of the task
    sums = ctx.scratch(t.sums, (BLOCK_SUMS + (t.height + 1) * COLUMNS,))
    wide = ctx.scratch(t.lane, (LANES_K * COLUMNS if widens else 1,))
    return GemmMemory(
        sums, wide, ctx.scratch(t.lane, (1 if in_place else BLOCK_ROWS * COPY_STRIDE,))
    )


class Cut(NamedTuple):
    """K, its number of K blocks and their size."""

    blocks: Any
    block: Any
    size: Any


@k.inline
def count_panels(panels: Any, t: Tiling) -> Any:
    """The number of panels."""
    return panels.count if t.coded else panels.shape[0]


@k.inline
def panel_block(
    panels: Any,
    task: Task,
    strip: k.Value,
    begin: k.Value,
    length: k.Value,
    wide: k.View,
    size: Any,
    t: Tiling,
) -> Any:
    """The lanes of a K block of a panel; a coded one, and one that must be widened, is in `wide` on return."""
    if t.coded:
        panel = coded_panel(panels, task.strip + strip, size)
        if not decodes_in_tiles(t):
            decode_rows(wide, panel, begin, length, t)
        elif panel.form == PLAIN:
            decode_rows(wide, panel, begin, length, t)
        return wide
    else:
        # a panel has `COLUMNS` elements for each k
        stored = storage(k.target(), panels.dtype)
        panel = panels[task.strip + strip, begin * COLUMNS :].view(stored.lane)
        if stored.pair != t.pair:
            widen_block(wide, panel, k.ceildiv(length, 2), panels.dtype, t)
        return panel


@k.inline
def block_ahead(panels: Any, task: Task, turn: k.Value, cut: Cut, t: Tiling) -> Any:
    """The stored lanes of the K block that a task multiplies after turn `turn`, which are prefetched."""
    if t.coded:
        after = k.min(turn + 1, cut.blocks * task.strips - 1)
        panel = coded_panel(panels, task.strip + after % task.strips, cut.size)
        return bytes_from(panel, after // task.strips * cut.block).view(k.i32)
    else:
        lane = storage(k.target(), panels.dtype).lane
        return next_panel(panels, task, turn, cut.blocks, cut.block * COLUMNS).view(lane)


@k.inline
def gemm_task(
    results: Results, a: k.View, panels: Any, memory: GemmMemory, task: Task, b: Blocking,
    copied_rows: k.Value, in_place: bool, t: Tiling,
) -> Any:  # fmt: skip
    """Multiplies the rows of a task by its panels.

    Args:
        results: The results.
        a: The left operand, `[M, K]`.
        panels: The packed weights, `[panels, elements]`.
        memory: Scratch memory.
        task: The task.
        b: The blocking.
        copied_rows: The contents of the copy of rows: the index of its first row times the number of K blocks, plus the
            index of its group of K blocks; -1: empty.
        in_place: Whether A is read in place instead of copied.
        t: The tiling.

    Returns:
        The new contents of the copy of rows.
    """
    widens = t.coded or storage(k.target(), panels.dtype).pair != t.pair
    rows, size = a.shape[0], a.shape[1]
    blocks, block = cut_depth(size, LANES_K * t.pair, STEP)
    held = k.max(BLOCK_ROWS // task.rows, 1)  # the number of K blocks that fit the copy
    for turn in range(blocks * task.strips):
        n, strip = turn // task.strips, turn % task.strips
        begin = n * block
        length = k.min(block, size - begin)
        depth = k.ceildiv(length, t.pair)  # lanes in k
        if not in_place:
            # the copy is reused for all panels of its K blocks, and for the next task of the same rows
            group = n // held
            if copied_rows != task.row * blocks + group:
                copied_rows = task.row * blocks + group
                for i in range(k.min(held, blocks - group * held)):
                    at = (group * held + i) * block
                    part = a[task.row : task.row + task.rows, at : k.min(at + block, size)]
                    copy_rows(memory.copy[i * task.rows * COPY_STRIDE :], part, t)
        panel = panel_block(panels, task, strip, begin, length, memory.wide, size, t)
        if in_place:
            left = a[task.row :].reshape((rows - task.row) * size).view(t.lane)
            left, stride = left[begin // t.pair :], size // t.pair
        else:
            # [rows, COPY_STRIDE] of K block n
            left, stride = memory.copy[n % held * task.rows * COPY_STRIDE :], k.i64(COPY_STRIDE)
        ahead = block_ahead(panels, task, turn, Cut(blocks, block, size), t)
        left_rows = DenseRows(left, stride, task.rows - 1)
        x = KBlock(left_rows, memory.wide if widens else panel, depth, n == 0)
        if decodes_in_tiles(t):
            source = coded_panel(panels, task.strip + strip, size)
            active = k.i64(1) if source.form == CODED else k.i64(0)
            x = x._replace(coded_block=CodedBlock(source, begin // UNIT_DEPTH, active))
        step = PanelStep(x, strip, blocks, n, ahead)
        taller = taller_from(task.rows, t)
        multiply_panel(
            results, memory.sums, step, task, b, t, multiply_rows, tile_heights(t), taller
        )
    return copied_rows


@k.inline
def gemm_panels(
    results: Results, a: k.View, panels: Any, in_place: bool, t: Tiling, ctx: k.Context
) -> None:
    """Computes `results` from `a` `[M, K]` and `panels` `[panels, elements]`.

    Args:
        results: The results.
        a: The left operand.
        panels: The packed weights.
        in_place: Whether A is read in place instead of copied.
        t: The tiling.
        ctx: The context.
    """
    rows, strips = a.shape[0], count_panels(panels, t)
    memory = gemm_memory(panels, in_place, t, ctx)
    tiles, task_panels = plan(rows, strips * COLUMNS, ctx.num_workers, t)
    b = Blocking(rows, strips, t.height, tiles, task_panels)
    copied = k.i64(-1)
    for row_block, group in ctx.parallel(task_grid(b), grain=1):
        task = task_at(b, row_block, group)
        copied = gemm_task(results, a, panels, memory, task, b, copied, in_place, t)
