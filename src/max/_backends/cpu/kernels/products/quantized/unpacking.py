"""Unpacking of quantized weights to bytes and scales: in registers for GEMV, to scratch memory for GEMM."""

from __future__ import annotations

from typing import Any, NamedTuple

from max import kernel as k
from max._backends.cpu.kernels.products.quantized.dequantize import level_table
from max._backends.cpu.kernels.products.quantized.packed import (
    LINE,
    MULTIPLIER_ZERO,
    NIBBLES,
    ROWS,
    SIX_BITS,
    PackedFormat,
)
from max._backends.cpu.kernels.products.quantized.tuning import KEPT, tuning_of
from max._backends.cpu.kernels.tiles.strips import CACHE_LINE, COLUMNS, L2
from max._dataclass import dataclass
from max.kernel import Target

PANEL = 24
"""The number of blocks of k that are unpacked together, in whole units: with their scales they fit the L1 cache."""
FOLDED_SIZE = 65536
"""The maximum K whose sums stay in one accumulator: at most two are added for a block of 32, as many in all as of 4096
elements of f32. For a larger K each panel has accumulators of its own."""
LARGEST_SUM = 2**15 - 1
"""The largest sum in 16 bits."""


@dataclass(frozen=True)
class QuantizedTiling:
    """The compile-time properties of products with a packed weight.

    Args:
        packed_format: The weight's format.
        width: Lanes of a vector of sums.
        signed: Whether 8-bit elements are multiplied as signed numbers: if byte products are limited to magnitudes of
            128.
        fold: The number of words of a row of x whose products are summed in 16 bits; 0: all are summed in 32 bits.
        narrow: Whether a product takes several instructions.
        zero: The zero point for which the zero sums of x account; 0 if elements are multiplied as signed numbers.
        starts_pairs: Whether sums in 16 bits begin with zero sums of x, which then are pairs of sums in 16 bits.
        prefetch_distances: The bytes between a line that is read and the one that is prefetched; see `QuantizedTuning`.
        far_distances: The distances of additional prefetches into the L2 cache; see `QuantizedTuning`.
        prefetches_bytes: Whether a single row prefetches lines of 8 bits.
        turns: By the rows of a pass: the blocks that are read of a strip before as many of the next one; 0: strips are
            read one after the other.
        folds: Whether each panel along k has accumulators of its own, which are then added to the sums in memory.
    """

    packed_format: PackedFormat
    width: int
    signed: bool
    fold: int
    narrow: bool
    zero: int
    starts_pairs: bool
    prefetch_distances: tuple[int, ...]
    far_distances: tuple[int, ...] = (0, 0, 0, 0)
    prefetches_bytes: bool = False
    turns: tuple[int, ...] = (0, 0, 0, 0)
    folds: bool = False

    @property
    def passes(self) -> tuple[int, ...]:
        """The number of rows of x per pass of the GEMV path, the most first.

        A pass reads and unpacks the weight once: one more row adds no second pass.
        """
        return tuple(range(len(self.prefetch_distances), 0, -1))

    @property
    def unrolls_words(self) -> bool:
        """Whether the loop over the words of a block is unrolled.

        Where a product takes several instructions, LLVM would move the loads of all words to its beginning and spill
        them. Words of other formats have shifts of their own.
        """
        return not (self.narrow and self.packed_format.bits in (4, 8))

    @property
    def splits_signs(self) -> bool:
        """Whether unpacked elements are split into magnitudes and signs.

        On Zen 4, `vpsignb` occupies one of the two execution units of multiply-adds, an exclusive or one of four units:
        32 products take 1 cycle instead of 1.5.
        """
        return self.signed and self.narrow

    @property
    def element_offset(self) -> int:
        """The number that is subtracted from elements before they are multiplied."""
        return self.packed_format.zero if self.signed else 0


class PackedWeight(NamedTuple):
    """What kernels know of a packed weight at compile time.

    Args:
        encoding: Its encoding.
        locality: The locality of prefetches, as in `k.prefetch`.
        folds: Whether K is above `FOLDED_SIZE`.
    """

    encoding: str
    locality: int
    folds: bool


def packed_weight(encoding: str, streamed: bool, inner: object, target: Target) -> PackedWeight:
    """The facts of a weight whose rows have `inner` elements; a `streamed` one is larger than the caches."""
    folds = not isinstance(inner, int) or inner > FOLDED_SIZE
    locality = tuning_of(target).streamed_locality if streamed else KEPT
    return PackedWeight(encoding, locality, folds)


def quantized_tiling(
    target: Target, packed_format: PackedFormat, folds: bool = False
) -> QuantizedTiling:
    """The tiling for a target and a format; matrix tiles keep one accumulator along k."""
    width = target.width(k.f32)
    # the sum of two products, up to 2 * 255 * 127, exceeds 16 bits
    signed = packed_format.element_bits == 8 and not target.dot_i8_lanes(width)
    narrow = bool(target.narrow_dot_i8_lanes(width)) and not target.dot_i8_lanes(width)
    largest = 2**packed_format.element_bits - 1
    # begun with the zero sums of x, sums are those of elements minus the zero point; before that they may wrap
    zero = packed_format.zero
    starts_pairs = narrow and not signed and not packed_format.affine
    magnitude = max(zero, largest - zero) if starts_pairs else largest
    # two products per lane and word; words of x have magnitudes up to 127
    fold = LARGEST_SUM // (2 * 127 * magnitude) if narrow else 0
    if starts_pairs and fold * packed_format.parts < 8:
        raise ValueError(f"{packed_format.encoding}: the sums of a part exceed 16 bits")
    tuning = tuning_of(target)
    single = (0,) * len(tuning.prefetch_distances)
    return QuantizedTiling(
        packed_format,
        width,
        signed,
        fold,
        narrow,
        zero=0 if signed else zero,
        starts_pairs=starts_pairs,
        prefetch_distances=tuning.prefetch_distances,
        far_distances=tuning.far_distances,
        prefetches_bytes=tuning.prefetches_bytes,
        turns=tuning.turns.get(packed_format.encoding, single) if width >= 16 else single,
        folds=folds and not target.tile_products,
    )


def panel_blocks(t: QuantizedTiling, matrix_tiles: bool) -> int:
    """The number of blocks of k that are unpacked together, in whole units; half as many if signs are stored apart."""
    if not t.splits_signs or matrix_tiles:
        return PANEL
    span = t.packed_format.span
    return max(PANEL // 2 // span, 1) * span


class UnpackedStrip(NamedTuple):
    """Some blocks of a strip, unpacked.

    Args:
        elements: Bytes `[block][8][COLUMNS][4]`, flat.
        scales: `[block][parts][COLUMNS]`, flat.
        offsets: `[block][parts][COLUMNS]`, flat; of formats with offsets.
        signs: -1 for negative elements, else 0, in the shape of `elements`; only if elements are magnitudes.
        corrections: i32 `[block][COLUMNS]`, flat, the sums of negative elements' magnitudes; only if elements are
            magnitudes.
    """

    elements: Any
    scales: Any
    offsets: Any
    signs: Any
    corrections: Any


class Prefetches(NamedTuple):
    """The prefetches of a pass; distances are in bytes, 0: there are none.

    Args:
        distance: The distance of prefetches into the L1 cache.
        locality: Their locality, as in `k.prefetch`.
        far_distance: The distance of prefetches into the L2 cache.
    """

    distance: int
    locality: int = KEPT
    far_distance: int = 0


def prefetches_of(rows: int, locality: int, t: QuantizedTiling, strips: int = 1) -> Prefetches:
    """The prefetches of a pass of some rows over one strip, or over two, each of which is read half as fast."""
    if t.packed_format.bits == 8 and rows == 1 and not t.prefetches_bytes:
        return Prefetches(0)
    return Prefetches(t.prefetch_distances[rows - 1], locality, t.far_distances[rows - 1] // strips)


@k.inline
def prefetch_ahead(lines: k.View, at: k.Value, size: int, ahead: Prefetches) -> None:
    """Prefetches what lies some distance behind bytes that are read now; beyond a strip lies the next one.

    Each pass prefetches the cache lines that it reads, in the order in which it reads them, and not many at once: the
    hardware prefetchers then see one rising stream.

    Args:
        lines: The bytes of a block or of a unit.
        at: The first byte that is read.
        size: The number of bytes.
        ahead: The prefetches.
    """
    for i in k.static_range(0, size, CACHE_LINE):
        if ahead.far_distance:
            lines.prefetch(at + ahead.far_distance + i, locality=L2)
        if ahead.distance:
            lines.prefetch(at + ahead.distance + i, locality=ahead.locality)


def lines_of_word(j: int, packed_format: PackedFormat) -> tuple[int, ...]:
    """The lines of a block that word `j` of x is the first to read."""
    if packed_format.bits == 8:
        return (j,)
    if packed_format.bits < 4:
        # a line has 16 elements; of 3 bits line 0 has the upper bits
        low = (packed_format.first_low + j // 4,) if j % 4 == 0 else ()
        return ((0,) if j == 0 and packed_format.first_low else ()) + low
    # words 4 to 7 are the high halves of the lines of words 0 to 3
    low = (packed_format.first_low + j,) if j < 4 else ()
    # line 0 has the upper bits; of 6 bits line 5 has those of words 4 to 7
    upper = (0,) if j == 0 and packed_format.first_low else ()
    return (*upper, *low, *((5,) if packed_format.bits == 6 and j == 4 else ()))


@k.inline
def moved_bits(octets: k.Value, by: int) -> Any:
    """Bytes whose bits are moved up, or down if `by` is negative; bits of neighbors may enter, which callers mask."""
    words: Any = octets if k.target().shifts_bytes else k.bitcast(octets, k.u16)
    return k.bitcast(words << by if by >= 0 else words >> -by, k.u8)


@k.inline
def load_elements(
    lines: k.View, at: k.Integer, j: int, packed_format: PackedFormat, width: int
) -> Any:
    """Elements ``4 j … 4 j + 3`` of a block of `width` rows, as unsigned bytes.

    Args:
        lines: The packed bytes.
        at: The first byte of the block's first line that belongs to these rows.
        j: The index of the four elements.
        packed_format: The format.
        width: The number of rows of the weight.
    """
    if packed_format.bits == 8:
        return lines.load(at + j * LINE, width=4 * width)
    if packed_format.bits < 4:
        pairs = lines.load(at + (packed_format.first_low + j // 4) * LINE, width=4 * width)
        two = moved_bits(pairs, -2 * (j % 4)) & 3
        if packed_format.bits == 2:
            return two
        return two | moved_bits(lines.load(at, width=4 * width), 2 - j) & 4
    low = lines.load(at + (packed_format.first_low + j % 4) * LINE, width=4 * width)
    if packed_format.levels:
        # a lookup ignores the upper halves
        return k.lookup(level_table(), moved_bits(low, -4) if j >= 4 else low)
    low = (moved_bits(low, -4) if j >= 4 else low) & 15
    if packed_format.bits == 5:
        return low | moved_bits(lines.load(at, width=4 * width), 4 - j) & 16
    if packed_format.bits == 6:
        upper = lines.load(at + 5 * (j // 4) * LINE, width=4 * width)
        return low | moved_bits(upper, 4 - 2 * (j % 4)) & 48
    return low


@k.inline
def add_products(acc: k.Value, elements: k.Value, word: k.Value, t: QuantizedTiling) -> Any:
    """Adds the products of four elements adjacent in k of each column with a word of x, its four elements in a row.

    Args:
        acc: Sums in i32, or in i16 (`QuantizedTiling.fold`), of two products each.
        elements: The elements as bytes, minus `QuantizedTiling.lowered`.
        word: The word of x.
        t: The tiling.
    """
    x = k.bitcast(k.splat(word, t.width), k.i8)
    if t.signed:
        elements = k.bitcast(elements, k.i8)
    elif k.target().signed_bytes:
        # less than 128, so equal as a signed byte
        elements = k.bitcast(elements, k.i8)
    return k.dot_i8(acc, elements, x, narrow=True)


@k.inline
def starting_sums(zero_sums: k.View, rows: int, count: int, t: QuantizedTiling) -> Any:
    """Accumulators for a part of a block, initialized with the zero sums of `rows` rows, `count` vectors each."""
    acc = k.tile(k.i32, (rows, count), width=t.width, fill=0)
    if not t.packed_format.affine and not t.signed and not t.starts_pairs:
        for r in k.static_range(rows):
            zero_sum = zero_sums.view(k.i32)[r]
            for v in k.static_range(count):
                acc[r, v] = k.splat(zero_sum, t.width)
    return acc


@k.inline
def starting_pairs(zero_sums: k.View, rows: int, count: int, t: QuantizedTiling) -> Any:
    """Sums in 16 bits, initialized with the zero sums of `rows` rows where they have some, `count` vectors each."""
    pairs = k.tile(k.i16, (rows, count), width=2 * t.width, fill=0)
    if t.starts_pairs:
        for r in k.static_range(rows):
            pair = k.bitcast(k.splat(zero_sums.view(k.i32)[r], t.width), k.i16)
            for v in k.static_range(count):
                pairs[r, v] = pair
    return pairs


@k.inline
def add_pairs(acc: k.View, pairs: k.View, rows: int, count: int, t: QuantizedTiling) -> None:
    """Adds sums in i16 to accumulators."""
    # products with 1 add pairs in 32 bits
    ones = k.splat(k.i16(1), 2 * t.width)
    for r in k.static_range(rows):
        for v in k.static_range(count):
            acc[r, v] = k.dot_i16(acc[r, v], pairs[r, v], ones)


@k.inline
def load_scales(
    unit: k.View, block: k.View, at: k.Value, packed_format: PackedFormat, index: int, width: int
) -> Any:
    """Scales (`index` 0; 1 of the second part) or offsets (index `parts`) of `width` rows.

    Args:
        unit: The bytes of a unit.
        block: The bytes of a block of it.
        at: The first row.
        packed_format: The format.
        index: The number of the scales among those of the block.
        width: The number of rows of the weight.
    """
    # the float16 scales of the offsets follow those of the elements
    half = 1 if index >= packed_format.parts else 0
    d = k.cast(unit.view(k.f16).load(half * ROWS + at, width=width), k.f32)
    if not packed_format.two_levels:
        return d
    multipliers = block[packed_format.lines * LINE :]
    if packed_format.multipliers == SIX_BITS:
        return d * k.cast(
            six_bits(multipliers, at, packed_format, index, width) - MULTIPLIER_ZERO, k.f32
        )
    if packed_format.multipliers == NIBBLES:
        level = multipliers.load(index % packed_format.parts * ROWS + at, width=width)
        return d * k.cast(level >> 4 if half else level & 15, k.f32)
    level = multipliers.load(index * ROWS + at, width=width)
    if packed_format.encoding == "Q6_K":  # multipliers of Q6_K are signed
        return d * k.cast(k.bitcast(level, k.i8), k.f32)
    return d * k.cast(level, k.f32)


@k.inline
def load_field(fields: k.View, at: k.Value, bits: int, width: int) -> Any:
    """Fields of `width` rows, from row `at` on, each in the lower bits of a lane of i32; see `packed.store_field`."""
    size = 2 * bits
    octets = fields.load(at // 16 * size + at % size, width=min(width, size))
    if width > size:
        octets = k.shuffle(octets, None, tuple(i % size for i in range(width)))
    shifts = (k.iota(k.i32, width) + k.i32(at % 16)) // size * bits
    return k.cast(octets, k.i32) >> shifts


@k.inline
def six_bits(
    multipliers: k.View, at: k.Value, packed_format: PackedFormat, index: int, width: int
) -> Any:
    """Multipliers of six bits of a part, from row `at` on, as i32."""
    low = load_field(multipliers, at, 4 * packed_format.parts, width)
    high = load_field(
        multipliers[ROWS * packed_format.parts // 2 :], at, 2 * packed_format.parts, width
    )
    return low >> (4 * index) & 15 | (high >> (2 * index) & 3) << 4


@k.inline
def split_signs(strip: UnpackedStrip, n: k.Value, column: k.Value, t: QuantizedTiling) -> None:
    """Splits the elements of a block, as many columns as a vector has lanes, into magnitudes and signs.

    ``w x = |w| ((x ^ sign) - sign)``, with `sign` -1 or 0, so the sum of ``|w| (x ^ sign)`` lacks the sum of negative
    elements' magnitudes. A pair of products fits 16 bits: each lies between -128² and 127².

    Args:
        strip: The strip, whose elements are signed.
        n: The index of the block.
        column: The first column.
        t: The tiling.
    """
    width = t.width
    negative_sums = k.splat(k.i32(0), width)
    for j in k.static_range(8):
        at = (n * 8 + j) * LINE + 4 * column
        elements = k.bitcast(strip.elements.load(at, width=4 * width), k.i8)
        signs = elements >> 7  # -1 or 0, as the shift is arithmetic
        magnitudes = k.bitcast((elements ^ signs) - signs, k.u8)
        negative_sums = k.dot_i8(negative_sums, magnitudes, signs, narrow=True)
        strip.elements.store(at, value=magnitudes)
        strip.signs.store(at, value=signs)
    strip.corrections.store(n * COLUMNS + column, value=0 - negative_sums)


@k.inline
def unpack_strip(
    strip: UnpackedStrip, packed: k.View, begin: k.Value, count: k.Integer, zero: int, t: QuantizedTiling,
    splits_signs: bool,
) -> None:  # fmt: skip
    """Unpacks blocks of a strip.

    Args:
        strip: The result.
        packed: The packed bytes of the strip.
        begin: The first block.
        count: The number of blocks.
        zero: The number that is subtracted from elements.
        t: The tiling.
        splits_signs: Whether elements are split into magnitudes and signs.
    """
    packed_format, width = t.packed_format, t.width
    # where register tiles prefetch the next panel, nothing is prefetched here
    columns = width if t.narrow else COLUMNS
    ahead = (
        Prefetches(0) if t.narrow else Prefetches(t.prefetch_distances[0], KEPT, t.far_distances[0])
    )
    for n in range(count):
        b = begin + n
        unit = packed[b // packed_format.span * packed_format.unit_bytes :]
        block = unit[packed_format.halves + b % packed_format.span * packed_format.block_bytes :]
        # the scales of a unit are in front of its first block
        if b % packed_format.span == 0:
            prefetch_ahead(unit, 0, packed_format.halves, ahead)
        for first in range(0, COLUMNS, columns):
            for j in k.static_range(8):
                for line in lines_of_word(j, packed_format):
                    prefetch_ahead(block, line * LINE, LINE, ahead)
                for column in k.static_range(0, columns, width):
                    byte = 4 * (first + column)
                    elements = load_elements(block, byte, j, packed_format, width)
                    strip.elements.store((n * 8 + j) * LINE + byte, value=elements - zero)
            prefetch_ahead(block, packed_format.lines * LINE, packed_format.multiplier_bytes, ahead)
            for column in k.static_range(0, columns, width):
                at = first + column
                if splits_signs:
                    split_signs(strip, n, at, t)
                for p in k.static_range(packed_format.parts):
                    scale = load_scales(unit, block, at, packed_format, p, width)
                    strip.scales.store((n * packed_format.parts + p) * COLUMNS + at, value=scale)
                    if packed_format.affine:
                        offset = load_scales(
                            unit, block, at, packed_format, packed_format.parts + p, width
                        )
                        strip.offsets.store(
                            (n * packed_format.parts + p) * COLUMNS + at, value=offset
                        )
