"""Integer products with packed quantized weights: rows of x are rounded to 8 bits, with a scale per 32 adjacent
elements.

One kernel, which branches on the number of rows at run time:

- GEMV path, up to the row threshold: packed lines are unpacked in registers (`gemv`);
- GEMM path: strips of 32 columns are unpacked to bytes in scratch memory and multiplied by all rows of a task
  (`gemm`, `gemm_amx`).

The sums of a block of 32 are exact integers; blocks are added in f32 in the order of k, independent of the number of
workers. Results therefore do not depend on the path.

Cache budget of the GEMM path: the unpacked panel of a strip (`PANEL` × 1 KB, half of that if it includes signs) in
the L1 cache; the sums of a task (`BLOCK_ROWS` × 32 × 4 bytes, 30 KB) and its rounded rows in the L2 cache. Register
tiles are 6 or 4 rows by two vectors, see `gemm.multiply_strip`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from max import kernel as k
from max._backends.cpu.kernels.products.quantized import gemm_amx
from max._backends.cpu.kernels.products.quantized.activations import (
    SMALL_WORDS,
    Rounded,
    block_of,
    round_rows,
    row_of,
)
from max._backends.cpu.kernels.products.quantized.gemm import (
    Ahead,
    multiply_strip,
    prefetched_lines,
)
from max._backends.cpu.kernels.products.quantized.gemv import (
    PackedStrip,
    gemv_packed,
    gemv_pair,
)
from max._backends.cpu.kernels.products.quantized.packed import BLOCK, FORMATS
from max._backends.cpu.kernels.products.quantized.tuning import tuning_of
from max._backends.cpu.kernels.products.quantized.unpacking import (
    PackedWeight,
    QuantizedTiling,
    UnpackedStrip,
    packed_weight,
    panel_blocks,
    quantized_tiling,
    unpack_strip,
)
from max._backends.cpu.kernels.products.row_norms import (
    SMALL_WORKERS,
    Norm,
    NormOperands,
    is_small,
    norm_arguments,
    normalize,
)
from max._backends.cpu.kernels.tiles.adapter_terms import (
    Next,
    Terms,
    has_terms,
    next_sites,
    terms_arguments,
)
from max._backends.cpu.kernels.tiles.strips import (
    CACHE_LINE,
    COLUMNS,
    Parts,
    Results,
    further_results,
    identity,
    identity_of_parts,
    prefetch_adapters,
    store_strip,
)
from max._backends.cpu.kernels.tiles.tiling import round_up
from max._backends.kernel_call import KernelCall, Limit, Operand, Workspace, product, view
from max.dtype import DType

BLOCK_ROWS = 240
"""The maximum number of rows of a task, a multiple of each tile height."""
MAX_TILE_ROWS = 6
"""The number of rows of a tile with 32 registers."""
MIN_TILE_ROWS = 4
"""The number of rows of a tile with 16 registers; its sums in f32 are spilled."""


def tile_rows(target: k.Target) -> int:
    """The number of rows of a tile of the GEMM path on a target."""
    if target.tile_products:
        return gemm_amx.TILE_ROWS
    return MAX_TILE_ROWS if target.registers >= 32 else MIN_TILE_ROWS


@k.inline
def panel_length(blocks: k.Value, t: QuantizedTiling, matrix_tiles: bool) -> Any:
    """The number of blocks of a panel, for a strip of `blocks` blocks.

    If panels are prefetched, they have equal lengths, so that each tile prefetches a share of the next one.
    """
    max_blocks = panel_blocks(t, matrix_tiles)
    if not prefetched_lines(t) or matrix_tiles or t.folds:
        return max_blocks
    else:
        panels = k.max(k.ceildiv(blocks, max_blocks), 1)
        return k.max(
            round_up(k.ceildiv(blocks, panels), t.packed_format.span), t.packed_format.span
        )


def default_threshold(target: k.Target, t: QuantizedTiling) -> int:
    """The default row threshold for the GEMV path on a target."""
    tuning = tuning_of(target)
    thresholds = tuning.tile_row_thresholds if target.tile_products else tuning.row_thresholds
    return thresholds[t.packed_format.bits]


class QuantizedOperands(NamedTuple):
    """The operands of a product.

    Args:
        x: The activation, `[M, K]`.
        w: The packed groups of the weight, `[groups, bytes]`.
        workspace: The rounded activation; see `kernels.products.quantized.activations`.
    """

    x: k.Input
    w: k.Input
    workspace: k.InOut


class Scratch(NamedTuple):
    """Scratch memory of a worker: sums, a panel of unpacked blocks, exact sums of matrix tiles."""

    sums: Any
    strip: UnpackedStrip
    exact: Any


@k.inline
def quantized_scratch(t: QuantizedTiling, tile: int, matrix_tiles: bool, ctx: k.Context) -> Scratch:
    """The scratch memory of a launch."""
    packed_format, blocks = t.packed_format, panel_blocks(t, matrix_tiles)
    splits_signs = t.splits_signs and not matrix_tiles
    sums = ctx.scratch(k.f32, (BLOCK_ROWS * COLUMNS,))
    elements = ctx.scratch(k.u8, (blocks * BLOCK * COLUMNS,))
    scales = ctx.scratch(k.f32, (blocks * packed_format.parts * COLUMNS,))
    offsets = ctx.scratch(
        k.f32, (blocks * packed_format.parts * COLUMNS if packed_format.affine else 1,)
    )
    signs = ctx.scratch(k.i8, (blocks * BLOCK * COLUMNS if splits_signs else 1,))
    corrections = ctx.scratch(k.i32, (blocks * COLUMNS if splits_signs else 1,))
    strip = UnpackedStrip(elements, scales, offsets, signs, corrections)
    exact = (gemm_amx.GROUP * packed_format.parts * tile, COLUMNS) if matrix_tiles else (1, 1)
    return Scratch(sums, strip, ctx.scratch(k.i32, exact))


@k.outlined
def gemv_pass(c: k.View, q: Rounded, strip: PackedStrip, count: int, t: QuantizedTiling) -> None:
    """Multiplies `count` rows by a strip."""
    # all columns at once, so that it is read in the order of its addresses; vectors of 4 lanes were not measured
    vectors = 2 if count > 1 and t.width == 4 else COLUMNS // t.width
    for first in range(0, COLUMNS, vectors * t.width):
        gemv_packed(c, q, strip, first, count, vectors, t)


@k.outlined
def gemv_strip(
    c: k.View, q: Rounded, strip: PackedStrip, rows: k.Value, t: QuantizedTiling
) -> None:
    """Multiplies all rows by a strip, in passes."""
    i = k.i64(0)
    for count in k.unroll(t.passes):
        while i + count <= rows:
            gemv_pass(c[i * COLUMNS :], row_of(q, i), strip, count, t)
            i += count


def most_paired_rows(t: QuantizedTiling) -> int:
    """The most rows whose passes all read two strips in turn; the sums of two strips must have room."""
    return BLOCK_ROWS // 2 if all(t.turns) else sum(1 for turn in t.turns if turn)


@k.inline
def gemv_strips(
    c: k.View, q: Rounded, strip: PackedStrip, rows: k.Value, t: QuantizedTiling
) -> None:
    """Multiplies up to `most_paired_rows` rows by a strip and by the next one, whose sums follow, in passes."""
    i = k.i64(0)
    for count in k.unroll(t.passes):
        if t.turns[count - 1]:
            while i + count <= rows:
                gemv_pair(c[i * COLUMNS :], rows * COLUMNS, row_of(q, i), strip, count, t)
                i += count


@k.outlined
def gemm_strip(
    memory: Scratch, q: Rounded, packed: k.View, blocks: k.Value, first_tile: k.Integer, last_tile: k.Integer,
    tile: int, tiles: Any, t: QuantizedTiling,
) -> None:  # fmt: skip
    """Multiplies row tiles by a strip.

    Args:
        memory: Scratch memory.
        q: The rounded rows.
        packed: The packed bytes of the strip.
        blocks: The number of blocks along k.
        first_tile: The index of the first tile.
        last_tile: The index after the last tile.
        tile: The number of rows of a tile.
        tiles: The matrix tiles; None: register tiles are used.
        t: The tiling.
    """
    c, width = memory.sums, t.width
    packed_format = t.packed_format
    panel = panel_length(blocks, t, tiles is not None)
    panel_bytes = panel // packed_format.span * packed_format.unit_bytes
    for i in range(0, (last_tile - first_tile) * tile * COLUMNS, width):
        c.store(i, value=k.splat(k.f32(0), width))
    for number in range(k.ceildiv(blocks, panel)):
        begin = number * panel
        length = k.min(panel, blocks - begin)
        # matrix tiles multiply signed bytes: their zero point is subtracted here
        zero = packed_format.zero if tiles is not None else t.element_offset
        splits_signs = t.splits_signs and tiles is None
        unpack_strip(memory.strip, packed, begin, length, zero, t, splits_signs)
        # each register tile prefetches a share of the next panel, which may belong to the next strip
        ahead = (begin + length) // packed_format.span * packed_format.unit_bytes
        last_ahead = ahead + panel_bytes
        share = length * (prefetched_lines(t) * CACHE_LINE)
        for i in range(first_tile, last_tile):
            rounded = block_of(q, blocks * q.height, i, begin, t.packed_format)
            sums = c[(i - first_tile) * tile * COLUMNS :]
            if tiles is not None:
                gemm_amx.multiply_strip_amx(
                    tiles, sums, memory.exact, rounded, memory.strip, length, t
                )
            else:
                for first in range(0, COLUMNS, 2 * width):
                    # prefetches end with the next panel
                    further = Ahead(packed, k.min(ahead, last_ahead))
                    multiply_strip(sums, rounded, memory.strip, length, first, tile, further, t)
                    ahead += share


@k.inline
def multiply_quantized(
    results: Results, operands: QuantizedOperands, row_threshold: k.Value, locality: int,
    t: QuantizedTiling, ctx: Any,
) -> None:  # fmt: skip
    """The products of a launch; see `qmatmul_packed`."""
    x, w, workspace = operands
    packed_format = t.packed_format
    in_tiles = ctx.target.tile_products
    tile = tile_rows(ctx.target)
    rows, strips, inner = x.shape[0], w.shape[0], x.shape[1]
    blocks = inner // BLOCK
    # the sums of the GEMV path have room for `BLOCK_ROWS` rows
    gemm = rows > k.min(row_threshold, BLOCK_ROWS)
    # on the GEMV path all rows form one tile
    height = k.i64(tile) if gemm else rows
    # each worker rounds a small activation itself, without a barrier
    small = not gemm and is_small(rows * inner, ctx)
    q = round_rows(x, workspace, height, small, t, ctx)
    memory = quantized_scratch(t, tile, in_tiles, ctx)
    matrix_tiles = k.matrix_tiles(gemm_amx.tile_shapes(packed_format))
    tiles = k.ceildiv(rows, k.max(height, 1))
    row_blocks = k.i64(1)
    if gemm:
        if in_tiles:
            matrix_tiles.configure()
        # at least four tasks per worker, unless a task would have fewer than four tiles
        min_blocks = k.ceildiv(4 * ctx.num_workers, k.max(strips, 1))
        row_blocks = k.max(k.ceildiv(rows, BLOCK_ROWS), k.min(min_blocks, k.ceildiv(tiles, 4)))
    task_tiles = k.ceildiv(tiles, row_blocks)
    # chunks of several strips, as the next strip is prefetched; single strips where many rows make tasks long
    runs = row_blocks == 1 if prefetched_lines(t) else False
    grain = k.i64(1) if gemm and not runs else k.i64(0)
    # strips of a task of the GEMV path
    together = k.i64(1)
    if most_paired_rows(t):
        if not gemm and rows <= most_paired_rows(t):
            together = k.i64(2)
    for row_block, task in ctx.parallel((row_blocks, k.ceildiv(strips, together)), grain=grain):
        strip = task * together
        groups = w[strip:]
        row = k.i64(0)
        count = rows
        if gemm:
            first_tile = row_block * task_tiles
            last_tile = k.min(first_tile + task_tiles, tiles)
            row = first_tile * tile
            count = k.min(last_tile * tile, rows) - row
            used_tiles = matrix_tiles if in_tiles else None
            gemm_strip(memory, q, groups[0], blocks, first_tile, last_tile, tile, used_tiles, t)
        else:
            packed = PackedStrip(groups, blocks, locality)
            prefetch_adapters(results, row, rows, strip)
            if most_paired_rows(t):
                if strip + 1 < strips and together > 1:
                    prefetch_adapters(results, row, rows, strip + 1)
                    gemv_strips(memory.sums, q, packed, rows, t)
                    store_strip(results, memory.sums[rows * COLUMNS :], row, rows, strip + 1)
                else:
                    gemv_strip(memory.sums, q, packed, rows, t)
            else:
                gemv_strip(memory.sums, q, packed, rows, t)
        store_strip(results, memory.sums, row, count, strip)
    if in_tiles:
        if gemm:
            matrix_tiles.release()


@k.kernel
def qmatmul_packed(
    out: k.Output,
    operands: QuantizedOperands,
    row_threshold: k.i64,  # pyright: ignore
    *extra: k.InOut,
    ctx: k.Context,
    weight: PackedWeight,
    parts: Parts = (),
    epilogue: Any = identity,
) -> None:
    """`out` `[M, N]` = `epilogue(x wᵀ)`.

    Up to `row_threshold` rows take the GEMV path. With `parts` there are several products; see
    `kernels.tiles.strips`.
    """
    t = quantized_tiling(ctx.target, FORMATS[weight.encoding], weight.folds)
    results = Results(out, extra, epilogue, t.width, parts)
    multiply_quantized(results, operands, row_threshold, weight.locality, t, ctx)


@k.kernel
def qmatmul_normalized(
    out: k.Output,
    operands: QuantizedOperands,
    norm_operands: NormOperands,
    row_threshold: k.i64,  # pyright: ignore
    *extra: k.InOut,
    ctx: k.Context,
    weight: PackedWeight,
    norm: Norm,
    parts: Parts = (),
    epilogue: Any = identity,
) -> None:
    """`qmatmul_packed` on the RMS norm of `x`; see `kernels.products.row_norms`."""
    rows = normalize(operands.x, norm_operands, norm, ctx)
    t = quantized_tiling(ctx.target, FORMATS[weight.encoding], weight.folds)
    results = Results(out, extra, epilogue, t.width, parts)
    multiply_quantized(results, operands._replace(x=rows), row_threshold, weight.locality, t, ctx)


@k.kernel
def qmatmul_adapted(
    out: k.Output,
    operands: QuantizedOperands,
    terms: Terms,
    row_threshold: k.i64,  # pyright: ignore
    *extra: k.InOut,
    ctx: k.Context,
    weight: PackedWeight,
    parts: Parts,
    after: Next | None,
    epilogue: Any = identity_of_parts,
) -> None:
    """`qmatmul_packed` with the terms of adapters; see `kernels.tiles.adapter_terms`."""
    t = quantized_tiling(ctx.target, FORMATS[weight.encoding], weight.folds)
    results = Results(out, extra, epilogue, t.width, parts, terms, after)
    multiply_quantized(results, operands, row_threshold, weight.locality, t, ctx)


def lower_matmul(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    """The launch of a product of x `[…, K]`, or of its norm, with packed weights; with `parts` of several products.

    Four more operands are those of `Terms`.
    """
    encoding: str = attributes["encoding"]
    parts: Parts = attributes.get("parts", ())
    t = quantized_tiling(target, FORMATS[encoding])
    x, out = operands[0], results[0]
    last = len(x.shape) - 1
    inner = x.shape[last]
    rows = product(x.shape[:last])
    # per block and row: 32 bytes of elements, a scale, a sum for each part
    words = inner // BLOCK * (8 + 1 + FORMATS[encoding].parts)
    size = (rows + gemm_amx.TILE_ROWS) * words + SMALL_WORKERS * SMALL_WORDS
    workspace = Workspace(DType.float32, (size,))
    norm_args, norm_params, memory = norm_arguments(operands, attributes, 1)
    args = (
        view("result", 0, out, (range(last), (last,)), static=False),
        view("operand", 0, x, (range(last), (last,)), static=False),
        view("operand", 1, operands[1], static=False),
        view("workspace", 0, workspace, static=False),
        *norm_args,
        *terms_arguments(operands),
        Limit(f"{encoding}, k {inner}", default_threshold(target, t), BLOCK_ROWS, rows),
        *further_results(results),
    )
    weight = packed_weight(encoding, attributes["streamed"], inner, target)
    params: dict[str, Any] = {"weight": weight, **norm_params}
    if parts:
        params |= {"parts": parts, "epilogue": identity_of_parts}
    kernel = qmatmul_normalized if memory else qmatmul_packed
    if has_terms(operands):
        kernel = qmatmul_adapted
        params["after"] = next_sites(attributes)
    return KernelCall(kernel, args, params, epilogue=True, workspaces=(workspace, *memory))
