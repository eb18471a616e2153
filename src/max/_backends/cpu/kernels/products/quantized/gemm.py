"""GEMM with packed quantized weights: strips are unpacked to bytes in scratch memory and multiplied by row tiles.

The loops, from the outside: strip → panel (`PANEL` blocks of 32, unpacked once) → tile of rows → two vectors of columns
→ block → word of x. Cache budget: a panel with its scales (24 × 1 KB, and 3 KB of scales) stays in the L1 cache; the
rounded rows in the L2 cache.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from max import kernel as k
from max._backends.cpu.kernels.products.quantized.activations import Rounded
from max._backends.cpu.kernels.products.quantized.packed import LINE
from max._backends.cpu.kernels.products.quantized.unpacking import (
    QuantizedTiling,
    UnpackedStrip,
    add_pairs,
    add_products,
    starting_pairs,
    starting_sums,
)
from max._backends.cpu.kernels.tiles.micro_kernels import add_sums, load_sums, store_sums
from max._backends.cpu.kernels.tiles.strips import CACHE_LINE, COLUMNS, L2
from max._backends.cpu.kernels.tiles.tiling import Matrix


class Ahead(NamedTuple):
    """The data to prefetch while a panel is multiplied.

    Args:
        packed: The packed bytes from a strip on.
        at: The offset of the first byte to prefetch.
    """

    packed: Any
    at: Any


def prefetched_lines(t: QuantizedTiling) -> int:
    """The number of cache lines that a register tile prefetches per block; six tiles of 12 rows prefetch a whole panel.

    The product of a strip and few rows takes less time than loading the next strip: without prefetches, 16 rows by Q8_0
    take 1.4 times as long. Nothing is prefetched if a product is a single instruction.
    """
    block_bytes = -(-t.packed_format.unit_bytes // t.packed_format.span)
    return -(-block_bytes // (6 * CACHE_LINE)) if t.narrow else 0


@k.inline
def multiply_block(
    sums: k.View, q: Rounded, strip: UnpackedStrip, n: k.Value, p: int, first: k.Value, rows: int,
    t: QuantizedTiling,
) -> None:  # fmt: skip
    """Adds the products of a part of a block of x with two vectors of columns; see `multiply_strip`."""
    packed_format, width = t.packed_format, t.width
    steps = 8 // packed_format.parts  # words of a part
    # words whose products fit 16 bits; without such sums all words of the part
    fold = min(t.fold, steps) or steps
    zero_sums = q.zero_sums[(n * packed_format.parts + p) * rows :]
    acc = starting_sums(zero_sums, rows, 2, t)
    # begins with the magnitudes of negative elements, see `split_signs`
    if t.splits_signs:
        for v in k.static_range(2):
            correction = strip.corrections.load(n * COLUMNS + first + v * width, width=width)
            for r in k.static_range(rows):
                acc[r, v] = correction
    words = q.words[n * rows * 8 :]
    lines = strip.elements[n * 8 * LINE + 4 * first :]
    signs = strip.signs[n * 8 * LINE + 4 * first :]
    unroll = 2 if t.narrow else 1
    for begin in range(p * steps, (p + 1) * steps, fold):
        pairs = starting_pairs(zero_sums, rows, 2, t)
        # no further unrolling, as LLVM would hoist the loads of all steps and spill the sums
        for even in range(begin, begin + fold, unroll):
            for i in k.static_range(unroll):
                j = even + i
                low = lines.load(j * LINE, width=4 * width)
                high = lines.load(j * LINE + 4 * width, width=4 * width)
                for r in k.static_range(rows):
                    word = words[r * 8 + j]
                    if t.fold:
                        pairs[r, 0] = add_products(pairs[r, 0], low, word, t)
                        pairs[r, 1] = add_products(pairs[r, 1], high, word, t)
                    elif t.splits_signs:
                        # flipping all bits of x gives -x - 1: the corrections add the missing magnitudes
                        x = k.bitcast(k.splat(word, width), k.i8)
                        low_x = x ^ signs.load(j * LINE, width=4 * width)
                        high_x = x ^ signs.load(j * LINE + 4 * width, width=4 * width)
                        acc[r, 0] = k.dot_i8(acc[r, 0], low, low_x, narrow=True)
                        acc[r, 1] = k.dot_i8(acc[r, 1], high, high_x, narrow=True)
                    else:
                        acc[r, 0] = add_products(acc[r, 0], low, word, t)
                        acc[r, 1] = add_products(acc[r, 1], high, word, t)
        if t.fold:
            add_pairs(acc, pairs, rows, 2, t)
    for v in k.static_range(2):
        column = first + v * width
        scale = strip.scales.load((n * packed_format.parts + p) * COLUMNS + column, width=width)
        for r in k.static_range(rows):
            scaled = scale * q.scales[n * rows + r]
            sums[r, v] = k.fma(k.cast(acc[r, v], k.f32), scaled, sums[r, v])
        if packed_format.affine:
            offset = strip.offsets.load(
                (n * packed_format.parts + p) * COLUMNS + column, width=width
            )
            for r in k.static_range(rows):
                # in affine formats the zero sum is the scaled sum of the part
                scaled_sum = k.splat(-q.zero_sums[(n * packed_format.parts + p) * rows + r], width)
                sums[r, v] = k.fma(offset, scaled_sum, sums[r, v])


@k.inline
def multiply_strip(
    c: k.View, q: Rounded, strip: UnpackedStrip, count: k.Integer, first: k.Integer, rows: int, ahead: Ahead,
    t: QuantizedTiling,
) -> None:  # fmt: skip
    """Adds the products of a tile of rows of x with two vectors of columns of an unpacked strip, over some blocks.

    Register budget: rows × 2 sums in f32, as many accumulators in i32, and two vectors of elements.

    Args:
        c: The sums, `COLUMNS` per row.
        q: The rounded rows, from the first block on.
        strip: The unpacked blocks.
        count: The number of blocks.
        first: The first column.
        rows: The tile's height.
        ahead: The data to prefetch, some cache lines per block.
        t: The tiling.
    """
    lines = prefetched_lines(t)
    sums = k.tile(k.f32, (rows, 2), width=t.width)
    tile = Matrix(c[first:], COLUMNS)
    if t.folds:
        sums = k.tile(k.f32, (rows, 2), width=t.width, fill=0.0)
    else:
        load_sums(sums, tile, rows, 2, t.width)
    for n in range(count):
        for i in k.static_range(lines):
            # into the L2 cache, as the L1 cache holds the current panel
            byte = ahead.at + (n * lines + i) * CACHE_LINE
            ahead.packed.prefetch(byte, locality=L2)
        for p in k.static_range(t.packed_format.parts):
            multiply_block(sums, q, strip, n, p, first, rows, t)
    if t.folds:
        add_sums(sums, tile, rows, 2, t.width)
    store_sums(tile, sums, rows, 2, t.width)
