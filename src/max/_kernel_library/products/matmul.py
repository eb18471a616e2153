"""Matrix multiplication with an epilogue, over weights as checkpoints store them.

One kernel, which branches on the number of rows M at run time:

- few rows: dot products over rows of B (or strips of columns), at the speed at which B is read;
- more: all workers pack A into a shared workspace, then take blocks of columns from the counter; each packs its strip of B
  into scratch that stays in the L1 cache and multiplies by register tiles, K block by K block.

Sums are f32 (f64 and integers: themselves); the epilogue sees them before they are stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from max import kernel as k
from max._kernel_library.lowering import Arg, KernelCall, Operand, Workspace, product, view
from max._kernel_library.tiles import amx_tiles
from max._kernel_library.tiles.register_tiles import (
    Tiling,
    dot_rows,
    multiply_columns,
    multiply_tile,
    pack_columns,
    pack_rows,
    tiling,
)
from max.dtype import DType

FEW_ROWS = 4
"""Up to so many times the rows multiplied at once B is not packed: dot products are as fast."""
FEW_COLUMNS = 32
"""Columns of a block then, which are rows of weights as checkpoints store them."""
LANES_K = 256
"""Lanes of a K block: a panel of B of two vectors' width then takes 32 KB (AVX-512) of the L1 cache."""
BLOCK_ROWS = 504
"""Most rows of a block, in whole tiles: its sums stay in the L2 cache."""
MAX_TILE_ROWS, MAX_WIDTH = 16, 16
"""What rows and k are filled up to at most when A is packed."""


@k.inline
def identity(v: Any, row: Any, col: Any, mask: Any, extra: Any) -> Any:
    """The epilogue that changes nothing."""
    return v


@k.inline
def round_up(a: Any, b: Any) -> Any:
    """The next multiple of `b`."""
    return (a + b - 1) // b * b


@k.inline
def few_rows(
    c: Any, stride: Any, a: Any, b: Any, columns: Any, transpose_b: bool, t: Tiling
) -> None:
    """A block of columns for all of the few rows of A, into `c`; `b` begins at the block."""
    for j in range(0, columns, 4 if transpose_b else 4 * t.width):
        i = k.i64(0)
        if transpose_b and t.few <= a.shape[0]:
            # what comes next is asked for while this is multiplied, which the hardware does not see coming
            dot_rows(c[j:], stride, a, b[j:], t.few, 1, True, t)
            i += t.few
        while i + t.few <= a.shape[0]:
            if transpose_b:
                dot_rows(c[i * stride + j :], stride, a[i:], b[j:], t.few, 1, False, t)
            else:
                multiply_columns(
                    c[i * stride + j :], stride, a[i:], b[:, j:], False, t.few, t.width
                )
            i += t.few
        while i < a.shape[0]:
            if transpose_b:
                dot_rows(c[i * stride + j :], stride, a[i:], b[j:], 1, 2, False, t)
            else:
                multiply_columns(c[i * stride + j :], stride, a[i:], b[:, j:], False, 1, t.width)
            i += 1


@k.inline
def pack_a(
    packed: Any, a: Any, tile: Any, tiles: Any, block: Any, by_tiles: bool, t: Tiling
) -> None:
    """Packs one row tile of A `[M, K]`: the K blocks one after the other, in each the row tiles.

    Where `by_tiles` they are matrix tiles.
    """
    for n in range(k.ceildiv(a.shape[1], block)):
        begin = n * block
        length = k.min(block, a.shape[1] - begin)
        depth = round_up(k.ceildiv(length, t.pair), t.width)
        start = (begin // t.pair * tiles + tile * depth) * t.height
        rows = a[tile * t.height :, begin : begin + length]
        if by_tiles:
            here = k.min(t.height, rows.shape[0])
            amx_tiles.copy_tiles(packed[start:].view(k.bf16), rows[:here])
        for r in k.static_range(0, 0 if by_tiles else t.height, t.width):
            if r == 0 or tile * t.height + r < a.shape[0]:
                pack_rows(packed[start + r :], t.height, rows[r:], min(t.width, t.height - r), t)


@k.inline
def many_rows(
    c: Any,
    stride: Any,
    packed: Any,
    tiles: Any,
    first_tile: Any,
    last_tile: Any,
    b: Any,
    panel: Any,
    size: Any,
    block: Any,
    columns: Any,
    workers: Any,
    transpose_b: bool,
    matrix_tiles: Any,
    by_tiles: bool,
    t: Tiling,
) -> None:
    """A block of columns for some row tiles of the packed A, into `c`; `b` begins at the block."""
    # one block at least: it sets the sums to 0 where K is 0
    for n in range(k.max(k.ceildiv(size, block), 1)):
        begin = n * block
        length = k.min(block, size - begin)
        depth = k.ceildiv(length, t.pair)
        if transpose_b:
            for column in range(0, columns, t.width):
                pack_rows(
                    panel[column:], 2 * t.width, b[column:, begin : begin + length], t.width, t
                )
        else:
            pack_columns(panel, b[begin : begin + length, :columns], 2, t)
        if by_tiles:
            amx_tiles.end_panel(panel, length)
            if transpose_b:
                # as below, before the products
                last = begin + block >= size
                ahead = b[2 * t.width * workers if last else 0 :, 0 if last else begin + block :]
                for row in range(2 * t.width):
                    for i in range(0, length, 32):
                        ahead.prefetch(row, i)
            steps = k.ceildiv(length, amx_tiles.DEPTH)
            for tile in range(first_tile, last_tile, 2):
                start = (begin // t.pair * tiles + tile * round_up(depth, t.width)) * t.height
                sums = c[(tile - first_tile) * t.height * stride :]
                left = packed[start:].view(k.bf16)
                for high in k.static_range(1, 3):
                    if (last_tile - tile == 1) == (high == 1):
                        amx_tiles.multiply_rows(
                            matrix_tiles, sums, left, panel.view(k.bf16), steps, n == 0, high, None,
                            0, 0,
                        )  # fmt: skip
        for tile in range(first_tile, first_tile if by_tiles else last_tile):
            start = (begin // t.pair * tiles + tile * round_up(depth, t.width)) * t.height
            sums = c[(tile - first_tile) * t.height * stride :]
            left = packed[start:]
            if transpose_b and tile == first_tile:
                # the next K block of these columns, or the first of those that are likely this worker's next
                last = begin + block >= size
                ahead = b[2 * t.width * workers if last else 0 :, 0 if last else begin + block :]
                multiply_tile(sums, stride, left, 1, t.height, panel, depth, n == 0, t, ahead)
            else:
                multiply_tile(sums, stride, left, 1, t.height, panel, depth, n == 0, t)


@k.kernel
def matmul(
    out: k.Output,
    a: k.Input,
    b: k.Input,
    workspace: k.InOut,
    *extra: k.Input,
    ctx: k.Context,
    transpose_b: bool = False,
    epilogue: Any = identity,
) -> None:
    """`out[batch * M, N] = epilogue(a[batch, M, K] @ b[batch, K, N])`; with `transpose_b`, `b` is `[batch, N, K]`."""
    t = tiling(ctx.target, a.dtype, b.dtype)
    by_tiles = amx_tiles.takes_tiles(ctx.target, t)
    if by_tiles:
        t = amx_tiles.of_tiles(t)
    most_rows = BLOCK_ROWS // t.height * t.height
    batches = a.shape[0]
    rows = a.shape[1]
    size = a.shape[2]
    columns = out.shape[1]
    c = ctx.scratch(t.sums, (most_rows * 2 * t.width,))
    panel = ctx.scratch(t.lane, (LANES_K * 2 * t.width,))
    packed = workspace.view(t.lane)

    many = rows > (0 if ctx.target.batch_invariant else FEW_ROWS * t.few)
    tiles = k.ceildiv(rows, t.height)
    # K is cut into equal blocks of whole vectors
    blocks = k.max(k.ceildiv(size, LANES_K * t.pair), 1)
    block = k.max(round_up(k.ceildiv(size, blocks), t.step), t.step)
    # lanes of one batch's packed A: rows and K are filled up to whole tiles and vectors
    packed_size = tiles * t.height * round_up(k.ceildiv(size, t.pair), t.width)
    stride = k.i64(FEW_COLUMNS if transpose_b else 4 * t.width)
    row_blocks = k.i64(1)
    matrix_tiles = k.matrix_tiles(amx_tiles.SHAPES)
    if many:
        for batch, tile in ctx.parallel((batches, tiles)):
            pack_a(packed[batch * packed_size :], a[batch], tile, tiles, block, by_tiles, t)
        ctx.barrier()
        if by_tiles:
            matrix_tiles.configure()
        stride = k.i64(2 * t.width)
        # enough blocks for every worker, unless that makes them less than four tiles high
        wanted = k.ceildiv(4 * ctx.num_workers, k.max(k.ceildiv(columns, stride) * batches, 1))
        row_blocks = k.max(k.ceildiv(rows, most_rows), k.min(wanted, k.ceildiv(tiles, 4)))
    tiles_a_block = k.ceildiv(tiles, row_blocks)

    shape = (batches, row_blocks, k.ceildiv(columns, stride))
    for batch, row_block, column_block in ctx.parallel(shape, grain=1):
        column = column_block * stride
        here = k.min(stride, columns - column)
        strip = b[batch, column:] if transpose_b else b[batch, :, column:]
        row = k.i64(0)
        count = rows
        if many:
            first = row_block * tiles_a_block
            last = k.min(first + tiles_a_block, tiles)
            row = first * t.height
            count = k.min(last * t.height, rows) - row
            mine = packed[batch * packed_size :]
            many_rows(
                c,
                stride,
                mine,
                tiles,
                first,
                last,
                strip,
                panel,
                size,
                block,
                here,
                ctx.num_workers,
                transpose_b,
                matrix_tiles,
                by_tiles,
                t,
            )
        else:
            few_rows(c, stride, a[batch], strip, here, transpose_b, t)
        for i in range(count):
            at = batch * rows + row + i
            for j, mask in k.vectors(here, t.width):
                v = c.load(i * stride + j, width=t.width)
                out.store(at, column + j, value=epilogue(v, at, column + j, mask, extra), mask=mask)
    if by_tiles:
        if many:
            matrix_tiles.release()


def _lower_matmul(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    x, y = operands
    rank_x, rank_y = len(x.shape), len(y.shape)
    out = view("result", 0, results[0], (range(rank_x - 1), (rank_x - 1,)), static=False)
    if rank_y == 2:
        a = view("operand", 0, x, ((), range(rank_x - 1), (rank_x - 1,)), static=False)
        b = view("operand", 1, y, ((), (0,), (1,)), static=False)
    else:
        batch = range(rank_x - 2)
        a = view("operand", 0, x, (batch, (rank_x - 2,), (rank_x - 1,)), static=False)
        b = view("operand", 1, y, (batch, (rank_y - 2,), (rank_y - 1,)), static=False)
    sums = (
        DType.float32
        if x.dtype.is_float() and max(x.dtype.size_in_bytes, y.dtype.size_in_bytes) < 4
        else _wider(x.dtype, y.dtype)
    )
    batches, rows, size = a.shape
    workspace = Workspace(sums, (product((batches, rows + MAX_TILE_ROWS, size + MAX_WIDTH)),))
    args = (out, a, b, view("workspace", 0, workspace, static=False))
    return KernelCall(
        matmul,
        args,
        {"transpose_b": bool(attributes.get("transpose_b", False))},
        epilogue=True,
        workspaces=(workspace,),
    )


def _wider(a: DType, b: DType) -> DType:
    return a if a.size_in_bytes >= b.size_in_bytes else b


LOWERINGS = {"mo.matmul": _lower_matmul}
__all__ = ["LOWERINGS", "Arg", "identity", "matmul"]
