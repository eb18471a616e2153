"""Products of row groups with the quantized weights of their experts, for a mixture of experts.

Packed weights store the strips expert after expert (`kernels.products.quantized.packed`). Rows are
rounded to 8 bits, as for other products with packed weights, and both paths compute the same sums:

- groups of up to `default_threshold` rows: packed lines are unpacked in registers;
- larger groups: strips are unpacked to bytes in scratch memory.

An unpacked weight is decoded to f32 in scratch memory, some rows at a time. Weights of experts without rows are not
read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from max import kernel as k
from max._backends.cpu.kernels.operand_checks import check_size
from max._backends.cpu.kernels.products.dense.grouped_panels import lower_grouped_panels
from max._backends.cpu.kernels.products.groups import (
    GroupOperands,
    Groups,
    few_rows_grain,
    group_at,
    read_groups,
    store_rows_of_no_group,
    store_zeros,
    zero_rows_of_no_group,
)
from max._backends.cpu.kernels.products.quantized import gemm_amx, qmatmul
from max._backends.cpu.kernels.products.quantized.activations import (
    TASK_BLOCKS,
    Rounded,
    block_of,
    round_block,
    row_of,
)
from max._backends.cpu.kernels.products.quantized.dequantize import decode_block
from max._backends.cpu.kernels.products.quantized.gemv import PackedStrip
from max._backends.cpu.kernels.products.quantized.packed import BLOCK, FORMATS
from max._backends.cpu.kernels.products.quantized.packed_matmul import (
    BLOCK_ROWS,
    default_threshold,
    gemm_strip,
    gemv_strip,
    quantized_scratch,
    tile_rows,
)
from max._backends.cpu.kernels.products.quantized.unpacking import (
    PackedWeight,
    QuantizedTiling,
    packed_weight,
    quantized_tiling,
)
from max._backends.cpu.kernels.tiles.strips import (
    COLUMNS,
    Parts,
    Results,
    further_results,
    identity_of_parts,
    store_strip,
)
from max._backends.kernel_call import KernelCall, Operand, Workspace, view
from max.dtype import DType
from max.dtype.blocks import BLOCK_FORMATS


@k.inline
def rounded_group(
    memory: k.View, first: k.Value, index: k.Value, rows: k.Value, blocks: k.Value, workspace_rows: k.Value, tile: int,
    t: QuantizedTiling,
) -> Rounded:  # fmt: skip
    """The rounded rows of a group: a single tile if it has few rows, otherwise tiles of `tile` rows.

    Args:
        memory: A workspace of f32: words, then scales, then zero sums of `workspace_rows` rows.
        first: The first row of the group.
        index: The index of the group.
        rows: The number of its rows.
        blocks: The number of blocks along k.
        workspace_rows: The number of rows of the workspace.
        tile: The number of rows of a tile.
        t: The tiling.
    """
    # each earlier group may have padded a tile
    base = (first // tile + index) * tile * blocks
    height = rows if rows <= default_threshold(k.target(), t) else k.i64(tile)
    scales, zero_sums = memory[workspace_rows * blocks * 8 :], memory[workspace_rows * blocks * 9 :]
    return Rounded(
        memory.view(k.i32)[base * 8 :],
        scales[base:],
        zero_sums[base * t.packed_format.parts :],
        height,
    )


@k.inline
def round_groups(
    x: k.View,
    memory: k.View,
    groups: Groups,
    workspace_rows: k.Value,
    tile: int,
    t: QuantizedTiling,
    ctx: k.Context,
) -> None:
    """Rounds the rows of all groups; a task rounds all rows of a group, or of one tile, in some blocks."""
    blocks = x.shape[1] // BLOCK
    shape = (
        groups.count,
        k.ceildiv(groups.max_rows, tile),
        k.ceildiv(blocks, TASK_BLOCKS),
    )
    for number, i, chunk in ctx.parallel(shape):
        group = group_at(groups, number)
        q = rounded_group(memory, group.first, number, group.rows, blocks, workspace_rows, tile, t)
        # a group of few rows is one tile; rows without an expert are not rounded
        if i * q.height < group.rows and group.expert >= 0:
            for b in range(chunk * TASK_BLOCKS, k.min((chunk + 1) * TASK_BLOCKS, blocks)):
                target = block_of(q, blocks * q.height, i, b, t.packed_format)
                for r in range(k.min(q.height, group.rows - i * q.height)):
                    row = x[group.first + i * q.height + r, b * BLOCK :]
                    round_block(row_of(target, r), row, t)
    ctx.barrier()


@k.kernel
def grouped_qmatmul_packed(
    out: k.Output,
    x: k.Input,
    w: k.Input,
    group_operands: GroupOperands,
    workspace: k.InOut,
    *extra: k.InOut,
    ctx: k.Context,
    weight: PackedWeight,
    parts: Parts,
    epilogue: Any = identity_of_parts,
) -> None:
    """The products of each row of group `g` with the strips of `experts[g]`; `w` `[strips, bytes]` stores the strips
    expert after expert.

    There is one part of one or two products (`kernels.tiles.strips`). Sums of rows outside all groups are
    0.
    """
    t = quantized_tiling(ctx.target, FORMATS[weight.encoding], weight.folds)
    in_tiles = ctx.target.tile_products
    tile = tile_rows(ctx.target)
    blocks = x.shape[1] // BLOCK
    strips = k.ceildiv(out.shape[1], COLUMNS // parts[0][0])
    groups = read_groups(group_operands, x.shape[0], w.shape[0] // k.max(strips, 1))
    # groups differ in rows: one launch takes both paths
    threshold = default_threshold(ctx.target, t)
    # each group may pad its last tile
    workspace_rows = x.shape[0] + (group_operands.experts.shape[0] + 1) * tile
    # a phase of its own: all workers read rows that one of them rounded
    round_groups(x, workspace, groups, workspace_rows, tile, t, ctx)
    memory = quantized_scratch(t, tile, in_tiles, ctx)
    matrix_tiles = k.matrix_tiles(gemm_amx.tile_shapes(t.packed_format))
    results = Results(out, extra, epilogue, t.width, parts)
    if in_tiles:
        if groups.max_rows > threshold:
            matrix_tiles.configure()
    grain = few_rows_grain(groups)
    for number, strip in ctx.parallel((groups.count, strips), grain=grain):
        group = group_at(groups, number)
        if group.expert < 0:
            store_zeros(results, memory.sums, BLOCK_ROWS, group.first, group.rows, strip)
        elif group.rows > 0:
            # strips of an expert follow each other: [experts, strips, bytes]
            packed = w[group.expert * strips + strip :]
            q = rounded_group(
                workspace, group.first, number, group.rows, blocks, workspace_rows, tile, t
            )
            if group.rows <= threshold:
                gemv_strip(
                    memory.sums, q, PackedStrip(packed, blocks, weight.locality), group.rows, t
                )
                store_strip(results, memory.sums, group.first, group.rows, strip)
            else:
                tiles = k.ceildiv(group.rows, tile)
                used = matrix_tiles if in_tiles else None
                for first in range(0, tiles, BLOCK_ROWS // tile):
                    last = k.min(first + BLOCK_ROWS // tile, tiles)
                    gemm_strip(memory, q, packed[0], blocks, first, last, tile, used, t)
                    rows = k.min(last * tile, group.rows) - first * tile
                    store_strip(results, memory.sums, group.first + first * tile, rows, strip)
    if in_tiles:
        if groups.max_rows > threshold:
            matrix_tiles.release()
    store_rows_of_no_group(results, memory.sums, BLOCK_ROWS, groups, x.shape[0], strips, ctx)


@k.kernel
def grouped_qmatmul(
    out: k.Output,
    x: k.Input,
    w: k.Input,
    group_operands: GroupOperands,
    ctx: k.Context,
    *,
    encoding: str,
) -> None:
    """`grouped_qmatmul_packed` for unpacked rows of blocks `w` `[experts, N, bytes]`; rows of `x` are not rounded."""
    elements, size = BLOCK_FORMATS[encoding]
    width = ctx.target.width(k.f32)
    decoded = ctx.scratch(k.f32, (qmatmul.COLUMNS, qmatmul.DEPTH))
    sums = ctx.scratch(k.f32, (qmatmul.ROWS, qmatmul.COLUMNS))
    inner = x.shape[1]
    check_size("the result", out.shape[0], x.shape[0])
    check_size("a weight", w.shape[1], out.shape[1])
    check_size("a row of a weight", w.shape[2], inner // elements * size)
    groups = read_groups(group_operands, x.shape[0], w.shape[0])
    strips = k.ceildiv(out.shape[1], qmatmul.COLUMNS)
    for number, strip in ctx.parallel((groups.count, strips), grain=1):
        group = group_at(groups, number)
        column = strip * qmatmul.COLUMNS
        for first in range(group.first, group.first + group.rows, qmatmul.ROWS):
            rows = k.min(group.first + group.rows - first, qmatmul.ROWS)
            for r in range(rows):
                for c in k.static_range(qmatmul.COLUMNS):
                    sums[r, c] = 0.0
            if group.expert >= 0:
                for begin in range(0, inner, qmatmul.DEPTH):
                    # decoded once for all rows of the pass
                    depth = k.min(inner - begin, qmatmul.DEPTH)
                    for c in k.static_range(qmatmul.COLUMNS):
                        # beyond the last column, decode it again (those results are discarded)
                        at = k.min(column + c, out.shape[1] - 1)
                        for b in range(depth // elements):
                            block = w[group.expert, at, (begin // elements + b) * size :]
                            decode_block(decoded[c, b * elements :], block, encoding)
                    for r in range(rows):
                        qmatmul.add_dots(sums[r:], x[first + r :, begin:], decoded, depth, 1, width)
            for r in range(rows):
                for c in k.static_range(qmatmul.COLUMNS):
                    if column + c < out.shape[1]:
                        out[first + r, column + c] = sums[r, c]
    zero_rows_of_no_group(out, groups, width, ctx)


def _operands(operands: Sequence[Operand]) -> tuple[Any, ...]:
    """Views of rows, weight, starts, experts and statistics."""
    return tuple(view("operand", i, operands[i], static=False) for i in range(5))


def _lower_grouped(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    """The call for `mo.grouped_qmatmul.ragged`."""
    encoding: str = attributes["encoding"]
    args = (view("result", 0, results[0], static=False), *_operands(operands))
    return KernelCall(grouped_qmatmul, args, {"encoding": encoding})


def _lower_packed(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    """The call for `mok.grouped_products`; a workspace holds the rounded rows. Dense weights have another kernel."""
    encoding: str = attributes["encoding"]
    if encoding not in FORMATS:
        return lower_grouped_panels(operands, results, attributes)
    rows, inner = operands[0].shape
    words = inner // BLOCK * (8 + 1 + FORMATS[encoding].parts)
    workspace_rows = rows + (operands[3].shape[0] + 1) * gemm_amx.TILE_ROWS
    workspace = Workspace(DType.float32, (workspace_rows * words,))
    args = (
        view("result", 0, results[0], static=False),
        *_operands(operands),
        view("workspace", 0, workspace, static=False),
        *further_results(results),
    )
    params = {
        "weight": packed_weight(encoding, attributes["streamed"], inner, target),
        "parts": attributes["parts"],
        "epilogue": identity_of_parts,
    }
    return KernelCall(grouped_qmatmul_packed, args, params, epilogue=True, workspaces=(workspace,))


LOWERINGS = {
    "mo.grouped_qmatmul.ragged": _lower_grouped,
    "mok.grouped_products": _lower_packed,
}
