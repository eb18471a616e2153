"""Dense weights in panels, which are packed once when a model is loaded, and products with them.

A panel has 32 columns of the right operand B `[K, N]`: row after row of it, or where elements have 16 bits, pair after pair of rows
with neighbours in k side by side, ``[K / 2][32][2]``. Rows and columns that are not there are 0 or copies. Panels begin
`panel_lanes` apart. So what is read lies one after the other, a vector of B holds columns, and no sum goes across its lanes.

One kernel, which branches on the number of rows at run time:

- few rows: one after the other or four at once, at the speed at which B is read;
- more: all workers pack A into a shared workspace and multiply by register tiles, as `max._kernels.matmul` does, but B needs no packing
  (but where its elements are not those that are multiplied, which are widened K block by K block).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from max import kernel as k
from max._kernels.lowering import KernelCall, Operand, Workspace, product, view
from max._kernels.matmul import BLOCK_ROWS, LANES_K, identity, pack_a, round_up
from max._kernels.tiles import (
    Tiling,
    multiply_add,
    multiply_tile,
    pack_columns,
    pack_rows,
    tiling,
)
from max.dtype import DType
from max.kernel import Target

COLUMNS = 32
"""Columns of a panel."""
STEP = 32
"""K is filled up to a multiple of this."""
CHUNK = 512
"""Elements along k of a panel that a worker packs at once."""
FEW_ROWS = 8
"""Up to so many rows A is not packed."""
FEW_AT_ONCE = (4, 2, 1)
"""Rows that are multiplied at once then."""
MAX_TILE_ROWS, MAX_WIDTH = 12, 16
"""What rows and k are filled up to at most when A is packed."""
DTYPES = (DType.float32, DType.bfloat16, DType.float16)
"""The element types that have panels."""


def panel_elements(inner: int) -> int:
    """Elements of a panel with so many rows of B."""
    return -(-inner // STEP) * STEP * COLUMNS


def storage(target: Target, dtype: k.ScalarType) -> Tiling:
    """How panels are packed: pairs of 16-bit elements share a lane of 32 bits."""
    width = target.width(k.f32)
    if dtype.bits == 16:
        return Tiling(k.f32, k.i32, 2, width, 0, 0)
    return Tiling(k.f32, k.f32, 1, width, 0, 0)


def tile_heights(t: Tiling) -> tuple[Tiling, ...]:
    """The tilings to choose from: the highest tile, and one that fits other numbers of rows better."""
    return (t, replace(t, height=t.height * 2 // 3))


@k.kernel
def pack_panels(out: k.Output, w: k.Input, ctx: k.Context, *, by_rows: bool) -> None:
    """`out` `[panels, elements]` from `w` `[N, K]` where `by_rows`, else `[K, N]`."""
    t = storage(ctx.target, w.dtype)
    inner = w.shape[1] if by_rows else w.shape[0]
    columns = w.shape[0] if by_rows else w.shape[1]
    for panel, chunk in ctx.parallel((out.shape[0], k.ceildiv(inner, CHUNK))):
        begin = chunk * CHUNK
        length = k.min(CHUNK, inner - begin)
        target = out[panel, begin * COLUMNS :].view(t.lane)
        for column in k.static_range(0, COLUMNS, t.width):
            # the last column stands in for those that are not there
            at = k.min(panel * COLUMNS + column, columns - 1)
            if by_rows:
                source = w[at:, begin : begin + length]
                pack_rows(target[column:], COLUMNS, source, t.width, t)
        if not by_rows:
            column = panel * COLUMNS
            source = w[begin : begin + length, column : k.min(column + COLUMNS, columns)]
            pack_columns(target, source, COLUMNS // t.width, t)


@k.inline
def widened(lanes: Any, dtype: Any) -> Any:
    """The two elements of 16 bits in each lane, in f32: the first, and the second."""
    return k.deinterleave(k.cast(k.bitcast(lanes, dtype), k.f32))


@k.inline
def few_rows(c: Any, a: Any, size: Any, panel: Any, first: int, rows: int, t: Tiling) -> None:
    """A few rows of A by two vectors of columns of a panel, which the hardware asks for ahead of its use.

    Args:
        c: Where the sums go, `COLUMNS` a row.
        a: The rows' elements, one row after the other.
        size: Of them a row.
        panel: The panel.
        first: The first column, within the panel.
        rows: Rows at once.
        t: The tiling.
    """
    stored = storage(k.target(), panel.dtype)
    b = panel.view(stored.lane)
    sums = k.tile(k.f32, (rows, 2), width=t.width, fill=0.0)
    words = a.view(k.i32) if t.pair == 2 else a
    for n in range(size // stored.pair):
        at = n * COLUMNS + first
        low, high = b.load(at, width=t.width), b.load(at + t.width, width=t.width)
        if stored.pair == 1 or t.pair == 2:
            for r in k.static_range(rows):
                left = k.splat(words[r * (size // t.pair) + n], t.width)
                sums[r, 0] = multiply_add(sums[r, 0], left, low)
                sums[r, 1] = multiply_add(sums[r, 1], left, high)
        else:
            lows, highs = widened(low, panel.dtype), widened(high, panel.dtype)
            for r in k.static_range(rows):
                for i in k.static_range(2):
                    left = k.splat(k.f32(a[r * size + 2 * n + i]), t.width)
                    sums[r, 0] = k.fma(left, lows[i], sums[r, 0])
                    sums[r, 1] = k.fma(left, highs[i], sums[r, 1])
    if stored.pair != t.pair and size % 2 == 1:
        # the last element has no neighbour
        at = size // 2 * COLUMNS + first
        lows = widened(b.load(at, width=t.width), panel.dtype)
        highs = widened(b.load(at + t.width, width=t.width), panel.dtype)
        for r in k.static_range(rows):
            left = k.splat(k.f32(a[r * size + size - 1]), t.width)
            sums[r, 0] = k.fma(left, lows[0], sums[r, 0])
            sums[r, 1] = k.fma(left, highs[0], sums[r, 1])
    for r in k.static_range(rows):
        for v in k.static_range(2):
            c.store(r * COLUMNS + first + v * t.width, value=sums[r, v])


@k.inline
def widen_block(panel: Any, b: Any, depth: Any, dtype: Any, t: Tiling) -> None:
    """A K block of a panel of pairs as f32, row by row."""
    for n in range(depth):
        for column in k.static_range(0, COLUMNS, t.width):
            even, odd = widened(b.load(n * COLUMNS + column, width=t.width), dtype)
            panel.store(2 * n * COLUMNS + column, value=even)
            panel.store((2 * n + 1) * COLUMNS + column, value=odd)


@k.inline
def many_rows(
    c: Any,
    packed: Any,
    tiles: Any,
    first_tile: Any,
    last_tile: Any,
    panels: Any,
    wide: Any,
    size: Any,
    block: Any,
    workers: Any,
    t: Tiling,
) -> None:
    """A panel by some row tiles of the packed A, into `c`.

    Args:
        c: The sums, `COLUMNS` a row.
        packed: All of A, see `max._kernels.matmul.pack_a`.
        tiles: How many row tiles it has.
        first_tile: The first to be multiplied.
        last_tile: After the last.
        panels: The panels from this one on.
        wide: Where a K block is widened.
        size: K.
        block: Elements of a K block.
        workers: How many panels further the next one is likely to be this worker's.
        t: The tiling.
    """
    stored = storage(k.target(), panels.dtype)
    # one block at least: it sets the sums to 0 where K is 0
    for n in range(k.max(k.ceildiv(size, block), 1)):
        begin = n * block
        length = k.min(block, size - begin)
        depth = k.ceildiv(length, t.pair)
        b = panels[0, begin * COLUMNS :].view(stored.lane)
        if stored.pair != t.pair:
            widen_block(wide, b, k.ceildiv(length, 2), panels.dtype, t)
        # what comes next is asked for while the first tile is multiplied
        last = begin + block >= size
        panel = k.min(workers, panels.shape[0] - 1) if last else k.i64(0)
        ahead = panels[panel, 0 if last else (begin + block) * COLUMNS :].view(stored.lane)
        for tile in range(first_tile, last_tile):
            sums = c[(tile - first_tile) * t.height * COLUMNS :]
            left = packed[(begin // t.pair * tiles + tile * round_up(depth, t.width)) * t.height :]
            for first in k.static_range(0, COLUMNS, 2 * t.width):
                right = wide if stored.pair != t.pair else b
                if tile == first_tile and first == 0:
                    multiply_tile(
                        sums, COLUMNS, left, 1, t.height, right, depth, n == 0, t, ahead, COLUMNS
                    )
                else:
                    multiply_tile(
                        sums[first:],
                        COLUMNS,
                        left,
                        1,
                        t.height,
                        right[first:],
                        depth,
                        n == 0,
                        t,
                        None,
                        COLUMNS,
                    )


@k.kernel
def matmul_panels(
    out: k.Output,
    a: k.Input,
    panels: k.Input,
    workspace: k.InOut,
    *extra: k.Input,
    ctx: k.Context,
    epilogue: Any = identity,
) -> None:
    """`out` `[M, N]` = `epilogue(a @ b)` from `a` `[M, K]` and the panels `[panels, elements]` of b."""
    options = tile_heights(tiling(ctx.target, a.dtype, panels.dtype))
    t = options[0]
    rows, size, columns = a.shape[0], a.shape[1], out.shape[1]
    c = ctx.scratch(t.sums, ((BLOCK_ROWS + MAX_TILE_ROWS) * COLUMNS,))
    wide = ctx.scratch(t.lane, (LANES_K * COLUMNS if t.lane == k.f32 else 1,))
    packed = workspace.view(t.lane)
    # K is cut into equal blocks of whole vectors
    blocks = k.max(k.ceildiv(size, LANES_K * t.pair), 1)
    block = k.max(round_up(k.ceildiv(size, blocks), STEP), STEP)
    # rows of an odd number of elements are not rows of pairs
    many = rows > FEW_ROWS or size % t.pair == 1
    height = k.i64(options[0].height)
    if round_up(rows, options[1].height) < round_up(rows, options[0].height):
        height = k.i64(options[1].height)
    tiles = k.ceildiv(rows, height)
    strips = k.ceildiv(columns, COLUMNS)
    row_blocks = k.i64(1)
    if many:
        for option in k.unroll(options):
            if height == option.height:
                for tile in ctx.parallel(tiles):
                    pack_a(packed, a, tile, tiles, block, option)
        ctx.barrier()
        # enough blocks for every worker, unless that makes them less than four tiles high
        wanted = k.ceildiv(4 * ctx.num_workers, k.max(strips, 1))
        least = k.max(k.ceildiv(rows, BLOCK_ROWS), 1)
        row_blocks = k.max(least, k.min(wanted, k.ceildiv(tiles, 4)))
    tiles_a_block = k.ceildiv(tiles, row_blocks)
    # few rows: panels one after the other, as long runs are read fastest
    run = k.i64(1) if many else k.max(strips // (4 * ctx.num_workers), 1)
    for row_block, strip in ctx.parallel((row_blocks, strips), grain=run):
        column = strip * COLUMNS
        here = k.min(COLUMNS, columns - column)
        mine = panels[strip:]
        row = k.i64(0)
        count = rows
        if many:
            first = row_block * tiles_a_block
            last = k.min(first + tiles_a_block, tiles)
            row = first * height
            count = k.min(last * height, rows) - row
            for option in k.unroll(options):
                if height == option.height:
                    many_rows(
                        c,
                        packed,
                        tiles,
                        first,
                        last,
                        mine,
                        wide,
                        size,
                        block,
                        ctx.num_workers,
                        option,
                    )
        else:
            i = k.i64(0)
            flat = a.reshape(rows * size)
            for at_once in k.unroll(FEW_AT_ONCE):
                while i + at_once <= rows:
                    for part in k.static_range(0, COLUMNS, 2 * t.width):
                        few_rows(
                            c[i * COLUMNS :],
                            flat[i * size :],
                            size,
                            mine[0],
                            part,
                            at_once,
                            t,
                        )
                    i += at_once
        for i in range(count):
            for j, mask in k.vectors(here, t.width):
                v = c.load(i * COLUMNS + j, width=t.width)
                result = epilogue(v, row + i, column + j, mask, extra)
                out.store(row + i, column + j, value=result, mask=mask)


def lower_pack(
    operands: Sequence[Operand], results: Sequence[Operand], by_rows: bool
) -> KernelCall:
    """The packing of a weight `[N, K]` where `by_rows`, else `[K, N]`."""
    args = (
        view("result", 0, results[0], static=False),
        view("operand", 0, operands[0], static=False),
    )
    return KernelCall(pack_panels, args, {"by_rows": by_rows})


def lower_matmul(operands: Sequence[Operand], results: Sequence[Operand]) -> KernelCall:
    """The product of x `[…, K]` and panels."""
    x, out = operands[0], results[0]
    last = len(x.shape) - 1
    rows, inner = product(x.shape[:last]), x.shape[last]
    workspace = Workspace(DType.float32, (rows + MAX_TILE_ROWS, inner + STEP + MAX_WIDTH))
    args = (
        view("result", 0, out, (range(last), (last,)), static=False),
        view("operand", 0, x, (range(last), (last,)), static=False),
        view("operand", 1, operands[1], static=False),
        view("workspace", 0, workspace, ((0, 1),), static=False),
    )
    return KernelCall(matmul_panels, args, epilogue=True, workspaces=(workspace,))
