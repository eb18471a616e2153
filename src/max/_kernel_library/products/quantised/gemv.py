"""GEMV with packed quantised weights: lines are unpacked in registers and multiplied, limited by memory bandwidth.

The loops, from the outside: strip → unit → block of 32 → part (one scale) → word of x (four elements adjacent in k).
A line is unpacked once for all rows of a pass. Integer sums of a part are exact; the scaled parts are added in f32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from max import kernel as k
from max._kernel_library.products.quantised.activations import Rounded
from max._kernel_library.products.quantised.packed import LINE
from max._kernel_library.products.quantised.unpacking import (
    QuantisedTiling,
    add_pairs,
    add_products,
    load_elements,
    load_scales,
    starting_sums,
)
from max._kernel_library.tiles.micro_kernels import store_sums
from max._kernel_library.tiles.strips import CACHE_LINE, COLUMNS
from max._kernel_library.tiles.tiling import Matrix


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
def prefetch_unit_share(strip: PackedStrip, unit: Any, inside: Any, t: QuantisedTiling) -> None:
    """Prefetches a block's share of the unit `prefetch_distance` bytes later, in this strip or the next one.

    The prefetches of a unit are spread over its blocks, as many prefetches at once would delay each other.
    """
    form, end = t.form, strip.groups.shape[1]
    share = form.unit_bytes // form.span
    ahead = unit * form.unit_bytes + inside * share + t.prefetch_distance
    beyond = ahead >= end
    ahead = ahead - end if beyond else ahead
    group = k.i64(1) if beyond else k.i64(0)
    for i in k.static_range(0, share, CACHE_LINE):
        strip.groups.prefetch(group, ahead + i, locality=strip.locality)


@k.inline
def add_word(
    acc: Any, lines: Any, words: Any, j: int, vectors: tuple[int, ...], first: Any, rows: int,
    t: QuantisedTiling,
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
        elements = load_elements(lines, byte, j, t.form, t.width) ^ t.lowered
        for r in k.static_range(rows):
            acc[r, i] = add_products(acc[r, i], elements, words[r * 8 + j], t)


@k.inline
def add_packed_block(
    sums: Any, q: Rounded, b: Any, scales: Any, lines: Any, vectors: tuple[int, ...], first: Any,
    rows: int, t: QuantisedTiling,
) -> None:  # fmt: skip
    """Adds the products of one block of x with some vectors of columns.

    Args:
        sums: A tile of sums, f32.
        q: The rounded rows.
        b: The index of the block.
        scales: The scales of the block's unit, and the index of the block in the unit.
        lines: The strip's bytes, and the offset of the block's lines.
        vectors: The indices of the vectors.
        first: The first column of vector 0.
        rows: The number of rows of x.
        t: The tiling.
    """
    form, width = t.form, t.width
    unit_scales, inside = scales
    packed, line = lines
    steps = 8 // form.parts
    fold = min(t.fold, steps) or steps
    count = len(vectors)
    words = q.words[b * q.height * 8 :]
    for p in k.static_range(form.parts):
        acc = starting_sums(q.zero_sums[(b * form.parts + p) * q.height :], rows, count, t)
        for begin in k.static_range(p * steps, (p + 1) * steps, fold):
            pairs = k.tile(k.i16, (rows, count), width=2 * width, fill=0)
            sums_of_four = pairs if t.fold else acc
            if t.narrow and form.bits in (4, 8):
                # words j and 4 + j are in one line, or four lines apart
                for j in range(4):
                    block = packed[line + j * LINE :]
                    for half in k.static_range(2):
                        add_word(sums_of_four, block, words[j:], 4 * half, vectors, first, rows, t)
            else:
                for j in k.static_range(begin, begin + fold):
                    add_word(sums_of_four, packed[line:], words, j, vectors, first, rows, t)
            if t.fold:
                add_pairs(acc, pairs, rows, count, t)
        for i in k.static_range(count):
            at = first + vectors[i] * width
            scale = load_scales(unit_scales, at, form, inside * form.parts + p, 0, width)
            for r in k.static_range(rows):
                v = vectors[i]
                scaled = scale * q.scales[b * q.height + r]
                sums[r, v] = k.fma(k.cast(acc[r, i], k.f32), scaled, sums[r, v])
    if form.affine:
        for i in k.static_range(count):
            v = vectors[i]
            offset = load_scales(unit_scales, first + v * width, form, inside, 1, width)
            for r in k.static_range(rows):
                scaled_sum = k.splat(-q.zero_sums[b * q.height + r], width)
                sums[r, v] = k.fma(offset, scaled_sum, sums[r, v])


@k.inline
def gemv_packed(
    c: Any, q: Rounded, strip: PackedStrip, first: Any, rows: int, vectors: int, t: QuantisedTiling
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
    form = t.form
    sums = k.tile(k.f32, (rows, vectors), width=t.width, fill=0.0)
    # all rows share the unpacked elements; with vectors of 4 lanes, registers hold those of only two vectors
    together = min(vectors, 2) if t.width == 4 else vectors
    packed = strip.groups[0]
    for unit in range(strip.blocks // form.span):
        for inside in range(form.span):
            b = unit * form.span + inside
            line = unit * form.unit_bytes + form.scale_bytes + inside * (form.lines * LINE)
            # the hardware prefetcher falls behind; a single row reads lines of 8 bits fastest without prefetches
            if form.bits < 8 or rows > 1:
                if first == 0:
                    prefetch_unit_share(strip, unit, inside, t)
            scales = packed[unit * form.unit_bytes :]
            for v in k.static_range(0, vectors, together):
                numbers = tuple(range(v, v + together))
                add_packed_block(
                    sums, q, b, (scales, inside), (packed, line), numbers, first, rows, t
                )
    store_sums(Matrix(c[first:], COLUMNS), sums, rows, vectors, t.width)
