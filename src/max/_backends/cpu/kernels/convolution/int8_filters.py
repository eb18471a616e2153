"""Filters of 8-bit integers `[R, S, C, F]` packed as strips of 32 columns, and products of their lanes of four bytes.

A strip begins with a line of what the sums of its columns begin with. A row for each tap and four channels follows::

    [strip]     │ corrections: 32 sums │ tap 0, channels 0…3: 32 columns │ tap 0, channels 4…7 │ … │ tap 1, …

Byte dot products multiply unsigned by signed bytes. The filter stays signed; 128 is added to each code of the image,
which is a flip of its sign bit, and 128 times the sum of a column is the same for all of its results: the correction.
"""

from __future__ import annotations

from typing import Any

from max import kernel as k
from max._backends.cpu.kernels.products.int8.panels import FOUR
from max._backends.cpu.kernels.tiles.strips import COLUMNS

SIGN_BITS = 0x80808080 - (1 << 32)
"""The sign bits of four bytes, as a signed word."""


@k.inline
def add_byte_products(acc: k.SIMD, left: k.SIMD, right: k.SIMD, flips: k.SIMD) -> Any:
    """Adds four products a lane, of codes of the image by bytes of the filter; without the correction of the column.

    Args:
        acc: The sums.
        left: A lane of the image in each lane.
        right: Lanes of the filter.
        flips: The sign bits, from memory: LLVM would apply constants before the lane is broadcast, which takes one
            instruction more.
    """
    columns = k.bitcast(right, k.i8)
    if k.target().signed_bytes:
        return k.dot_i8(acc, columns, k.bitcast(left, k.i8))
    return k.dot_i8(acc, k.bitcast(left ^ flips, k.u8), columns)


@k.kernel
def pack_int8_filter(out: k.Output, weight: k.Input, ctx: k.Context) -> None:
    """`out` `[strips, bytes]` from `weight` `[rows, F]` of i8, whose rows are taps and channels, a multiple of four."""
    rows, features = weight.shape[0], weight.shape[1]
    for strip in ctx.parallel(out.shape[0]):
        target = out[strip, FOUR * COLUMNS :]
        first = strip * COLUMNS
        mask = k.iota(k.i64, COLUMNS) + first < features
        sums = k.splat(k.i32(0), COLUMNS)
        for i in range(0, rows, FOUR):
            four = [
                weight.load(i + j, first, width=COLUMNS, mask=mask) for j in k.static_range(FOUR)
            ]
            # interleaved twice: the four bytes of a column are side by side
            even, odd = k.interleave(four[0], four[2]), k.interleave(four[1], four[3])
            elements = k.interleave(even, odd)
            # a dot product with ones adds up the four bytes of each column
            sums = k.dot_i8(sums, k.splat(k.u8(1), FOUR * COLUMNS), elements)
            target.store(i * COLUMNS, value=elements)
        scale = 0 if ctx.target.signed_bytes else -128
        out[strip].view(k.i32).store(0, value=sums * scale)
