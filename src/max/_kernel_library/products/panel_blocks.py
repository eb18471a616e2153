"""Products of many rows with panels of a weight: each worker takes blocks of rows by groups of panels.

A task reads its rows where they are, in each row of a register tile from an offset of its own. So nothing is packed, nobody waits, and what a
task reads again stays in its L2 cache: a K block of its rows, its sums, and (in the L1 cache) a K block of one panel. Elements that have
to be widened, or rows that do not begin at whole lanes, are first copied to scratch, K block by K block.
"""

from __future__ import annotations

from typing import Any

from max import kernel as k
from max._kernel_library.products.matmul import LANES_K, round_up
from max._kernel_library.tiles.register_tiles import Tiling, lanes, multiply_add
from max._kernel_library.tiles.strips import COLUMNS, Parts, ask_for_strip, store_strip
from max.kernel import Target

STEP = 32
"""K is filled up to a multiple of this."""
BLOCK_ROWS = 252
"""Most rows of a task, a multiple of each tile's height: a K block of them stays in the L2 cache."""
BLOCK_PANELS = 16
"""Most panels of a task."""
BLOCK_SUMS = 1 << 16
"""Most sums of a task, which stay in the L2 cache between K blocks."""
LEAST_TILES, LEAST_PANELS = 4, 1
"""Tasks are not made smaller than this for the sake of more of them."""
TASKS_A_WORKER = 8
"""So many tasks keep workers equally busy, one of which may be slowed down by others."""
COPY_STRIDE = LANES_K + 16
"""Lanes from row to row of a copy: not a power of two, whose multiples would share sets of the cache."""


def storage(target: Target, dtype: k.ScalarType) -> Tiling:
    """How panels are packed: pairs of 16-bit elements share a lane of 32 bits."""
    width = target.width(k.f32)
    if dtype.bits == 16:
        return Tiling(k.f32, k.i32, 2, width, 0, 0)
    return Tiling(k.f32, k.f32, 1, width, 0, 0)


def tile_heights(t: Tiling) -> tuple[int, ...]:
    """The heights of tiles: a common one, two thirds of it, and one more than it where there are registers for that."""
    common = (t.height, t.height * 2 // 3)
    return (*common, t.height + 1) if t.height >= 12 else common


@k.inline
def higher_from(count: Any, t: Tiling) -> Any:
    """The first of `count` rows from which tiles are one higher, where that takes in a remainder; else `count`."""
    rows = count % t.height * (t.height + 1)
    first = count
    if len(tile_heights(t)) == 3 and rows <= count:
        first = count - rows
    return first


@k.inline
def choose_height(row: Any, count: Any, higher: Any, t: Tiling) -> Any:
    """The height of the tile from `row` on, of `count` rows. Two lower ones take less time than a high one and a remainder.

    Args:
        row: The tile's first row.
        count: How many rows there are.
        higher: From which row on tiles are one higher.
        t: The tiling.
    """
    common, lower = tile_heights(t)[:2]
    rest = count - row
    height = k.i64(common)
    if row >= higher:
        height = k.i64(common + 1)
    elif rest <= lower or (rest > common and rest <= 2 * lower):
        height = k.i64(lower)
    return height


@k.inline
def widened(lanes: Any, dtype: Any) -> Any:
    """The two elements of 16 bits in each lane, in f32: the first, and the second."""
    if dtype == k.bf16:  # the upper half of an f32
        bits = k.bitcast(lanes, k.u32)
        return k.bitcast(bits << 16, k.f32), k.bitcast(bits & 0xFFFF0000, k.f32)
    return k.deinterleave(k.cast(k.bitcast(lanes, dtype), k.f32))


@k.inline
def widen_block(panel: Any, b: Any, depth: Any, dtype: Any, t: Tiling) -> None:
    """A K block of a panel of pairs as f32, row by row."""
    for n in range(depth):
        for column in k.static_range(0, COLUMNS, t.width):
            even, odd = widened(b.load(n * COLUMNS + column, width=t.width), dtype)
            panel.store(2 * n * COLUMNS + column, value=even)
            panel.store((2 * n + 1) * COLUMNS + column, value=odd)


@k.inline
def copy_rows(copy: Any, rows: Any, t: Tiling) -> None:
    """Copies a K block of some rows as lanes; a last half lane is filled up with 0.

    Args:
        copy: Flat view of lanes, `COPY_STRIDE` a row.
        rows: `[rows, k]`.
        t: The tiling.
    """
    for r in range(rows.shape[0]):
        for i, mask in k.vectors(rows.shape[1], t.step):
            elements = rows.load(r, i, width=t.step, mask=mask)
            copy.store(r * COPY_STRIDE + i // t.pair, value=lanes(elements, t.lane))


@k.inline
def multiply_step(sums: Any, a: Any, at: Any, b: Any, n: Any, height: int, t: Tiling) -> None:
    """Adds the products of lane `n` of some rows with two vectors of columns."""
    low = b.load(n * COLUMNS, width=t.width)
    high = b.load(n * COLUMNS + t.width, width=t.width)
    for i in k.static_range(height):
        left = k.splat(a[at[i] + n], t.width)
        sums[i, 0] = multiply_add(sums[i, 0], left, low)
        sums[i, 1] = multiply_add(sums[i, 1], left, high)


@k.inline
def multiply_rows(
    c: Any, a: Any, stride: Any, row: Any, last: Any, b: Any, depth: Any, first: Any, height: int,
    next_panel: Any, next_rows: bool, t: Tiling,
) -> None:  # fmt: skip
    """Multiplies rows of A by two vectors of columns of a panel: a register tile of sums.

    Args:
        c: The sums, `COLUMNS` a row; set where `first`, else added to.
        a: Flat lanes of A.
        stride: Of them from row to row.
        row: The first row.
        last: The last there is, which stands in for those behind it.
        b: Flat lanes of the panel, `COLUMNS` for each lane in k.
        depth: Lanes in k.
        first: Whether nothing was summed yet.
        height: Rows.
        next_panel: The part of a panel that comes next, to be asked for meanwhile; None: nothing.
        next_rows: Whether the rows that come next are asked for.
        t: The tiling.
    """
    sums = k.tile(t.sums, (height, 2), width=t.width, fill=0)
    if not first:
        for i in k.static_range(height):
            for j in k.static_range(2):
                sums[i, j] = c.load(i * COLUMNS + j * t.width, width=t.width)
    at = [k.min(row + i, last) * stride for i in k.static_range(height)]
    if next_rows:
        # a part of the steps for each of the rows that come next
        steps = k.ceildiv(depth, height)
        for part in range(height):
            ahead = a[(row + height + part) * stride :]
            for n in range(part * steps, k.min(part * steps + steps, depth)):
                ahead.prefetch((n - part * steps) * height)
                multiply_step(sums, a, at, b, n, height, t)
    else:
        for n in range(depth):
            if next_panel is not None:
                for line in k.static_range(0, COLUMNS, 16):
                    next_panel.prefetch(n * COLUMNS + line)
            multiply_step(sums, a, at, b, n, height, t)
    for i in k.static_range(height):
        for j in k.static_range(2):
            c.store(i * COLUMNS + j * t.width, value=sums[i, j])


@k.inline
def plan(
    rows: Any, columns: Any, workers: Any, t: Tiling, most_rows: int = BLOCK_ROWS,
    most_sums: int = BLOCK_SUMS, repeats: Any = 1,
) -> Any:  # fmt: skip
    """How many tiles of rows and how many panels a task has.

    They are as large as caches allow, rows first, unless that leaves too few tasks. Then the longer side is cut: a task reads its rows and
    its columns, and the nearer it is to a square, the less it reads for what it multiplies.

    Args:
        rows: Rows of A.
        columns: Columns of B.
        workers: How many share the tasks.
        t: The tiling.
        most_rows: Most rows of a task.
        most_sums: Most sums of a task.
        repeats: How often an element of A is multiplied by a column, as in the patches of a convolution.
    """
    tiles = k.max(k.ceildiv(rows, t.height), 1)
    strips = k.max(k.ceildiv(columns, COLUMNS), 1)
    blocks = k.ceildiv(tiles, most_rows // t.height)
    high = k.ceildiv(tiles, blocks)
    groups = k.ceildiv(strips, k.min(most_sums // (high * t.height * COLUMNS), BLOCK_PANELS))
    panels = k.ceildiv(strips, groups)
    wanted = TASKS_A_WORKER * workers
    while k.ceildiv(tiles, high) * k.ceildiv(strips, panels) < wanted and (
        high > LEAST_TILES or panels > LEAST_PANELS
    ):
        longer = high * t.height >= panels * COLUMNS * repeats or panels <= LEAST_PANELS
        if longer and high > LEAST_TILES:
            blocks += 1
            high = k.max(k.ceildiv(tiles, blocks), LEAST_TILES)
        else:
            groups += 1
            panels = k.max(k.ceildiv(strips, groups), LEAST_PANELS)
    return high, panels


@k.inline
def many_rows(
    out: Any, a: Any, panels: Any, extra: Any, in_place: bool, epilogue: Any, parts: Parts, t: Tiling,
    ctx: Any,
) -> None:  # fmt: skip
    """The product of all rows.

    Args:
        out: `[M, N]`.
        a: `[M, K]`.
        panels: `[panels, elements]`.
        extra: Further results, and the epilogue's views.
        in_place: Whether A is read where it is.
        epilogue: The epilogue.
        parts: Several products; see `max._kernel_library.tiles.strips`.
        t: The tiling.
        ctx: The context.
    """
    stored = storage(k.target(), panels.dtype)
    rows, size, strips = a.shape[0], a.shape[1], panels.shape[0]
    c = ctx.scratch(t.sums, (BLOCK_SUMS + (t.height + 1) * COLUMNS,))
    wide = ctx.scratch(t.lane, (LANES_K * COLUMNS if stored.pair != t.pair else 1,))
    copy = ctx.scratch(t.lane, (1 if in_place else BLOCK_ROWS * COPY_STRIDE,))
    # K is cut into equal blocks of whole vectors; there is one at least, which sets the sums to 0 where K is 0
    blocks = k.max(k.ceildiv(size, LANES_K * t.pair), 1)
    block = k.max(round_up(k.ceildiv(size, blocks), STEP), STEP)
    blocks = k.max(k.ceildiv(size, block), 1)
    heights = tile_heights(t)
    high, wanted = plan(rows, strips * COLUMNS, ctx.num_workers, t)
    tasks = (k.ceildiv(rows, high * t.height), k.ceildiv(strips, wanted))
    copied = k.i64(-1)
    for row_block, group in ctx.parallel(tasks, grain=1):
        first_row = row_block * high * t.height
        count = k.min(high * t.height, rows - first_row)
        first_strip = group * wanted
        here = k.min(wanted, strips - first_strip)
        higher = higher_from(count, t)
        for turn in range(blocks * here):
            n, strip = turn // here, turn % here
            begin = n * block
            length = k.min(block, size - begin)
            depth = k.ceildiv(length, t.pair)
            if not in_place:
                if copied != row_block * blocks + n:
                    copied = row_block * blocks + n
                    copy_rows(copy, a[first_row : first_row + count, begin : begin + length], t)
            b = panels[first_strip + strip, begin * COLUMNS :].view(stored.lane)
            if stored.pair != t.pair:
                widen_block(wide, b, k.ceildiv(length, 2), panels.dtype, t)
            right = wide if stored.pair != t.pair else b
            if in_place:
                left = a[first_row:].reshape((rows - first_row) * size).view(t.lane)
                left = left[begin // t.pair :]
                stride = size // t.pair
            else:
                left = copy
                stride = k.i64(COPY_STRIDE)
            # what comes next is asked for while the first tile is multiplied
            after = k.min(turn + 1, blocks * here - 1)
            ahead = panels[first_strip + after % here, after // here * block * COLUMNS :]
            ahead = ahead.view(stored.lane)
            row = k.i64(0)
            while row < count:
                rest = count - row
                height_here = choose_height(row, count, higher, t)
                # sums that nothing is added to later are no longer needed once they are stored
                place = row + strip * high * t.height if blocks > 1 else k.i64(0)
                sums = c[place * COLUMNS :]
                here_strip = first_strip + strip
                if n == blocks - 1:
                    ask_for_strip(out, extra, first_row + row, here_strip, t.height, parts)
                for height in k.unroll(heights):
                    if height == height_here:
                        for half in k.static_range(0, COLUMNS, 2 * t.width):
                            if half == 0 and height != t.height or half == 0 and row == 0:
                                multiply_rows(
                                    sums, left, stride, row, count - 1, right, depth, n == 0,
                                    height, ahead, False, t,
                                )  # fmt: skip
                            elif half == 0 and strip == 0:
                                multiply_rows(
                                    sums, left, stride, row, count - 1, right, depth, n == 0,
                                    height, None, True, t,
                                )  # fmt: skip
                            else:
                                multiply_rows(
                                    sums[half:], left, stride, row, count - 1, right[half:], depth,
                                    n == 0, height, None, False, t,
                                )  # fmt: skip
                done = k.min(rest, height_here)
                if n == blocks - 1:
                    store_strip(
                        out, sums, first_row + row, done, here_strip, extra, epilogue, parts, t.width
                    )  # fmt: skip
                row += done
