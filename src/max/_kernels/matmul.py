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
from max._kernels.lowering import Arg, KernelCall, Operand, Workspace, product, view
from max._kernels.tiles import (
    accumulator_dtype,
    dot_rows,
    multiply_columns,
    multiply_tile,
    pack_columns,
    pack_rows,
    pair_size,
    tile_rows,
)
from max.dtype import DType

FEW_ROWS = 24
"""Up to so many rows B is not packed: dot products are as fast."""
LANES_K = 256
"""Lanes of a K block: a panel of B of two vectors' width then takes 32 KB (AVX-512) of the L1 cache."""
BLOCK_ROWS = 504
"""Most rows of a block, a multiple of each tile height: its sums stay in the L2 cache."""
MAX_TILE_ROWS, MAX_WIDTH = 12, 16
"""What rows and k are filled up to at most when A is packed."""


@k.inline
def identity(v: Any, row: Any, col: Any, mask: Any, extra: Any) -> Any:
    """The epilogue that changes nothing."""
    return v


@k.inline
def ceil_div(a: Any, b: Any) -> Any:
    """The quotient, rounded up."""
    return (a + b - 1) // b


@k.inline
def round_up(a: Any, b: Any) -> Any:
    """The next multiple of `b`."""
    return (a + b - 1) // b * b


@k.inline
def few_rows(
    c: Any,
    stride: Any,
    a: Any,
    b: Any,
    column: Any,
    columns: Any,
    rows: Any,
    transpose_b: bool,
    pair: int,
    lane_dtype: Any,
    width: int,
) -> None:
    """A block of columns for all of the few rows of A, into `c`."""
    if transpose_b:
        last = b.shape[0] - 1
        for j in range(0, columns, 4):
            i = k.i64(0)
            while i + 4 <= rows:
                dot_rows(
                    c,
                    i * stride + j,
                    stride,
                    a,
                    i,
                    b,
                    column + j,
                    last,
                    4,
                    lane_dtype,
                    pair,
                    width,
                    1,
                )
                i += 4
            while i < rows:
                dot_rows(
                    c,
                    i * stride + j,
                    stride,
                    a,
                    i,
                    b,
                    column + j,
                    last,
                    1,
                    lane_dtype,
                    pair,
                    width,
                    2,
                )
                i += 1
    else:
        i = k.i64(0)
        while i + 4 <= rows:
            multiply_columns(
                c, i * stride, stride, a, i, a.shape[1], b, 0, column, columns, False, 4, 4, width
            )
            i += 4
        while i < rows:
            multiply_columns(
                c, i * stride, stride, a, i, a.shape[1], b, 0, column, columns, False, 1, 4, width
            )
            i += 1


@k.inline
def many_rows(
    c: Any,
    stride: Any,
    packed: Any,
    panel: Any,
    b: Any,
    column: Any,
    columns: Any,
    blocks: Any,
    block: Any,
    size: Any,
    tiles: Any,
    first_tile: Any,
    last_tile: Any,
    transpose_b: bool,
    pair: int,
    width: int,
    height: int,
) -> None:
    """A block of columns for some row tiles of the packed A, into `c`; `block` and `blocks` are how k is cut."""
    for n in range(blocks):
        begin = n * block
        length = k.min(block, size - begin)
        depth = round_up(ceil_div(length, pair), width)
        if transpose_b:
            for half in range(2):
                pack_rows(
                    panel,
                    half * width,
                    2 * width,
                    b,
                    column + half * width,
                    b.shape[0] - 1,
                    begin,
                    length,
                    width,
                    pair,
                    width,
                )
        else:
            pack_columns(panel, 0, b, begin, length, column, columns, 2, pair, width)
        start = begin // pair * (tiles * height)
        for tile in range(first_tile, last_tile):
            row = (tile - first_tile) * height
            multiply_tile(
                c,
                row * stride,
                stride,
                packed,
                start + tile * height * depth,
                1,
                height,
                panel,
                0,
                ceil_div(length, pair),
                n == 0,
                height,
                2,
                width,
            )


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
    sum_dtype = accumulator_dtype(a.dtype, b.dtype)
    pair = pair_size(ctx.target, a.dtype, b.dtype)
    lane_dtype = k.i32 if pair == 2 else sum_dtype
    width = ctx.target.width(sum_dtype)
    height = tile_rows(ctx.target)
    batches = a.shape[0]
    rows = a.shape[1]
    size = a.shape[2]
    columns = out.shape[1]
    c = ctx.scratch(sum_dtype, (BLOCK_ROWS * 2 * width,))
    panel = ctx.scratch(lane_dtype, (LANES_K * 2 * width,))
    packed = workspace.view(lane_dtype)

    many = rows > FEW_ROWS
    tiles = ceil_div(rows, height)
    # lanes of one batch's packed A: rows and k are filled up to whole tiles and vectors
    packed_size = tiles * height * round_up(ceil_div(size, pair), width)
    blocks = k.max(ceil_div(size, LANES_K * pair), 1)
    block = round_up(ceil_div(size, blocks), width * pair)
    column_step = k.i64(4 * width) if not transpose_b else k.i64(32)
    row_blocks = k.i64(1)
    if many:
        for batch, tile in ctx.parallel((batches, tiles)):
            for n in range(blocks):
                begin = n * block
                length = k.min(block, size - begin)
                depth = round_up(ceil_div(length, pair), width)
                start = (
                    batch * packed_size + begin // pair * (tiles * height) + tile * height * depth
                )
                for r in k.static_range(0, height, width):
                    pack_rows(
                        packed,
                        start + r,
                        height,
                        a[batch],
                        tile * height + r,
                        rows - 1,
                        begin,
                        length,
                        min(width, height - r),
                        pair,
                        width,
                    )
        ctx.barrier()
        column_step = k.i64(2 * width)
        # enough blocks for every worker, unless that makes them less than four tiles high
        wanted = ceil_div(4 * ctx.num_workers, k.max(ceil_div(columns, column_step) * batches, 1))
        row_blocks = k.max(ceil_div(rows, BLOCK_ROWS), k.min(wanted, ceil_div(tiles, 4)))
    tiles_a_block = ceil_div(tiles, row_blocks)

    for batch, row_block, column_block in ctx.parallel(
        (batches, row_blocks, ceil_div(columns, column_step)), grain=1
    ):
        column = column_block * column_step
        here = k.min(column_step, columns - column)
        row = k.i64(0)
        count = rows
        if many:
            first_tile = row_block * tiles_a_block
            last_tile = k.min(first_tile + tiles_a_block, tiles)
            row = first_tile * height
            count = k.min(last_tile * height, rows) - row
            mine = packed[batch * packed_size : (batch + 1) * packed_size]
            many_rows(
                c,
                column_step,
                mine,
                panel,
                b[batch],
                column,
                here,
                blocks,
                block,
                size,
                tiles,
                first_tile,
                last_tile,
                transpose_b,
                pair,
                width,
                height,
            )
        else:
            few_rows(
                c,
                column_step,
                a[batch],
                b[batch],
                column,
                here,
                rows,
                transpose_b,
                pair,
                lane_dtype,
                width,
            )
        for i in range(count):
            at = batch * rows + row + i
            for j, mask in k.vectors(here, width):
                v = epilogue(c.load(i * column_step + j, width=width), at, column + j, mask, extra)
                out.store(at, column + j, value=v, mask=mask)


def _lower_matmul(
    operands: Sequence[Operand], results: Sequence[Operand], attributes: Mapping[str, Any]
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
