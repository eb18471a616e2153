"""Products of row groups with the unpacked dense weights of their experts.

Groups of few rows are multiplied row by row, limited by memory bandwidth. A task of a larger group packs a strip of
the weight and multiplies all rows of the group by it; see `kernels.products.dense.matmul` for the budgets.
Weights of experts without rows are not read::

    workspace   [group][K block][row tile][lanes][height]     the rows of large groups, packed by all workers
    task        a group × 32 columns
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from max import kernel as k
from max._backends.cpu.kernels.operand_checks import check_size
from max._backends.cpu.kernels.products.blocking import FOLDED_SIZE, LANES_K, is_long
from max._backends.cpu.kernels.products.dense.matmul import (
    BLOCK_ROWS,
    GEMV_PASSES,
    MAX_TILE_ROWS,
    MAX_WIDTH,
    PackedRows,
    Strip,
    gemm_block,
    pack_row_tile,
)
from max._backends.cpu.kernels.products.dense.unpacked_gemv import (
    DOT_PIECE,
    multiply_long_rows_of_b,
    multiply_rows_of_b,
)
from max._backends.cpu.kernels.products.groups import (
    GroupOperands,
    Groups,
    group_at,
    read_groups,
    zero_rows_of_no_group,
)
from max._backends.cpu.kernels.tiles import amx_tiles
from max._backends.cpu.kernels.tiles.tiling import Matrix, Tiling, round_up, tiling
from max._backends.kernel_call import KernelCall, Operand, Workspace, view
from max.dtype import DType

COLUMNS = 32
"""The number of columns of a task."""


@k.inline
def pack_groups(
    packed: k.View,
    x: k.View,
    groups: Groups,
    limit: k.Value,
    block: k.Value,
    in_tiles: bool,
    t: Tiling,
    ctx: k.Context,
) -> None:
    """Packs the rows of all groups with more than `limit` rows; see `pack_row_tile`."""
    lanes = round_up(k.ceildiv(x.shape[1], t.pair), t.width)
    for number, tile in ctx.parallel((groups.count, k.ceildiv(groups.max_rows, t.height))):
        group = group_at(groups, number)
        # rows of groups without an expert are not packed
        if group.rows > limit and tile * t.height < group.rows and group.expert >= 0:
            rows = x[group.first : group.first + group.rows]
            # each earlier group may have padded one tile: `number` tiles more than the rows need
            base = (group.first // t.height + number) * t.height * lanes
            tiles = k.ceildiv(group.rows, t.height)
            pack_row_tile(packed[base:], rows, tile, tiles, block, in_tiles, t)


@k.inline
def store_block(
    out: k.View,
    c: k.View,
    stride: k.Value,
    row: k.Value,
    rows: k.Integer,
    column: k.Value,
    columns: k.Integer,
    width: int,
) -> None:
    """Stores sums with `stride` elements per row."""
    for i in range(rows):
        for j, mask in k.vectors(columns, width):
            v = c.load(i * stride + j, width=width)
            out.store(row + i, column + j, value=v, mask=mask)


@k.kernel
def grouped_matmul(
    out: k.Output,
    x: k.Input,
    w: k.Input,
    group_operands: GroupOperands,
    workspace: k.InOut,
    ctx: k.Context,
    *,
    any_size: bool,
) -> None:
    """`out[i] = w[experts[g]] @ x[i]` for each row `i` of group `g`; `x` is `[M, K]`, `w` `[experts, N, K]`. Rows
    outside all groups are 0. Without `any_size`, K is at most `FOLDED_SIZE`.
    """
    t = tiling(ctx.target, x.dtype, w.dtype)
    in_tiles = amx_tiles.takes_tiles(ctx.target, t)
    if in_tiles:
        t = amx_tiles.with_tile_height(t)
    max_rows = BLOCK_ROWS // t.height * t.height
    size, columns = x.shape[1], out.shape[1]
    # on the GEMV path the sums of a task, then those of a piece along k
    part_at = GEMV_PASSES * t.gemv_rows * COLUMNS
    c = ctx.scratch(t.sums, (max(max_rows * 2 * t.width, 2 * part_at),))
    part = amx_tiles.part_memory(ctx) if in_tiles and any_size else None
    panel = ctx.scratch(t.lane, (LANES_K * 2 * t.width,))
    packed = workspace.view(t.lane)
    check_size("the result", out.shape[0], x.shape[0])
    check_size("a weight", w.shape[1], columns)
    check_size("a row of a weight", w.shape[2], size)
    groups = read_groups(group_operands, x.shape[0], w.shape[0])
    # batch-invariant: the path of a row must not depend on its group's other rows
    limit = 0 if ctx.target.batch_invariant else GEMV_PASSES * t.gemv_rows
    # equal K blocks of whole steps, as `matmul` cuts them
    blocks = k.max(k.ceildiv(size, LANES_K * t.pair), 1)
    block = k.max(round_up(k.ceildiv(size, blocks), t.step), t.step)
    lanes = round_up(k.ceildiv(size, t.pair), t.width)
    matrix_tiles = k.matrix_tiles(amx_tiles.SHAPES)
    if groups.max_rows > limit:
        pack_groups(packed, x, groups, limit, block, in_tiles, t, ctx)
        # all workers read the packed rows of all groups
        ctx.barrier()
        if in_tiles:
            matrix_tiles.configure()

    for number, strip in ctx.parallel((groups.count, k.ceildiv(columns, COLUMNS)), grain=1):
        group = group_at(groups, number)
        column = strip * COLUMNS
        count = k.min(columns - column, COLUMNS)
        # a group without an expert: its rows are 0
        if group.expert < 0:
            for i in range(group.rows):
                for j, mask in k.vectors(count, t.width):
                    zero = k.splat(k.f32(0), t.width)
                    out.store(group.first + i, column + j, value=zero, mask=mask)
        elif group.rows > limit:
            tiles = k.ceildiv(group.rows, t.height)
            base = (group.first // t.height + number) * t.height * lanes
            for j in range(0, count, 2 * t.width):
                width = k.min(count - j, 2 * t.width)
                right = Strip(
                    w[group.expert, column + j :], True, width, panel, size, block, 2 * t.width,
                    any_size and size > FOLDED_SIZE, part,
                )  # fmt: skip
                for first in range(0, tiles, max_rows // t.height):
                    last = k.min(first + max_rows // t.height, tiles)
                    left = PackedRows(packed[base:], tiles, first, last)
                    used = matrix_tiles if in_tiles else None
                    gemm_block(Matrix(c, 2 * t.width), left, right, used, t)
                    done = first * t.height
                    rows = k.min(last * t.height, group.rows) - done
                    store_block(
                        out, c, 2 * t.width, group.first + done, rows, column + j, width, t.width
                    )
        elif group.rows > 0:
            rows = x[group.first : group.first + group.rows]
            right_rows = w[group.expert, column:]
            # long dot products are cut, so that the error does not grow with K
            if any_size and size > DOT_PIECE:
                multiply_long_rows_of_b(c, k.i64(COLUMNS), rows, right_rows, count, c[part_at:], t)
            else:
                multiply_rows_of_b(Matrix(c, COLUMNS), rows, right_rows, count, t)
            store_block(out, c, COLUMNS, group.first, group.rows, column, count, t.width)
    if in_tiles:
        if groups.max_rows > limit:
            matrix_tiles.release()
    zero_rows_of_no_group(out, groups, t.width, ctx)


def lower_grouped(operands: Sequence[Operand], results: Sequence[Operand]) -> KernelCall:
    """The launch of `grouped_matmul`.

    Args:
        operands: Rows, weights, starts, experts, statistics.
        results: The result.
    """
    x, w = operands[:2]
    rows, size = x.shape
    height = MAX_TILE_ROWS
    # each group may pad its last tile, and each row its last vector
    shape = ((rows + (operands[3].shape[0] + 1) * height) * (size + MAX_WIDTH),)
    workspace = Workspace(DType.float32, shape)
    args = (
        view("result", 0, results[0], static=False),
        view("operand", 0, x, static=False),
        view("operand", 1, w, static=False),
        *(view("operand", i, operands[i], static=False) for i in (2, 3, 4)),
        view("workspace", 0, workspace, static=False),
    )
    return KernelCall(grouped_matmul, args, {"any_size": is_long(size)}, workspaces=(workspace,))


def _lower_grouped(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    """The call for `mo.grouped_matmul.ragged`."""
    return lower_grouped(operands, results)


LOWERINGS = {"mo.grouped_matmul.ragged": _lower_grouped}
