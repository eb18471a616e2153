"""Matrix multiplication with an epilogue, for unpacked operands: graph inputs and intermediate results.

One kernel, which branches on the number of rows M at run time:

- GEMV path: B is read in place, in long runs, limited by memory bandwidth. For B `[N, K]` it computes dot products with
  rows of B; for B `[K, N]` it accumulates rows of B. A large B is split into slices along k, whose sums are then added;
- GEMM path: all workers pack A into a shared workspace. Then each worker takes blocks of columns from a counter, packs
  its strip of B into scratch memory and multiplies by register tiles, K block by K block::

      workspace   [batch][K block][row tile][lanes][height]   all of A, packed by all workers
      panel       [lanes][2 vectors]                          a K block of a strip, packed by the worker that uses it

Register budget: GEMM, see `kernels.tiles.tiling.Tiling`; GEMV, see `dot_rows`, `dot_rows_in_order` and
`add_row_products` in `kernels.tiles.micro_kernels`. Cache budget: the panel (32 KB) stays in the L1 cache,
a K block of the row tiles and the sums of a task (504 × 32 × 4 bytes, 63 KB) in the L2 cache. Sums are f32 (for f64 and
integers: the same dtype); the epilogue is applied before they are stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from max import kernel as k
from max._backends.cpu.kernels.products.blocking import FOLDED_SIZE, LANES_K
from max._backends.cpu.kernels.products.dense.unpacked_gemv import (
    DOT_PIECE,
    multiply_long_rows_of_b,
    multiply_long_runs,
    multiply_rows_of_b,
    multiply_runs,
)
from max._backends.cpu.kernels.tiles import amx_tiles
from max._backends.cpu.kernels.tiles.micro_kernels import multiply_tile
from max._backends.cpu.kernels.tiles.packing import pack_columns, pack_rows
from max._backends.cpu.kernels.tiles.strips import identity
from max._backends.cpu.kernels.tiles.tiling import Matrix, Tiling, round_up, tiling
from max._backends.kernel_call import Dims, KernelCall, Operand, Workspace, product, view
from max.dtype import DType

GEMV_PASSES = 4
"""The maximum number of passes of the GEMV path; with more, packing B is faster than further dot products."""
GEMV_COLUMNS = 32
"""Columns of a GEMV task if B is `[N, K]`, the layout of checkpoints."""
RUN = 4096
"""The maximum number of columns of a slice task: its sums and one run of each stream fit the caches."""
SLICES, SLICE_ROWS, SLICE_BYTES = 16, 48, 1 << 17
"""The maximum number of slices of B along k, and the minimum rows and bytes of each, so that adding sums is cheap."""
SUM_COLUMNS = 256
"""The maximum number of columns of a task that adds slices, or multiplies B along all of k."""
BLOCK_ROWS = 504
"""The maximum number of rows of a task, in whole tiles: its sums stay in the L2 cache."""
MAX_TILE_ROWS, MAX_WIDTH = 16, 16
"""The maximum tile height and vector width, to whose multiples packed A is padded."""


class PackedRows(NamedTuple):
    """Row tiles of one batch of A.

    Args:
        elements: Packed lanes in the order [K block][row tile].
        tiles: The number of row tiles of the batch.
        first: The first row tile of the task.
        last: The row tile after the last one of the task.
    """

    elements: Any
    tiles: Any
    first: Any
    last: Any


class Strip(NamedTuple):
    """A strip of B, two vectors of columns wide.

    Args:
        elements: B from the strip's first column on, `[K, N]`, or `[N, K]` if `transpose_b`.
        transpose_b: Whether B is stored as `[N, K]`.
        columns: The number of columns of the strip.
        panel: Scratch memory for a packed K block.
        size: K.
        block: The number of elements along k of a K block.
        next_strip: The distance in columns to the strip that the worker is likely to process next.
        folds: Whether the sums of each K block begin at 0, and are added to those of earlier ones at the end.
        part: Memory for the sums of a K block in matrix tiles, if these are folded; see `amx_tiles.multiply_amx`.
    """

    elements: Any
    transpose_b: bool
    columns: Any
    panel: Any
    size: Any
    block: Any
    next_strip: Any
    folds: Any = False
    part: Any = None


@k.inline
def add_slices(
    c: Matrix,
    partial: k.View,
    pitch: k.Value,
    slices: k.Integer,
    rows: k.Integer,
    columns: k.Integer,
    t: Tiling,
) -> None:
    """Adds the sums of all slices.

    Args:
        c: The sums.
        partial: The sums of the slices, `[slices, rows, pitch]`, flat, starting at the first column.
        pitch: The distance between rows in elements.
        slices: The number of slices.
        rows: Rows of A.
        columns: The number of columns.
        t: The tiling.
    """
    for i in range(rows):
        for j in range(0, columns, t.width):
            total = partial.load(i * pitch + j, width=t.width)
            # slices are added in their order, whatever worker computed them
            for n in range(1, slices):
                total = total + partial.load((n * rows + i) * pitch + j, width=t.width)
            c.elements.store(i * c.row + j, value=total)


@k.inline
def slices_of(size: k.Value, columns: k.Value, itemsize: int) -> Any:
    """The number of slices of B `[K, columns]` along k, one task each; depends only on the shape."""
    blocks = k.max(k.ceildiv(columns, RUN), 1)
    slices = k.max(k.ceildiv(SLICES, blocks), 2)
    return k.max(
        k.min(slices, k.min(size // SLICE_ROWS, size * columns * itemsize // SLICE_BYTES)), 1
    )


@k.inline
def pack_row_tile(
    packed: k.View,
    a: k.View,
    tile: k.Value,
    tiles: k.Value,
    block: k.Value,
    matrix_tiles: bool,
    t: Tiling,
) -> None:
    """Packs one row tile of A `[M, K]`.

    Args:
        packed: The workspace of the batch, flat lanes; see the module docstring for the layout.
        a: `[M, K]`.
        tile: The index of the tile.
        tiles: The number of row tiles of A.
        block: The number of elements along k of a K block.
        matrix_tiles: Whether the row tile is packed for matrix tiles.
        t: The tiling.
    """
    for n in range(k.ceildiv(a.shape[1], block)):
        begin = n * block
        length = k.min(block, a.shape[1] - begin)
        depth = round_up(k.ceildiv(length, t.pair), t.width)
        # [K block][row tile]: the K blocks before this one have all tiles
        start = (begin // t.pair * tiles + tile * depth) * t.height
        rows = a[tile * t.height :, begin : begin + length]
        if matrix_tiles:
            count = k.min(t.height, rows.shape[0])
            amx_tiles.copy_tiles(packed[start:].view(k.bf16), rows[:count])
        for r in k.static_range(0, 0 if matrix_tiles else t.height, t.width):
            if r == 0 or tile * t.height + r < a.shape[0]:
                pack_rows(packed[start + r :], t.height, rows[r:], min(t.width, t.height - r), t)


@k.inline
def pack_strip(strip: Strip, begin: k.Integer, length: k.Value, t: Tiling) -> None:
    """Packs a K block of a strip."""
    b, panel = strip.elements, strip.panel
    if strip.transpose_b:
        for column in range(0, strip.columns, t.width):
            rows = b[column:, begin : begin + length]
            # a panel row is [2 vectors], lane by lane
            pack_rows(panel[column:], 2 * t.width, rows, t.width, t)
    else:
        pack_columns(panel, b[begin : begin + length, : strip.columns], 2, t)


@k.inline
def rows_ahead(strip: Strip, begin: k.Value) -> Any:
    """The rows of B `[N, K]` that will be packed next: the next K block, or the first one of the likely next strip."""
    last = begin + strip.block >= strip.size
    return strip.elements[strip.next_strip if last else 0 :, 0 if last else begin + strip.block :]


@k.inline
def multiply_matrix_tiles(
    c: Matrix, a: PackedRows, strip: Strip, begin: k.Value, length: k.Integer, tiles: Any, t: Tiling
) -> None:
    """Multiplies row tiles by a packed K block of a strip, in matrix tiles."""
    depth = k.ceildiv(length, t.pair)
    # panels end with whole tiles along k, zeros included
    amx_tiles.zero_panel_tail(strip.panel, length)
    if strip.transpose_b:
        # prefetch before the products, which leave no issue slots for prefetches
        ahead = rows_ahead(strip, begin)
        for row in range(2 * t.width):
            for i in range(0, length, 32):
                ahead.prefetch(row, i)
    steps = k.ceildiv(length, amx_tiles.DEPTH)
    for tile in range(a.first, a.last, 2):
        start = (begin // t.pair * a.tiles + tile * round_up(depth, t.width)) * t.height
        sums = c.elements[(tile - a.first) * t.height * c.row :]
        left = a.elements[start:].view(k.bf16)
        for high in k.static_range(1, 3):
            # the last pass may have one tile instead of two
            if (a.last - tile == 1) == (high == 1):
                amx_tiles.multiply_amx(
                    tiles, sums, left, strip.panel.view(k.bf16), steps, begin == 0, high,
                    amx_tiles.Ahead(None, 0, 0), strip.part,
                )  # fmt: skip


@k.inline
def multiply_register_tiles(
    c: Matrix, a: PackedRows, strip: Strip, begin: k.Value, length: k.Value, t: Tiling
) -> None:
    """Multiplies row tiles by a packed K block of a strip, in register tiles."""
    depth = k.ceildiv(length, t.pair)
    panel = Matrix(strip.panel, 2 * t.width)
    for tile in range(a.first, a.last):
        start = (begin // t.pair * a.tiles + tile * round_up(depth, t.width)) * t.height
        sums = Matrix(c.elements[(tile - a.first) * t.height * c.row :], c.row)
        left = Matrix(a.elements[start:], 1, t.height)
        # one tile of the block prefetches what all tiles will need next
        if strip.transpose_b and tile == a.first:
            ahead = rows_ahead(strip, begin)
            multiply_tile(sums, left, panel, depth, begin == 0, t, ahead, strip.folds)
        else:
            multiply_tile(sums, left, panel, depth, begin == 0, t, folds=strip.folds)


@k.inline
def gemm_block(c: Matrix, a: PackedRows, strip: Strip, tiles: Any, t: Tiling) -> None:
    """Multiplies row tiles of packed A by a strip, K block by K block.

    Args:
        c: The sums, two vectors per row.
        a: The row tiles.
        strip: The strip.
        tiles: The matrix tiles; None: register tiles are used.
        t: The tiling.
    """
    # at least one block, even if K is 0, as the first block zeroes the sums
    for n in range(k.max(k.ceildiv(strip.size, strip.block), 1)):
        begin = n * strip.block
        length = k.min(strip.block, strip.size - begin)
        pack_strip(strip, begin, length, t)
        if tiles is not None:
            multiply_matrix_tiles(c, a, strip, begin, length, tiles, t)
        else:
            multiply_register_tiles(c, a, strip, begin, length, t)


@k.inline
def multiply_slices(
    partial: k.View, a: k.View, b: k.View, slices: k.Value, pitch: k.Value, part: Any, any_size: bool,
    t: Tiling, ctx: k.Context,
) -> None:  # fmt: skip
    """Multiplies all rows of A by each slice of B along k; on return all workers may read the sums.

    Args:
        partial: The sums, `[slices, rows, pitch]`, flat.
        a: `[rows, K]`.
        b: `[K, columns]`.
        slices: The number of slices.
        pitch: The distance between rows of sums in elements.
        part: Memory for the sums of a piece along k, `part_room(t)` elements.
        any_size: Whether K may be larger than `FOLDED_SIZE`.
        t: The tiling.
        ctx: The context.
    """
    rows, size, columns = a.shape[0], a.shape[1], b.shape[1]
    depth = k.ceildiv(size, slices)
    # a task reads a slice in runs of up to `RUN` columns
    for n, run in ctx.parallel((slices, k.ceildiv(columns, RUN)), grain=1):
        column, begin = run * RUN, n * depth
        end, last = k.min(begin + depth, size), k.min(column + RUN, columns)
        sums = Matrix(partial[n * rows * pitch + column :], pitch)
        left, right = a[:, begin:end], b[begin:end, column:last]
        if any_size and depth > FOLDED_SIZE:
            multiply_long_runs(sums.elements, pitch, left, right, part, part_room(t), t)
        else:
            multiply_runs(sums, left, right, t)
    # sums of a slice are read by workers that did not write them
    ctx.barrier()


def part_room(t: Tiling) -> int:
    """The number of elements of the memory for the sums of a piece along k."""
    return GEMV_PASSES * t.gemv_rows * SUM_COLUMNS


@k.kernel
def matmul(
    out: k.Output,
    a: k.Input,
    b: k.Input,
    workspace: k.InOut,
    partial: k.InOut,
    *extra: k.Input,
    ctx: k.Context,
    transpose_b: bool = False,
    any_size: bool = True,
    epilogue: Any = identity,
) -> None:
    """`out[batch * M, N] = epilogue(a[batch, M, K] @ b[batch, K, N])`; with `transpose_b`, `b` is `[batch, N, K]`.

    Without `any_size`, K is at most `FOLDED_SIZE`: the kernel has no code for pieces along k, which takes 0.1 s to
    compile.
    """
    t = tiling(ctx.target, a.dtype, b.dtype)
    in_tiles = amx_tiles.takes_tiles(ctx.target, t)
    if in_tiles:
        t = amx_tiles.with_tile_height(t)
    max_rows = BLOCK_ROWS // t.height * t.height
    batches, rows, size = a.shape[0], a.shape[1], a.shape[2]
    columns = out.shape[1]
    # the sums of a block, or on the GEMV path those of a task, then those of a piece along k
    part_at = part_room(t)
    c = ctx.scratch(t.sums, (max(max_rows * 2 * t.width, 2 * part_at + 4 * t.width),))
    panel = ctx.scratch(t.lane, (LANES_K * 2 * t.width,))
    part = amx_tiles.part_memory(ctx) if in_tiles and any_size else None
    packed = workspace.view(t.lane)

    # batch-invariant: one path for any number of rows
    gemm = rows > (0 if ctx.target.batch_invariant else GEMV_PASSES * t.gemv_rows)
    tiles = k.ceildiv(rows, t.height)
    # divide K into equal blocks of whole vectors
    blocks = k.max(k.ceildiv(size, LANES_K * t.pair), 1)
    block = k.max(round_up(k.ceildiv(size, blocks), t.step), t.step)
    # the lanes of one batch of packed A, with rows and K padded to whole tiles and vectors
    packed_size = tiles * t.height * round_up(k.ceildiv(size, t.pair), t.width)
    stride = k.i64(GEMV_COLUMNS)
    slices = k.i64(1)
    pitch = round_up(columns, t.width)
    if not transpose_b:
        share = round_up(k.ceildiv(columns * batches, 4 * ctx.num_workers), t.width)
        # as many columns as balance the workers, at least four vectors
        stride = k.min(k.max(share, 4 * t.width), SUM_COLUMNS)
        # few rows by a large B: more tasks along k, as columns alone may be few
        if batches == 1 and not gemm:
            slices = slices_of(size, columns, b.dtype.bits // 8)
    row_blocks = k.i64(1)
    matrix_tiles = k.matrix_tiles(amx_tiles.SHAPES)
    if gemm:
        for batch, tile in ctx.parallel((batches, tiles)):
            pack_row_tile(packed[batch * packed_size :], a[batch], tile, tiles, block, in_tiles, t)
        ctx.barrier()
        if in_tiles:
            matrix_tiles.configure()
        # a strip is two vectors of columns, as register tiles are
        stride = k.i64(2 * t.width)
        # at least four tasks per worker, unless a task would have fewer than four tiles
        min_blocks = k.ceildiv(4 * ctx.num_workers, k.max(k.ceildiv(columns, stride) * batches, 1))
        row_blocks = k.max(k.ceildiv(rows, max_rows), k.min(min_blocks, k.ceildiv(tiles, 4)))
    if slices > 1:
        multiply_slices(partial, a[0], b[0, :, :columns], slices, pitch, c, any_size, t, ctx)
    task_tiles = k.ceildiv(tiles, row_blocks)

    shape = (batches, row_blocks, k.ceildiv(columns, stride))
    for batch, row_block, column_block in ctx.parallel(shape, grain=1):
        column = column_block * stride
        count = k.min(stride, columns - column)
        right = b[batch, column:] if transpose_b else b[batch, :, column:]
        row = k.i64(0)
        task_rows = rows
        if gemm:
            first = row_block * task_tiles
            last = k.min(first + task_tiles, tiles)
            row = first * t.height
            task_rows = k.min(last * t.height, rows) - row
            left = PackedRows(packed[batch * packed_size :], tiles, first, last)
            # the next strip of this worker's share
            ahead = 2 * t.width
            folds = any_size and size > FOLDED_SIZE
            strip = Strip(right, transpose_b, count, panel, size, block, ahead, folds, part)
            gemm_block(Matrix(c, stride), left, strip, matrix_tiles if in_tiles else None, t)
        elif transpose_b:
            if any_size and size > DOT_PIECE:
                multiply_long_rows_of_b(c, stride, a[batch], right, count, c[part_at:], t)
            else:
                multiply_rows_of_b(Matrix(c, stride), a[batch], right, count, t)
        elif slices > 1:
            add_slices(Matrix(c, stride), partial[column:], pitch, slices, rows, count, t)
        elif any_size and size > FOLDED_SIZE:
            long = right[:, :count]
            multiply_long_runs(c, stride, a[batch], long, c[part_at:], part_room(t), t)
        else:
            multiply_runs(Matrix(c, stride), a[batch], right[:, :count], t)
        for i in range(task_rows):
            at = batch * rows + row + i
            for j, mask in k.vectors(count, t.width):
                v = c.load(i * stride + j, width=t.width)
                out.store(at, column + j, value=epilogue(v, at, column + j, mask, extra), mask=mask)
    if in_tiles:
        if gemm:
            matrix_tiles.release()


def _lower_matmul(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    """The call for `mo.matmul` on views `[batch, rows, columns]`; workspaces hold packed A and the sums of slices."""
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
    transpose_b = bool(attributes.get("transpose_b", False))
    partial = Workspace(sums, _partial_shape(x, y, transpose_b, target))
    args = (
        out, a, b,
        view("workspace", 0, workspace, static=False),
        view("workspace", 1, partial, static=False),
    )  # fmt: skip
    return KernelCall(
        matmul,
        args,
        {"transpose_b": transpose_b, "any_size": not isinstance(size, int) or size > FOLDED_SIZE},
        epilogue=True,
        workspaces=(workspace, partial),
    )


def _partial_shape(x: Operand, y: Operand, transpose_b: bool, target: k.Target) -> Dims:
    """The shape of the workspace for the sums of slices of one B, in a batch or not; see `slices_of`."""
    size, columns = y.shape[-2:]
    # a batch of a size that only a run knows may be of one B
    batches = product(y.shape[:-2])
    rows = product(x.shape[:-1]) if len(y.shape) == 2 else x.shape[-2]
    limit = GEMV_PASSES * tiling(target, k.f32, k.f32).gemv_rows
    if transpose_b or isinstance(batches, int) and batches != 1:
        return (1,)
    if isinstance(rows, int) and rows > limit or isinstance(size, int) and size < 2 * SLICE_ROWS:
        return (1,)
    rows = rows if isinstance(rows, int) else limit
    if not isinstance(columns, int):
        return (product((rows, SLICES * RUN + 2 * MAX_WIDTH + columns + columns)),)
    columns = -(-columns // MAX_WIDTH) * MAX_WIDTH
    slices = max(-(-SLICES // -(-columns // RUN)), 2) if columns else 0
    return (max(rows * slices * columns, 1),)


def _wider(a: DType, b: DType) -> DType:
    return a if a.size_in_bytes >= b.size_in_bytes else b


LOWERINGS = {"mo.matmul": _lower_matmul}
