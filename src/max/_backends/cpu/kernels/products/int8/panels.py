"""The layout of packed 8-bit integer weights, and the packing at model load.

A panel holds 32 columns of the right operand B `[K, N]`, with four elements adjacent in k side by side::

    [K / 4][32][4]      line k/4   │ column 0: b₀ b₁ b₂ b₃ │ column 1: b₀ b₁ b₂ b₃ │ … │ column 31 │      128 bytes

This is the operand layout of byte dot product instructions. Elements are unsigned: 128 is added to each, and 128 times
the sum of a row of A is subtracted from the row's sums. Targets that only multiply signed bytes subtract the 128 again
before the product. AVX2 sums pairs of products in 16 bits, which overflows with unsigned bytes: there kernels multiply
magnitudes and move the signs to A.
"""

from __future__ import annotations

from collections.abc import Sequence

from max import kernel as k
from max._backends.cpu.kernels.tiles.strips import COLUMNS
from max._backends.cpu.kernels.tiles.tiling import Tiling
from max._backends.kernel_call import KernelCall, Operand, run_time_views
from max.kernel import Target

ENCODINGS = {"int8 rows": True, "int8 columns": False}
"""The encodings of weights, and whether their layout is `[N, K]`."""
FOUR = 4
"""The number of elements adjacent in k that share a lane."""
CHUNK = 512
"""The number of elements along k of a panel that a worker packs per task."""
PACKED_BYTES = 16
"""The number of bytes of a row that are packed per step."""


def int8_tiling(target: Target) -> Tiling:
    """The tiling for a target.

    Args:
        target: The target.
    """
    height = 12 if target.registers >= 32 else 6
    return Tiling(k.i32, k.i32, FOUR, target.width(k.i32), height, 0)


def by_magnitude(target: Target) -> bool:
    """Whether kernels multiply magnitudes: if instructions sum pairs of products in 16 bits.

    Args:
        target: The target.
    """
    width = target.width(k.i32)
    return not target.dot_i8_lanes(width) and bool(target.narrow_dot_i8_lanes(width))


@k.kernel
def pack_int8(out: k.Output, w: k.Input, ctx: k.Context, *, by_rows: bool) -> None:
    """Packs `w`, `[N, K]` if `by_rows`, else `[K, N]`, into `out` `[panels, bytes]`."""
    inner = w.shape[1] if by_rows else w.shape[0]
    columns = w.shape[0] if by_rows else w.shape[1]
    for panel, chunk in ctx.parallel((out.shape[0], k.ceildiv(inner, CHUNK))):
        begin = chunk * CHUNK
        length = k.min(CHUNK, inner - begin)
        target = out[panel, begin * COLUMNS :]
        if by_rows:
            words = target.view(k.i32)
            for column in range(COLUMNS):
                # columns past the last one are copies of it
                row = w[k.min(panel * COLUMNS + column, columns - 1), begin : begin + length]
                for i, mask in k.vectors(length, PACKED_BYTES):
                    # unsigned from here on: + 128 is a flip of the sign bit
                    elements = k.bitcast(row.load(i, width=PACKED_BYTES, mask=mask), k.u8) ^ 128
                    four = k.bitcast(elements, k.i32)
                    for j in k.static_range(PACKED_BYTES // FOUR):
                        words[(i // FOUR + j) * COLUMNS + column] = four[j]  # [K / 4][32] words
        else:
            first = panel * COLUMNS
            mask = k.iota(k.i64, COLUMNS) + first < columns
            for i in range(0, length, FOUR):
                # rows past K may have any value, as A is zero there
                rows = [
                    w.load(k.min(begin + i + j, inner - 1), first, width=COLUMNS, mask=mask)
                    for j in k.static_range(FOUR)
                ]
                # four rows of B interleaved twice: b0 b1 b2 b3 of each column side by side
                even, odd = k.interleave(rows[0], rows[2]), k.interleave(rows[1], rows[3])
                elements = k.bitcast(k.interleave(even, odd), k.u8) ^ 128
                target.store(i * COLUMNS, value=elements)


def lower_pack(
    operands: Sequence[Operand], results: Sequence[Operand], encoding: str
) -> KernelCall:
    """The launch that packs a weight."""
    args = run_time_views(results[:1], operands[:1])
    return KernelCall(pack_int8, args, {"by_rows": ENCODINGS[encoding]})
