"""Convolutions as products of patches with strips of a packed filter; the matrix of patches is not materialized.

A task is up to `BLOCK_ROWS` positions by some strips. The loops, from the outside::

    task (positions × strips) → K block (runs of patches) → strip → tile (12 positions × 2 vectors, AVX2 6 × 2) → run →
    k

Register budget: that of `kernels.tiles.tiling.Tiling`. Cache budget: a K block of a strip, `LANES_K` × 32 ×
4 bytes (32 KB), stays in the L1 cache; the sums of a task (`BLOCK_SUMS`, 256 KB) in the L2 cache. A task whose input
has at most `TASK_BYTES` takes one strip, as the input then stays in the L2 cache too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from max import kernel as k
from max._backends.cpu.kernels.convolution.filters import Filter
from max._backends.cpu.kernels.convolution.inputs import padded_sizes
from max._backends.cpu.kernels.convolution.int8_filters import SIGN_BITS
from max._backends.cpu.kernels.convolution.patches import (
    LINE,
    MAX_HEIGHT,
    Layout,
    Patches,
    Runs,
    Window,
    copy_patches,
    find_patches,
    multiply_patches,
)
from max._backends.cpu.kernels.products.blocking import (
    BLOCK_ROWS,
    BLOCK_SUMS,
    LANES_K,
    STEP,
    choose_height,
    plan,
    taller_from,
    tile_heights,
)
from max._backends.cpu.kernels.products.dense.panels import COPY_STRIDE, widen_block
from max._backends.cpu.kernels.products.int8.panels import FOUR
from max._backends.cpu.kernels.tiles.strips import COLUMNS, Results, prefetch_tile, store_tile
from max._backends.cpu.kernels.tiles.tiling import Tiling, round_up

TASK_BYTES = 1 << 18
"""Largest input of a task that takes one strip only: it stays in the L2 cache."""
COPY_ROWS = 84
"""The maximum number of patches of a task that are copied: the L1 cache holds those of few channels."""
MAX_RUNS = 512
"""The maximum number of runs of a patch that is not copied."""
SHARES = 4
"""The number of tiles that share the prefetch of the next strip, as memory sends its lines slowly."""
MODES = ("in_place", "padded", "copied")
"""How patches are read: from the input, with zeros for taps in the padding; from a padded copy of the input, which all
workers write first; from copies of K blocks of patches, which each task takes from the padded copy.
"""


class Blocks(NamedTuple):
    """How patches are cut into K blocks.

    Args:
        count: K blocks; at least 1, which sets the sums to 0 where there is nothing to sum.
        part: Elements (of copies) or lanes (of runs) of a K block in each run.
        runs: Runs of a K block.
        copy_step: Lanes from patch to patch of a copy.
    """

    count: Any
    part: Any
    runs: Any
    copy_step: Any


class Task(NamedTuple):
    """The positions and columns that a register tile's results have.

    Args:
        row: The first position of the task.
        rows: Its positions.
        column: The first column of the strip.
        columns: Its columns.
        sums_row: The row of the sums of the strip's first tile.
    """

    row: Any
    rows: Any
    column: Any
    columns: Any
    sums_row: Any


@k.inline
def layout_of(x: k.View, window: Window, channels: k.Value, groups: int, mode: str) -> Layout:
    """The layout of patches in the input that `mode` reads."""
    taps, dilation, padding = window.taps, window.dilation, window.padding
    in_place = mode == "in_place"
    # neighboring taps of a line are adjacent in memory, unless groups lie between them
    line_is_run = (
        dilation[2] == 1 and (groups == 1 or not in_place) and not (in_place and any(padding))
    )
    # a piece is what lies together of a line of taps
    pieces = 1 if line_is_run else taps[2]
    # in place, the channels of all groups lie between two columns
    pixel = x.shape[4] if in_place else channels
    spread = x.shape[1:4] if in_place else padded_sizes(x, padding)
    # a padded copy has the groups as axis before D, H and W
    sizes = (1 if in_place else groups, *spread)
    return Layout(
        size=taps[0] * taps[1] * taps[2] * channels,
        run=taps[2] * channels if line_is_run else channels,
        runs=taps[0] * taps[1] * pieces,
        pieces=pieces,
        pixel=pixel,
        line=dilation[1] * sizes[3] * pixel,
        plane=dilation[0] * sizes[2] * sizes[3] * pixel,
        sizes=sizes,
        # a padded copy has these zeros itself
        low=(padding[0], padding[2], padding[4]) if in_place else (0, 0, 0),
    )


@k.inline
def cut_copies(size: k.Value, t: Tiling) -> Blocks:
    """The K blocks of patches of `size` elements that are copied."""
    blocks = k.ceildiv(size, LANES_K * t.pair)
    part = k.max(round_up(k.ceildiv(size, k.max(blocks, 1)), STEP), STEP)
    blocks = k.ceildiv(size, part)
    # room for the lanes that a vector writes past the end
    copy_step = k.min(round_up(part // t.pair, LINE) + LINE, COPY_STRIDE)
    return Blocks(k.max(blocks, 1), part, k.i64(1), copy_step)


@k.inline
def cut_runs(run: k.Value, runs: k.Value) -> Blocks:
    """The K blocks of patches of `runs` runs of `run` lanes: a part of a run, or some runs."""
    parts = k.max(k.ceildiv(run, LANES_K), 1)
    # stored pairs are not cut, even where they are widened
    part = round_up(k.ceildiv(run, parts), 2)
    # short runs share a K block
    at_once = k.max(LANES_K // k.max(run, 1), 1)
    at_once = k.max(k.ceildiv(runs, k.max(k.ceildiv(runs, at_once), 1)), 1)
    blocks = k.ceildiv(runs, at_once) * parts
    return Blocks(k.max(blocks, 1), part, at_once, k.i64(COPY_STRIDE))


@k.inline
def write_offsets(
    offsets: k.View, zeros: k.View, layout: Layout, window: Window, fill: int, t: Tiling
) -> None:
    """Writes the offsets of a patch's runs from its first element, and what runs in the padding read."""
    pieces, lines = layout.pieces, window.taps[1]
    pixel = layout.pixel // t.pair
    for i in range(layout.runs):
        # run i is of tap plane q, of line r, and where a line is in pieces of column s
        q, r, s = i // (lines * pieces), i // pieces % lines, i % pieces
        offset = (q * layout.plane + r * layout.line) // t.pair
        offsets[i] = offset + s * window.dilation[2] * pixel
    # as long as a K block; bytes are four a lane
    word = (fill & 0xFF) * 0x01010101
    lane = word - (1 << 32) if word >> 31 else word
    for i in k.static_range(0, LANES_K, t.width):
        zeros.store(i, value=k.splat(k.cast(k.i32(lane), t.lane), t.width))


@k.inline
def multiply_strip_of_filter(
    results: Results, c: k.View, patches: Patches, runs: Runs, strip: k.View, initial: k.View | None, ahead: k.View,
    task: Task, first: Any, last: Any, t: Tiling,
) -> None:  # fmt: skip
    """Multiplies the patches of a task by a K block of a strip, tile by tile; after the last K block the results are
    stored.

    Args:
        results: The results.
        c: The sums of the task.
        patches: The patches.
        runs: The runs of the K block.
        strip: Rows of the strip, flat lanes.
        initial: What the sums of each column begin with; None: with 0.
        ahead: Rows of a strip that are multiplied next.
        task: The task.
        first: Whether this is the first K block.
        last: Whether this is the last one.
        t: The tiling.
    """
    taller = taller_from(task.rows, t)
    depth = (runs.last - runs.first) * runs.length
    # the first tiles share the next strip, two cache lines a step in all; later ones prefetch the last share again
    sharing = k.select(task.rows >= SHARES * t.height, k.i64(SHARES), k.i64(2))
    step = 2 * LINE // sharing
    row = k.i64(0)
    while row < task.rows:
        remaining = task.rows - row
        tile_height = choose_height(row, task.rows, taller, t)
        # with one K block a tile's sums are final: all tiles share the first rows
        sums = c[(k.i64(0) if first and last else task.sums_row + row) * COLUMNS :]
        if last:
            # results of the last K block are written soon
            prefetch_tile(results, task.row + row, task.column, t.height)
        tile = patches
        # rows of a copy follow each other, other patches begin anywhere
        if patches.starts is None:
            tile = patches._replace(lanes=patches.lanes[row * patches.step :])
        else:
            valid = None if patches.valid is None else patches.valid[row:]
            tile = patches._replace(starts=patches.starts[row:], valid=valid)
        for height in k.unroll(tile_heights(t)):
            if height == tile_height:
                for half in k.static_range(0, COLUMNS, 2 * t.width):
                    if half < task.columns:
                        multiply_patches(
                            sums[half:], tile, runs, strip[half:], first,
                            None if initial is None else initial[half:],
                            ahead[k.min(row // t.height, sharing - 1) * depth * step :]
                            if half == 0
                            else None,
                            step, height, t,
                        )  # fmt: skip
        done = k.min(remaining, tile_height)
        if last:
            store_tile(results, sums, task.row + row, done, task.column)
        row += done


@k.inline
def group_lanes(
    x: k.View,
    padded: k.View,
    g: k.Value,
    channels: k.Value,
    layout: Layout,
    pixel: k.Value,
    mode: str,
    t: Tiling,
) -> Any:
    """The input of a group that `mode` reads, flat: elements where patches are copied, else lanes."""
    if mode == "in_place":
        return x.reshape(x.size)[g * channels :].view(t.lane)
    # copied patches are addressed in elements, as their runs may begin within a pair
    left = padded if mode == "copied" else padded.view(t.lane)
    return left[g * layout.sizes[1] * layout.sizes[2] * layout.sizes[3] * pixel :]


@k.inline
def conv_scratch(copied: bool, bounded: bool, widens: bool, t: Tiling, ctx: k.Context) -> Any:
    """The scratch memory of a worker: sums, a widened K block of a strip, copies of patches, and the places of patches
    and runs, and sign bits.

    Args:
        copied: Whether patches are copied.
        bounded: Whether taps may lie in the padding: then the bits of valid taps are kept.
        widens: Whether strips are widened.
        t: The tiling.
        ctx: The context.
    """
    # tiles read the places of patches behind the last one
    room = BLOCK_ROWS + MAX_HEIGHT
    c = ctx.scratch(t.sums, (BLOCK_SUMS + MAX_HEIGHT * COLUMNS,))
    wide = ctx.scratch(t.lane, (LANES_K * COLUMNS if widens else 1,))
    copy = ctx.scratch(t.lane, (room * COPY_STRIDE if copied else 1,))
    starts = ctx.scratch(k.i64, (room,))
    valid = ctx.scratch(k.i64, (room if bounded else 1,))
    offsets = ctx.scratch(k.i64, (1 if copied else MAX_RUNS,))
    zeros = ctx.scratch(t.lane, (LANES_K,))
    flips = ctx.scratch(k.i32, (t.width,))
    flips.store(0, value=k.splat(k.i32(SIGN_BITS), t.width))
    return c, wide, copy, starts, valid, offsets, zeros, flips


@k.inline
def plan_tasks(
    x: k.View, positions: k.Value, features: k.Value, f: Filter, window: Window, copied: bool, t: Tiling,
    ctx: k.Context,
) -> Any:  # fmt: skip
    """The number of row tiles and of strips of a task.

    Args:
        x: The input.
        positions: Positions of the result.
        features: Columns of a group.
        f: The packed filter.
        window: The window.
        copied: Whether patches are copied.
        t: The tiling.
        ctx: The context.
    """
    taps = window.taps[0] * window.taps[1] * window.taps[2]
    # two workers that write codes of one cache line would wait for each other: bytes take several strips
    few = taps > 1 and t.pair != FOUR
    small = few and BLOCK_ROWS * f.channels * x.dtype.size <= TASK_BYTES
    max_sums = k.i64(BLOCK_ROWS * COLUMNS) if small else k.i64(BLOCK_SUMS)
    workers = k.ceildiv(ctx.num_workers, f.groups)
    max_rows = COPY_ROWS if copied else BLOCK_ROWS
    return plan(positions, features, workers, t, max_rows, max_sums, taps)


@k.inline
def convolve(
    results: Results, x: k.View, padded: k.View, f: Filter, window: Window, mode: str, t: Tiling, ctx: k.Context,
    fill: int = 0, folds: Any = 0,
) -> None:  # fmt: skip
    """Multiplies patches by strips.

    Args:
        results: The result `[N, D, H, W, F]`, the epilogue and its views.
        x: The input `[N, D, H, W, C]`.
        padded: The input with its padding, flat, `[N, groups, D, H, W, C / groups]`, where it is read.
        f: The packed filter.
        window: The window.
        mode: How patches are read; see `MODES`.
        t: The tiling.
        ctx: The context.
        fill: What the padding holds.
        folds: As of `Patches`.
    """
    out, groups, stored = results.out, f.groups, f.strip_tiling
    copied, in_place = mode == "copied", mode == "in_place"
    bounded = in_place and any(window.padding)
    widens = stored.pair != t.pair
    memory = conv_scratch(copied, bounded, widens, t, ctx)
    c, wide, copy, starts, valid, offsets, zeros, flips = memory
    features = out.shape[4] // groups  # columns of a group
    strips = k.ceildiv(features, COLUMNS)
    positions = out.shape[0] * out.shape[1] * out.shape[2] * out.shape[3]
    all_rows = out.reshape(positions, out.shape[4])  # [positions, F]
    layout = layout_of(x, window, f.channels, groups, mode)
    # strips of bytes have a line before their rows
    lead = COLUMNS if t.pair == FOUR else 0
    strip_lanes = k.ceildiv(layout.size, stored.pair) * COLUMNS + lead
    # copied patches are addressed in elements, others in lanes
    unit = 1 if copied else t.pair
    run, pixel = layout.run // unit, layout.pixel // unit
    cut = cut_copies(layout.size, t) if copied else cut_runs(run, layout.runs)
    if copied:
        offsets[0] = 0
    else:
        write_offsets(offsets, zeros, layout, window, fill, t)
    tiles, task_strips = plan_tasks(x, positions, features, f, window, copied, t, ctx)
    block_rows = tiles * t.height
    grid = (groups, k.ceildiv(positions, block_rows), k.ceildiv(strips, task_strips))
    for g, row_block, strip_group in ctx.parallel(grid, grain=1):
        first = row_block * block_rows
        count = k.min(block_rows, positions - first)
        first_strip = strip_group * task_strips
        strip_count = k.min(task_strips, strips - first_strip)
        first_lane = (g * strips + first_strip) * strip_lanes
        # the columns of later groups are cut off, so that the last strip of a group stops at its end
        group_results = results._replace(out=all_rows[:, : (g + 1) * features])
        find_patches(
            starts, valid if bounded else None, first, count, out.shape, layout, window, pixel
        )
        left = group_lanes(x, padded, g, f.channels, layout, pixel, mode, t)
        lanes = copy if copied else left
        tile_starts = None if copied else starts
        patches = Patches(
            lanes, tile_starts, cut.copy_step, valid if bounded else None, zeros, offsets, folds,
            flips if lead else None,
        )  # fmt: skip
        # the state of a K block is in variables, so that inner loops do not recompute it
        block, first_run, begin, from_row = k.i64(0), k.i64(0), k.i64(0), k.i64(0)
        # copied patches are a single run
        last_run = k.i64(1) if copied else k.min(cut.runs, layout.runs)
        length = k.ceildiv(k.min(cut.part, layout.size), t.pair) if copied else k.min(cut.part, run)
        while block < cut.count:
            depth = (last_run - first_run) * length
            if copied:
                end = k.min(block * cut.part + cut.part, layout.size)
                copy_patches(
                    copy, left, starts, count, block * cut.part, end, layout, window, cut.copy_step,
                    t.pair,
                )  # fmt: skip
            for strip in range(strip_count):
                whole = f.lanes[first_lane + strip * strip_lanes :]
                b = whole[lead + from_row * COLUMNS :]
                if widens:
                    widen_block(wide, b, k.ceildiv(depth, 2), f.dtype, t)
                # prefetched by the first half of each tile: the next strip, or the next K block of the first one
                after = (strip + 1) * strip_lanes + lead + from_row * COLUMNS
                if strip + 1 == strip_count:
                    after = (from_row + depth * t.pair // stored.pair) * COLUMNS + lead
                column = g * features + (first_strip + strip) * COLUMNS
                columns = k.min(COLUMNS, features - (first_strip + strip) * COLUMNS)
                task = Task(first, count, column, columns, strip * block_rows)
                multiply_strip_of_filter(
                    group_results, c, patches, Runs(first_run, last_run, begin, length),
                    wide if widens else b, whole if lead else None, f.lanes[first_lane + after :],
                    task, block == 0, block == cut.count - 1, t,
                )  # fmt: skip
            block += 1
            if copied:
                from_row = block * cut.part // stored.pair
                length = k.ceildiv(k.min(cut.part, layout.size - block * cut.part), t.pair)
            else:
                # first the parts of a run, then the next runs
                begin += cut.part
                if begin >= run:
                    begin = k.i64(0)
                    first_run += cut.runs
                    last_run = k.min(first_run + cut.runs, layout.runs)
                length = k.min(cut.part, run - begin)
                # rows of a strip are in the order of a patch: tap by tap, channel by channel
                from_row = (first_run * run + begin) * t.pair // stored.pair
