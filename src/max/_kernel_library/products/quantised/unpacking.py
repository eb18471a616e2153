"""Packed quantised weights as bytes and scales: in registers for GEMV, in scratch memory for GEMM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from max import kernel as k
from max._kernel_library.products.quantised.packed import LINE, ROWS, PackedFormat
from max._kernel_library.tiles.strips import COLUMNS
from max.kernel import Target


@dataclass(frozen=True)
class QuantisedTiling:
    """How products with a packed weight are computed, all known at compile time.

    Args:
        form: The weight's format.
        width: Lanes of a vector of sums.
        signed: Whether elements of 8 bits are multiplied as signed numbers: where products of bytes are limited to magnitudes of 128.
        zero: What the zero sums of x account for; 0 where elements are multiplied as signed numbers.
    """

    form: PackedFormat
    width: int
    signed: bool
    zero: int


def quantised_tiling(target: Target, form: PackedFormat) -> QuantisedTiling:
    """The tiling for a target and a format."""
    width = target.width(k.f32)
    signed = form.bits == 8 and not target.dot_i8_lanes(width)
    return QuantisedTiling(form, width, signed, 0 if signed else form.zero)


class UnpackedStrip(NamedTuple):
    """Some blocks of a strip, unpacked.

    Args:
        elements: Bytes `[block][8][COLUMNS][4]`, flat.
        scales: `[block][parts][COLUMNS]`, flat.
        offsets: `[block][COLUMNS]`, flat; of formats with offsets.
    """

    elements: Any
    scales: Any
    offsets: Any


@k.inline
def load_elements(lines: Any, at: Any, j: int, form: PackedFormat, width: int) -> Any:
    """Elements ``4 j … 4 j + 3`` of a block of `width` rows, as unsigned bytes.

    Args:
        lines: The packed bytes.
        at: The first byte of the block's first line that belongs to these rows.
        j: Which four elements.
        form: The format.
        width: Rows of the weight.
    """
    if form.bits == 8:
        return lines.load(at + j * LINE, width=4 * width)
    low = lines.load(at + j % 4 * LINE, width=4 * width)
    low = low >> 4 if j >= 4 else low & 15
    if form.bits == 5:
        return low | (lines.load(at + 4 * LINE, width=4 * width) >> j & 1) << 4
    if form.bits == 6:
        upper = lines.load(at + (4 + j // 4) * LINE, width=4 * width) >> (2 * (j % 4)) & 3
        return low | upper << 4
    return low


@k.inline
def add_products(acc: Any, elements: Any, word: Any, t: QuantisedTiling) -> Any:
    """Adds the products of four neighbours in k of each column with those of a row of x, which are one word."""
    x = k.bitcast(k.splat(word, t.width), k.i8)
    if t.signed:
        elements = k.bitcast(elements ^ 128, k.i8)
    elif k.target().signed_bytes:
        # less than 128: the same number as a signed byte
        elements = k.bitcast(elements, k.i8)
    return k.dot_i8(acc, elements, x, narrow=True)


@k.inline
def load_scales(scales: Any, at: Any, form: PackedFormat, part: Any, index: int, width: int) -> Any:
    """Scales (`index` 0) or offsets (1) of `width` rows.

    Args:
        scales: The scales of a unit.
        at: The first row.
        form: The format.
        part: The part of the unit.
        index: Scales or offsets.
        width: Rows of the weight.
    """
    d = k.cast(scales.view(k.f16).load(index * ROWS + at, width=width), k.f32)
    if not form.two_levels:
        return d
    parts = form.span * form.parts
    levels = scales[form.halves + index * parts * ROWS :]
    level = levels.load(part * ROWS + at, width=width)
    if form.encoding == "Q6_K":
        return d * k.cast(k.bitcast(level, k.i8), k.f32)
    return d * k.cast(level, k.f32)


@k.inline
def unpack_strip(
    strip: UnpackedStrip, packed: Any, begin: Any, count: Any, zero: int, t: QuantisedTiling
) -> None:
    """Unpacks blocks of a strip.

    Args:
        strip: The result.
        packed: The packed bytes of the strip.
        begin: The first block.
        count: The number of blocks.
        zero: What is subtracted from elements.
        t: The tiling.
    """
    form, width = t.form, t.width
    for n in range(count):
        b = begin + n
        scales = packed[b // form.span * form.unit_bytes :]
        lines = scales[form.scale_bytes + b % form.span * (form.lines * LINE) :]
        for column in range(0, COLUMNS, width):
            for j in k.static_range(8):
                elements = load_elements(lines, 4 * column, j, form, width)
                strip.elements.store((n * 8 + j) * LINE + 4 * column, value=elements - zero)
            for p in k.static_range(form.parts):
                part = b % form.span * form.parts + p
                scale = load_scales(scales, column, form, part, 0, width)
                strip.scales.store((n * form.parts + p) * COLUMNS + column, value=scale)
            if form.affine:
                offset = load_scales(scales, column, form, b % form.span, 1, width)
                strip.offsets.store(n * COLUMNS + column, value=offset)
