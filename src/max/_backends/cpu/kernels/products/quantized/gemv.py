"""GEMV with packed quantized weights: lines are unpacked in registers and multiplied, limited by memory bandwidth.

The loops, from the outside: strip → unit → block of 32 → part (one scale) → word of x (four elements adjacent in k).
A line is unpacked once for all rows of a pass. Integer sums of a part are exact; the scaled parts are added in f32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from max import kernel as k
from max._backends.cpu.kernels.products.quantized.activations import Rounded
from max._backends.cpu.kernels.products.quantized.packed import LINE
from max._backends.cpu.kernels.products.quantized.unpacking import (
    Prefetches,
    QuantizedTiling,
    add_pairs,
    add_products,
    lines_of_word,
    load_elements,
    load_scales,
    panel_blocks,
    prefetch_ahead,
    prefetches_of,
    starting_pairs,
    starting_sums,
)
from max._backends.cpu.kernels.tiles.micro_kernels import add_sums, store_sums
from max._backends.cpu.kernels.tiles.strips import CACHE_LINE, COLUMNS
from max._backends.cpu.kernels.tiles.tiling import Matrix


class PackedStrip(NamedTuple):
    """A strip of a packed weight.

    Args:
        groups: The packed groups from this strip on, `[groups, bytes]`.
        blocks: The number of blocks of 32 along k.
        locality: The locality of prefetches, as in `k.prefetch`.
    """

    groups: Any
    blocks: Any
    locality: int


@k.inline
def add_word(
    acc: k.View, lines: k.View, words: Any, j: int, vectors: tuple[int, ...], first: k.Value, rows: int,
    t: QuantizedTiling,
) -> None:  # fmt: skip
    """Adds the products of a word of each row of a block of x with some vectors of columns.

    Args:
        acc: A tile of sums in i32 or i16.
        lines: The lines of the block.
        words: The words of the block, eight per row.
        j: The index of the word.
        vectors: The indices of the vectors.
        first: The first column of vector 0.
        rows: The number of rows of x.
        t: The tiling.
    """
    for i in k.static_range(len(vectors)):
        byte = 4 * (first + vectors[i] * t.width)
        elements = load_elements(lines, byte, j, t.packed_format, t.width) ^ t.element_offset
        for r in k.static_range(rows):
            acc[r, i] = add_products(acc[r, i], elements, words[r * 8 + j], t)


@k.inline
def add_packed_block(
    sums: k.View, q: Rounded, b: k.Value, unit: k.View, block: k.View, vectors: tuple[int, ...], first: k.Value,
    rows: int, prefetches: Prefetches, t: QuantizedTiling,
) -> None:  # fmt: skip
    """Adds the products of one block of x with some vectors of columns.

    Args:
        sums: A tile of sums, f32.
        q: The rounded rows.
        b: The index of the block.
        unit: The bytes of the block's unit.
        block: The bytes of the block.
        vectors: The indices of the vectors.
        first: The first column of vector 0.
        rows: The number of rows of x.
        prefetches: The prefetches of the pass.
        t: The tiling.
    """
    packed_format, width = t.packed_format, t.width
    # of columns that share cache lines the first vectors prefetch
    ahead = prefetches if 4 * vectors[0] * width % CACHE_LINE == 0 else Prefetches(0)
    column = 4 * (first + vectors[0] * width)
    size = 4 * width * len(vectors)
    steps = 8 // packed_format.parts  # words of a part
    fold = min(t.fold, steps) or steps
    count = len(vectors)
    words = q.words[b * q.height * 8 :]
    for p in k.static_range(packed_format.parts):
        zero_sums = q.zero_sums[(b * packed_format.parts + p) * q.height :]
        acc = starting_sums(zero_sums, rows, count, t)
        for begin in k.static_range(p * steps, (p + 1) * steps, fold):
            pairs = starting_pairs(zero_sums, rows, count, t)
            # narrow products are summed in 16 bits first
            sums_of_four = pairs if t.fold else acc
            if not t.unrolls_words:
                # words j and 4 + j are in one line, or four lines apart
                for j in range(4):
                    four = block[j * LINE :]
                    for half in k.static_range(2):
                        # of 4 bits both words are in one line, which is prefetched once
                        if half == 0 or packed_format.bits == 8:
                            prefetch_ahead(four, 4 * half * LINE + column, size, ahead)
                        add_word(sums_of_four, four, words[j:], 4 * half, vectors, first, rows, t)
            else:
                for j in k.static_range(begin, begin + fold):
                    for line in lines_of_word(j, packed_format):
                        prefetch_ahead(block, line * LINE + column, size, ahead)
                    add_word(sums_of_four, block, words, j, vectors, first, rows, t)
            if t.fold:
                add_pairs(acc, pairs, rows, count, t)
        for i in k.static_range(count):
            at = first + vectors[i] * width
            v = vectors[i]
            scale = load_scales(unit, block, at, packed_format, p, width)
            for r in k.static_range(rows):
                scaled = scale * q.scales[b * q.height + r]
                sums[r, v] = k.fma(k.cast(acc[r, i], k.f32), scaled, sums[r, v])
            if packed_format.affine:
                offset = load_scales(unit, block, at, packed_format, packed_format.parts + p, width)
                for r in k.static_range(rows):
                    zero_sum = q.zero_sums[(b * packed_format.parts + p) * q.height + r]
                    sums[r, v] = k.fma(offset, k.splat(-zero_sum, width), sums[r, v])
    if vectors[0] == 0:
        # the multipliers lie behind the lines
        prefetch_ahead(block, packed_format.lines * LINE, packed_format.multiplier_bytes, ahead)


def vectors_together(rows: int, vectors: int, t: QuantizedTiling) -> int:
    """How many vectors of columns a block of x is multiplied by before the next ones; they share its loaded words.

    Sums in 32 bits of the others lie on the stack: reads in the order of addresses gain more than that costs.
    """
    if rows == 1 and t.width > 4:
        return vectors
    # with all words of a block unrolled, 16 registers have no room for the sums of three rows by two vectors
    return 1 if t.narrow and t.unrolls_words and rows > 2 and k.target().registers < 32 else 2


@k.inline
def add_blocks(
    sums: k.View, q: Rounded, unit: k.View, unit_index: k.Value, begin: k.Integer, end: k.Integer, first: k.Value,
    rows: int, vectors: int, prefetches: Prefetches, t: QuantizedTiling,
) -> None:  # fmt: skip
    """Adds the products of blocks `[begin, end)` of a unit of a strip, which has index `unit_index`."""
    packed_format = t.packed_format
    # all rows share the unpacked elements
    together = vectors_together(rows, vectors, t)
    for inside in range(begin, end):
        b = unit_index * packed_format.span + inside
        block = unit[packed_format.halves + inside * packed_format.block_bytes :]
        for v in k.static_range(0, vectors, together):
            numbers = tuple(range(v, v + together))
            # else LLVM keeps the words of x for the next vectors, and spills them
            at = k.opaque(b) if t.unrolls_words and together < vectors and rows > 1 else b
            add_packed_block(sums, q, at, unit, block, numbers, first, rows, prefetches, t)


@k.inline
def add_units(
    sums: Any, q: Rounded, strip: PackedStrip, begin: k.Integer, end: k.Integer, first: k.Value, rows: int,
    vectors: int, t: QuantizedTiling,
) -> None:  # fmt: skip
    """Adds the products of units `[begin, end)` of a strip, or of two, to a tile of sums each; see `gemv_packed`."""
    span, size = t.packed_format.span, t.packed_format.unit_bytes
    prefetches = prefetches_of(rows, strip.locality, t, len(sums))
    for number in range(begin, end):
        for s in k.static_range(len(sums)):
            # groups follow each other: prefetches past the strip reach the next one
            prefetch_ahead(strip.groups[s, number * size :], 0, t.packed_format.halves, prefetches)
        if len(sums) > 1 and t.turns[rows - 1] == 1:
            for inside in range(span):
                for strip_index in k.static_range(len(sums)):
                    unit = strip.groups[strip_index, number * size :]
                    add_blocks(
                        sums[strip_index], q, unit, number, inside, inside + 1, first, rows,
                        vectors, prefetches, t,
                    )  # fmt: skip
        else:
            for strip_index in k.static_range(len(sums)):
                unit = strip.groups[strip_index, number * size :]
                add_blocks(
                    sums[strip_index], q, unit, number, 0, span, first, rows, vectors, prefetches, t
                )


@k.inline
def gemv_packed(
    c: k.View,
    q: Rounded,
    strip: PackedStrip,
    first: k.Integer,
    rows: int,
    vectors: int,
    t: QuantizedTiling,
) -> None:
    """Multiplies `rows` rows of x by some vectors of columns of a strip.

    Register budget: rows × vectors sums in f32 and as many accumulators in i32; with vectors of 4 lanes the lines of
    two vectors at a time.

    Args:
        c: The sums, `COLUMNS` per row.
        q: The rounded rows.
        strip: The strip.
        first: The first column.
        rows: The number of rows of x per pass.
        vectors: The number of vectors of columns.
        t: The tiling.
    """
    units, target = strip.blocks // t.packed_format.span, Matrix(c[first:], COLUMNS)
    if t.folds:
        # the panels of the GEMM path, whose results are the same
        piece = panel_blocks(t, False) // t.packed_format.span
        for number in range(k.ceildiv(units, piece)):
            sums = k.tile(k.f32, (rows, vectors), width=t.width, fill=0.0)
            end = k.min(number * piece + piece, units)
            add_units((sums,), q, strip, number * piece, end, first, rows, vectors, t)
            if number > 0:
                add_sums(sums, target, rows, vectors, t.width)
            store_sums(target, sums, rows, vectors, t.width)
    else:
        sums = k.tile(k.f32, (rows, vectors), width=t.width, fill=0.0)
        add_units((sums,), q, strip, 0, units, first, rows, vectors, t)
        store_sums(target, sums, rows, vectors, t.width)


@k.outlined
def gemv_pair(
    c: k.View, distance: k.Integer, q: Rounded, strip: PackedStrip, rows: int, t: QuantizedTiling
) -> None:
    """Multiplies `rows` rows of x by a strip and the next one, which are read in turn: two streams from memory.

    Register budget: as `gemv_packed` of all columns, and once more the sums in f32.

    Args:
        c: The sums of the first strip, `COLUMNS` per row.
        distance: The distance of the sums of the second one.
        q: The rounded rows.
        strip: The first strip.
        rows: The number of rows of x per pass.
        t: The tiling.
    """
    vectors = COLUMNS // t.width
    one = k.tile(k.f32, (rows, vectors), width=t.width, fill=0.0)
    two = k.tile(k.f32, (rows, vectors), width=t.width, fill=0.0)
    add_units((one, two), q, strip, 0, strip.blocks // t.packed_format.span, 0, rows, vectors, t)
    store_sums(Matrix(c, COLUMNS), one, rows, vectors, t.width)
    store_sums(Matrix(c[distance:], COLUMNS), two, rows, vectors, t.width)
