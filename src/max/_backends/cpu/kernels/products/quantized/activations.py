"""Activations rounded to 8 bits, with a scale for each block of 32 neighbors, for products with packed quantized
weights.

Rows are rounded in tiles, so that a register tile reads a single stream. For each tile of ``height`` rows and each
block::

    words      [tile][block][height][8]       32 elements of a row in 8 words
    scales     [tile][block][height]          x = scale · q
    zero_sums  [tile][block][parts][height]   -zero times the sum of a part; with offsets the scaled sum of the block

Where products are summed in 16 bits first, a zero sum is a pair of sums of 16 bits, of the elements 0 and 1 and of the
elements 2 and 3 of each word.

A worker rounds all rows of a tile, as workers would otherwise share cache lines (110 µs of 190 µs in one measurement).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from max import kernel as k
from max._backends.cpu.kernels.products.quantized.packed import BLOCK, PackedFormat
from max._backends.cpu.kernels.products.quantized.unpacking import QuantizedTiling
from max._backends.cpu.kernels.products.row_norms import SMALL_ELEMENTS
from max._backends.cpu.kernels.tiles.transpose import FIRST_4, LAST_4

TASK_BLOCKS = 8
"""The number of blocks of a row tile that a worker rounds per task."""
SMALL_WORDS = SMALL_ELEMENTS // BLOCK * 12
"""Workspace words per worker when each worker rounds a small activation itself; whole cache lines."""


class Rounded(NamedTuple):
    """The rounded rows of one tile.

    Args:
        words: Elements, four in a word, `[blocks, height, 8]`, flat.
        scales: `[blocks, height]`, flat.
        zero_sums: `[blocks, parts, height]`, flat; see `round_block`.
        height: The number of rows of the tile.
    """

    words: Any
    scales: Any
    zero_sums: Any
    height: Any


@k.inline
def round_block(q: Rounded, x: k.View, t: QuantizedTiling) -> None:
    """Rounds 32 elements of a row: ``x = scale q``.

    Args:
        q: Receives the results, from the block's row on.
        x: The elements.
        t: The tiling of the products.
    """
    parts = t.packed_format.parts
    v = k.cast(x.load(0, width=BLOCK), k.f32)
    # the bits of non-negative floats are ordered like their values, NaN last
    top = k.reduce_max(k.bitcast(k.abs(v), k.u32))
    # 127 levels on each side: -128 is not used, so that magnitudes fit 7 bits
    d = k.bitcast(top, k.f32) / 127.0
    inverse = k.f32(0) if d == 0.0 else 1.0 / d
    rounded = k.cast_unchecked(k.cast_unchecked(k.round(v * inverse), k.i32), k.i8)
    q.words.store(0, value=k.bitcast(rounded, k.i32))  # 8 words of four elements
    q.scales[0] = d
    if t.starts_pairs:
        # products with 1 add two elements: 16 sums, two of each word, of up to 254
        pairs = k.dot_i8(k.splat(k.i16(0), 16), k.splat(k.u8(1), BLOCK), rounded, narrow=True)
        pairs = pairs * k.i16(-t.zero)
        for part in k.static_range(parts):
            begin, end = part * 16 // parts, (part + 1) * 16 // parts
            low = k.reduce_add(k.shuffle(pairs, None, tuple(range(begin, end, 2))))
            high = k.reduce_add(k.shuffle(pairs, None, tuple(range(begin + 1, end, 2))))
            both = k.u32(k.bitcast(low, k.u16)) | k.u32(k.bitcast(high, k.u16)) << 16
            q.zero_sums.view(k.u32)[part * q.height] = both
    else:
        # products with 1 add four elements a word: 8 sums
        sums = k.dot_i8(k.splat(k.i32(0), 8), k.splat(k.u8(1), BLOCK), rounded, narrow=True)
        for part in k.static_range(parts):
            of_part = sums
            if parts == 2:
                # a part of a block is half of it, four words
                of_part = k.shuffle(sums, None, LAST_4 if part else FIRST_4)
            if t.packed_format.affine:
                q.zero_sums[part * q.height] = d * k.f32(k.reduce_add(of_part))
            else:
                q.zero_sums.view(k.i32)[part * q.height] = k.reduce_add(of_part) * -t.zero


@k.inline
def block_of(
    q: Rounded, tile_size: k.Value, tile: k.Value, block: k.Value, packed_format: PackedFormat
) -> Rounded:
    """The rounded rows, from a block of a tile on.

    Args:
        q: All rows.
        tile_size: The number of blocks times the number of rows of a tile.
        tile: The index of the tile.
        block: The index of the block.
        packed_format: The weight's format.
    """
    at = tile * tile_size + block * q.height  # [tiles, blocks, height]
    return Rounded(
        q.words[at * 8 :], q.scales[at:], q.zero_sums[at * packed_format.parts :], q.height
    )


@k.inline
def row_of(q: Rounded, row: k.Integer) -> Rounded:
    """The rounded rows of a tile, from a row on."""
    return Rounded(q.words[8 * row :], q.scales[row:], q.zero_sums[row:], q.height)


@k.inline
def round_rows(
    x: k.View,
    memory: k.View,
    height: k.Value,
    small: Any,
    t: QuantizedTiling,
    ctx: k.Context,
) -> Rounded:
    """Rounds all rows of `x` `[M, K]`; on return this worker may read all of them.

    Args:
        x: The rows.
        memory: A workspace of f32.
        height: The number of rows of a tile.
        small: Whether each worker rounds all of x itself; then there is one tile.
        t: The tiling of the products.
        ctx: The context.
    """
    rows, blocks = x.shape[0], x.shape[1] // BLOCK
    tiles = k.ceildiv(rows, k.max(height, 1))
    tile_size = blocks * height
    # each worker has a copy of its own where it rounds all of x
    worker_memory = memory[(ctx.worker * SMALL_WORDS if small else k.i64(0)) :]
    # words take 8 elements a row and block, scales one
    scales, zero_sums = (
        worker_memory[tiles * tile_size * 8 :],
        worker_memory[tiles * tile_size * 9 :],
    )
    q = Rounded(worker_memory.view(k.i32), scales, zero_sums, height)
    # equal shares of the tasks instead of a parallel loop, so that one loop serves both cases
    chunks = k.max(k.ceildiv(blocks, TASK_BLOCKS), 1)
    tasks = tiles * chunks
    share = tasks if small else k.ceildiv(tasks, ctx.num_workers)
    begin = k.i64(0) if small else ctx.worker * share
    for task in range(begin, k.min(begin + share, tasks)):
        i, chunk = task // chunks, task % chunks
        for b in range(chunk * TASK_BLOCKS, k.min((chunk + 1) * TASK_BLOCKS, blocks)):
            target = block_of(q, tile_size, i, b, t.packed_format)
            for r in range(k.min(height, rows - i * height)):
                round_block(row_of(target, r), x[i * height + r, b * BLOCK :], t)
    if not small:
        ctx.barrier()
    return q
