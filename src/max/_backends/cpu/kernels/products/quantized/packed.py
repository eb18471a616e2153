"""The layout of packed quantized weights, and the packing at model load.

Rows of a weight are packed in groups of 32. A group is a sequence of units, one per block of the encoding along k (32
or 256 elements). A unit holds its float16 scales, then its blocks of 32 elements adjacent in k; a block holds its
4, 5, 6 or 8 lines of 128 bytes, then its integer multipliers::

    group   │ unit 0           │ unit 1           │ …
    unit    │ scales │ block 0 │ block 1 │ …
    block   │ line 0 │ line 1 │ … │ multipliers │
    line j  │ row 0: 4 bytes │ row 1: 4 bytes │ … │ row 31: 4 bytes │

- 2 bits: elements ``4 j + i`` and ``16 + 4 j + i`` are at bits ``2 j`` of lines 0 and 1;
- 3 bits: a line before these has the upper bits, of element ``4 j + i`` at bit ``j``;
- 4 bits: byte ``4 r + i`` of line ``j`` has elements ``4 j + i`` (low half) and ``16 + 4 j + i`` (high half) of row
  ``r``;
- 5 bits: a line before these has the upper bits, of element ``4 j + i`` at bit ``j``;
- 6 bits: a line before these and one behind them have the upper bits, of element ``4 j + i`` at bits ``2 (j % 4)``;
- 8 bits: byte ``4 r + i`` of line ``j`` has element ``4 j + i``.

A kernel reads a unit in the order of its addresses, as hardware prefetchers follow only such a stream.

Four elements of a row that are adjacent in k are adjacent in memory, as byte dot product instructions require, for
every vector width, and a group is a single sequential stream. Elements are unsigned: the zero sums of x account for
the zero point.

Scales are 32 values of float16, and 32 for the offsets. Multipliers, of units of 256 elements, are as `Multipliers`
says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from max import kernel as k
from max._backends.cpu.kernels.products.dense import panels
from max._backends.cpu.kernels.products.int8 import panels as int8_panels
from max._backends.cpu.kernels.products.quantized.dequantize import (
    level_scale,
    scale_and_offset,
    third_scale,
)
from max._backends.kernel_call import KernelCall, Operand, run_time_views
from max._dataclass import dataclass
from max.dtype.blocks import BLOCK_FORMATS

ROWS = 32
"""The number of rows of a group."""
BLOCK = 32
"""The number of elements of a block along k."""
LINE = 4 * ROWS
"""The number of bytes of a line."""


BYTES, NIBBLES, SIX_BITS = "bytes", "nibbles", "six bits"
"""The forms of integer multipliers of a block:

- ``bytes``: 32 bytes for each part (Q6_K has two), then those of the offsets;
- ``nibbles``: 32 bytes for each part, with the scale in the lower and the offset in the upper half;
- ``six bits``: a field for each row with the lower four bits of all parts, then one with the upper two (`store_field`).
"""


@dataclass(frozen=True)
class PackedFormat:
    """The layout of a packed weight.

    Args:
        encoding: The encoding of the checkpoint.
        bits: The number of bits of an element: 2 to 6, or 8.
        zero: The zero point, which is subtracted from the unsigned elements.
        parts: The number of scales of a block of 32.
        affine: Whether offsets are subtracted from scaled elements.
        multipliers: The form of integer multipliers.
        levels: Whether elements are numbers of levels (`LEVELS`), whose zero point is 128.
    """

    encoding: str
    bits: int
    zero: int
    parts: int = 1
    affine: bool = False
    multipliers: str = BYTES
    levels: bool = False

    @property
    def element_bits(self) -> int:
        """The number of bits of an unpacked element."""
        return 8 if self.levels else self.bits

    @property
    def lines(self) -> int:
        """The number of lines of a block."""
        return self.bits

    @property
    def super_block(self) -> int:
        """The number of elements of a row in a unit, which share a float16 scale."""
        return BLOCK_FORMATS[self.encoding].elements

    @property
    def two_levels(self) -> bool:
        """Whether integer multipliers refine the float16 scales."""
        return self.super_block > BLOCK

    @property
    def halves(self) -> int:
        """The bytes of the float16 scales of a unit."""
        return 2 * ROWS * (2 if self.affine else 1)

    @property
    def first_low(self) -> int:
        """The first of a block's lines with the low halves."""
        return 1 if self.bits in (3, 5, 6) else 0

    @property
    def multiplier_bytes(self) -> int:
        """The bytes of the integer multipliers of a block."""
        if not self.two_levels:
            return 0
        if self.multipliers == SIX_BITS:
            return ROWS * self.parts * 6 // 8
        return ROWS * (self.parts + self.affine * (self.multipliers == BYTES))

    @property
    def block_bytes(self) -> int:
        """The bytes of a block of 32 elements."""
        return self.multiplier_bytes + self.lines * LINE

    @property
    def span(self) -> int:
        """The number of blocks of 32 elements in a unit."""
        return self.super_block // BLOCK

    @property
    def unit_bytes(self) -> int:
        """The bytes of a unit."""
        return self.halves + self.span * self.block_bytes

    def group_bytes(self, inner: Any) -> Any:
        """The bytes of a group of rows of `inner` elements."""
        return inner // self.super_block * self.unit_bytes


FORMATS: Mapping[str, PackedFormat] = {
    packed_format.encoding: packed_format
    for packed_format in (
        PackedFormat("Q4_0", 4, 8),
        PackedFormat("Q8_0", 8, 128),
        PackedFormat("Q4_K", 4, 0, affine=True),
        PackedFormat("Q5_K", 5, 0, affine=True),
        PackedFormat("Q6_K", 6, 32, parts=2),
        PackedFormat("Q2_K", 2, 0, parts=2, affine=True, multipliers=NIBBLES),
        PackedFormat("Q3_K", 3, 4, parts=2, multipliers=SIX_BITS),
        PackedFormat("IQ4_NL", 4, 128, levels=True),
        PackedFormat("IQ4_XS", 4, 128, multipliers=SIX_BITS, levels=True),
    )
}
MULTIPLIER_ZERO = 32
"""The zero point of multipliers of six bits."""
DENSE = ("rows", "columns")
"""The encodings of dense weights, for layouts `[N, K]` and `[K, N]`."""


@k.inline
def store_words(lines: k.View, row: k.Value, first: int, bytes_: Any) -> None:
    """Writes 16 bytes of a row: four to each line, from line `first` on."""
    words = k.bitcast(bytes_, k.u32)
    for j in k.static_range(4):
        lines[(first + j) * ROWS + row] = words[j]  # [line][row], a word each


@k.inline
def lines_of(unit: k.View, block: int, packed_format: PackedFormat) -> Any:
    """The lines of a block of a unit, as words."""
    return unit[packed_format.halves + block * packed_format.block_bytes :].view(k.u32)


@k.inline
def multipliers_of(unit: k.View, block: int, packed_format: PackedFormat) -> Any:
    """The integer multipliers of a block of a unit."""
    return unit[
        packed_format.halves + block * packed_format.block_bytes + packed_format.lines * LINE :
    ]


@k.inline
def pack_q4_0(unit: k.View, row: k.Integer, block: k.View, packed_format: PackedFormat) -> None:
    """Packs a block of Q4_0 or IQ4_NL; its bytes keep their order."""
    # rows of a checkpoint's blocks may be unaligned
    unit.view(k.u16)[row] = k.u16(block[0]) | k.u16(block[1]) << 8
    store_words(lines_of(unit, 0, packed_format), row, 0, block.load(2, width=16))


@k.inline
def pack_q8_0(unit: k.View, row: k.Integer, block: k.View, packed_format: PackedFormat) -> None:
    """Packs a block of Q8_0."""
    unit.view(k.u16)[row] = k.u16(block[0]) | k.u16(block[1]) << 8
    lines = lines_of(unit, 0, packed_format)
    for half in k.static_range(2):
        # signed to unsigned
        store_words(lines, row, 4 * half, block.load(2 + 16 * half, width=16) ^ 128)


@k.inline
def nibbles(low: k.Integer, high: k.Integer) -> Any:
    """Elements 0 to 15 and 16 to 31 of a block, each less than 16, as one vector of bytes."""
    return low | high << 4


@k.inline
def pack_affine(unit: k.View, row: k.Integer, block: k.View, packed_format: PackedFormat) -> None:
    """Packs a block of Q4_K or Q5_K, which consists of eight blocks of 32."""
    halves = unit.view(k.u16)
    # [2][ROWS]: d, then m
    for i in k.static_range(2):
        halves[ROWS * i + row] = k.u16(block[2 * i]) | k.u16(block[2 * i + 1]) << 8
    # d, m and 12 bytes of scales; in Q5_K then 32 bytes of upper bits
    start = 48 if packed_format.bits == 5 else 16
    for part in k.static_range(8):
        scale, offset = scale_and_offset(block, part)
        multipliers = multipliers_of(unit, part, packed_format)
        multipliers[row] = scale
        multipliers[ROWS + row] = offset
        low = block.load(start + part // 2 * 32, width=16)
        high = block.load(start + part // 2 * 32 + 16, width=16)
        target = lines_of(unit, part, packed_format)
        # odd parts are the high halves of the bytes
        if part % 2:
            store_words(target, row, packed_format.first_low, nibbles(low >> 4, high >> 4))
        else:
            store_words(target, row, packed_format.first_low, nibbles(low & 15, high & 15))
        if packed_format.bits == 5:
            # element 4 j + i has bit j of byte i
            word = k.u32(0)
            for half in k.static_range(2):
                bits = k.bitcast(block.load(16 + 16 * half, width=16) >> part & 1, k.u32)
                for j in k.static_range(4):
                    word = word | bits[j] << (4 * half + j)
            target[row] = word


@k.inline
def pack_q6_k(unit: k.View, row: k.Integer, block: k.View, packed_format: PackedFormat) -> None:
    """Packs a block of Q6_K, which consists of eight blocks of 32 with two scales each."""
    # 128 bytes of low halves, 64 of upper bits, 16 scales, d
    unit.view(k.u16)[row] = k.u16(block[208]) | k.u16(block[209]) << 8
    # 16 scales: two for each of the eight blocks of 32
    for part in k.static_range(16):
        multipliers_of(unit, part // 2, packed_format)[part % 2 * ROWS + row] = block[192 + part]
    for half in k.static_range(2):
        for group in k.static_range(4):
            at = half * 64 + group % 2 * 32
            low, high = block.load(at, width=16), block.load(at + 16, width=16)
            target = lines_of(unit, half * 4 + group, packed_format)
            # groups 2 and 3 are the high halves of the bytes
            if group // 2:
                store_words(target, row, packed_format.first_low, nibbles(low >> 4, high >> 4))
            else:
                store_words(target, row, packed_format.first_low, nibbles(low & 15, high & 15))
            for i in k.static_range(2):
                upper = block.load(128 + half * 32 + 16 * i, width=16) >> (2 * group) & 3
                bits = k.bitcast(upper, k.u32)
                word = k.u32(0)
                for j in k.static_range(4):
                    word = word | bits[j] << (2 * j)
                # upper bits of elements 0 to 15 are in line 0, the others in line 5, behind the low halves
                target[5 * i * ROWS + row] = word


@k.inline
def pack_q2_k(unit: k.View, row: k.Value, block: k.View, packed_format: PackedFormat) -> None:
    """Packs a block of Q2_K, which consists of eight blocks of 32 with two scales and offsets each."""
    halves = unit.view(k.u16)
    # 16 scales with offsets, 64 bytes of elements, d and m
    for i in k.static_range(2):
        halves[ROWS * i + row] = k.u16(block[80 + 2 * i]) | k.u16(block[81 + 2 * i]) << 8
    for part in k.static_range(8):
        multipliers = multipliers_of(unit, part, packed_format)
        for p in k.static_range(2):
            multipliers[ROWS * p + row] = block[2 * part + p]
        lines = lines_of(unit, part, packed_format)
        for i in k.static_range(2):
            q = block.load(16 + part // 4 * 32 + 16 * i, width=16) >> (2 * (part % 4)) & 3
            lines[i * ROWS + row] = spread_word(q, 2)


@k.inline
def spread_word(elements: Any, bits: int) -> Any:
    """A word of 16 elements of one or two bits, given as bytes: element ``4 j + i`` at bit ``bits j`` of byte i."""
    words = k.bitcast(elements, k.u32)
    word = k.u32(0)
    for j in k.static_range(4):
        word = word | words[j] << (bits * j)
    return word


@k.inline
def store_field(fields: k.View, row: k.Value, value: k.Value, bits: int) -> None:
    """Stores a field of 2, 4 or 8 bits of a row; rows of a half are stored in ascending order.

    Sixteen rows take ``2 bits`` bytes, so that weights that share a group write bytes of their own: row ``r`` has byte
    ``r % (2 bits)``, from bit ``r // (2 bits) * bits`` on.
    """
    size = 2 * bits
    at, first = row // 16 * size + row % size, row % 16 // size * bits
    kept = k.u32(fields[at]) & ((k.u32(1) << k.u32(first)) - 1)
    fields[at] = k.u8(kept | k.u32(value) << k.u32(first))


@k.inline
def store_six_bits(
    multipliers: k.View, row: k.Value, values: Any, packed_format: PackedFormat
) -> None:
    """Stores the multipliers of the parts of a block."""
    low, high = k.u8(0), k.u8(0)
    for p in k.static_range(packed_format.parts):
        low = low | (values[p] & 15) << (4 * p)
        high = high | values[p] >> 4 << (2 * p)
    store_field(multipliers, row, low, 4 * packed_format.parts)
    store_field(multipliers[ROWS * packed_format.parts // 2 :], row, high, 2 * packed_format.parts)


@k.inline
def pack_q3_k(unit: k.View, row: k.Integer, block: k.View, packed_format: PackedFormat) -> None:
    """Packs a block of Q3_K, which consists of eight blocks of 32 with two scales each."""
    # 32 bytes of upper bits, 64 of lower ones, 12 of scales, d
    unit.view(k.u16)[row] = k.u16(block[108]) | k.u16(block[109]) << 8
    for part in k.static_range(8):
        lines = lines_of(unit, part, packed_format)
        scales = (third_scale(block, 2 * part), third_scale(block, 2 * part + 1))
        store_six_bits(multipliers_of(unit, part, packed_format), row, scales, packed_format)
        upper = k.u32(0)
        for i in k.static_range(2):
            q = block.load(32 + part // 4 * 32 + 16 * i, width=16) >> (2 * (part % 4)) & 3
            lines[(1 + i) * ROWS + row] = spread_word(q, 2)
            bits = block.load(16 * i, width=16) >> part & 1
            upper = upper | spread_word(bits, 1) << (4 * i)
        lines[row] = upper


@k.inline
def pack_iq4_xs(unit: k.View, row: k.Integer, block: k.View, packed_format: PackedFormat) -> None:
    """Packs a block of IQ4_XS, which consists of eight blocks of 32."""
    unit.view(k.u16)[row] = k.u16(block[0]) | k.u16(block[1]) << 8
    for part in k.static_range(8):
        scales = (level_scale(block, part),)
        store_six_bits(multipliers_of(unit, part, packed_format), row, scales, packed_format)
        store_words(
            lines_of(unit, part, packed_format), row, 0, block.load(8 + 16 * part, width=16)
        )


@k.inline
def pack_row_block(
    unit: k.View, row: k.Integer, block: k.View, packed_format: PackedFormat
) -> None:
    """Packs a block of a row."""
    encoding = packed_format.encoding
    if encoding in ("Q4_0", "IQ4_NL"):
        pack_q4_0(unit, row, block, packed_format)
    if encoding == "Q8_0":
        pack_q8_0(unit, row, block, packed_format)
    if encoding in ("Q4_K", "Q5_K"):
        pack_affine(unit, row, block, packed_format)
    if encoding == "Q6_K":
        pack_q6_k(unit, row, block, packed_format)
    if encoding == "Q2_K":
        pack_q2_k(unit, row, block, packed_format)
    if encoding == "Q3_K":
        pack_q3_k(unit, row, block, packed_format)
    if encoding == "IQ4_XS":
        pack_iq4_xs(unit, row, block, packed_format)


@k.kernel
def pack(
    out: k.Output, w: k.Input, ctx: k.Context, *, encoding: str, shares: int = 1, share: int = 0
) -> None:
    """Packs rows of blocks `w` `[N, bytes]` into `out` `[groups, group_bytes]`; missing rows are copies of the last
    one.

    If `shares` weights share each group equally, this one has index `share`.
    """
    packed_format = FORMATS[encoding]
    size = BLOCK_FORMATS[encoding].bytes
    height = ROWS // shares
    for group in ctx.parallel(out.shape[0]):
        for i in range(height):
            source = w[k.min(group * height + i, w.shape[0] - 1)]
            row = share * height + i
            for b in range(w.shape[1] // size):
                unit = out[group, b * packed_format.unit_bytes : (b + 1) * packed_format.unit_bytes]
                block = source[b * size :]
                pack_row_block(unit, row, block, packed_format)


def _lower_pack(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    """The call for `mok.pack`; dense and int8 encodings have their own kernels."""
    encoding: str = attributes["encoding"]
    shares, share = attributes.get("shares", 1), attributes.get("share", 0)
    if encoding in int8_panels.ENCODINGS:
        return int8_panels.lower_pack(operands, results, encoding)
    if encoding not in FORMATS:
        return panels.lower_pack(operands, results, encoding == "rows", shares, share)
    args = run_time_views(results[:1], operands[:1])
    return KernelCall(pack, args, {"encoding": encoding, "shares": shares, "share": share})


LOWERINGS = {"mok.pack": _lower_pack}
