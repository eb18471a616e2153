"""Dequantization of blocks to f32, in the formats that `max.dtype.blocks` describes; a task is a block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from max import kernel as k
from max._backends.kernel_call import KernelCall, Operand, view
from max.dtype._block_parts import LEVELS
from max.dtype.blocks import BLOCK_FORMATS

WIDTH = 16
"""The vector width in lanes: half of a block of 32."""
LEVEL_WORDS = tuple(
    int.from_bytes(bytes(int(level) + 128 for level in LEVELS[i : i + 8]), "little", signed=True)
    for i in (0, 8)
)
"""The levels of IQ4_NL and IQ4_XS with 128 added, as two words."""


@k.inline
def half_at(block: Any, at: int) -> Any:
    """Loads the float16 at a byte offset of a block, which may be unaligned."""
    bits = k.u16(block[at]) | k.u16(block[at + 1]) << 8
    return k.f32(k.bitcast(bits, k.f16))


@k.inline
def store_scaled(out: k.View, at: k.Integer, q: k.Value, scale: k.Value, offset: k.Value) -> None:
    """Stores ``scale q - offset``."""
    out.store(at, value=k.cast(q, k.f32) * scale - offset)


@k.inline
def decode_q4_0(out: k.View, block: k.View) -> None:
    """Decodes a block of Q4_0."""
    d = half_at(block, 0)
    q = block.load(2, width=16)  # two elements a byte: 0 to 15 in low halves, 16 to 31 in high ones
    out.store(0, value=d * (k.cast(q & 15, k.f32) - 8.0))
    out.store(16, value=d * (k.cast(q >> 4, k.f32) - 8.0))


@k.inline
def decode_q8_0(out: k.View, block: k.View) -> None:
    """Decodes a block of Q8_0."""
    d = half_at(block, 0)
    for i in k.static_range(0, 32, WIDTH):
        q = k.bitcast(block.load(2 + i, width=WIDTH), k.i8)
        out.store(i, value=d * k.cast(q, k.f32))


@k.inline
def scale_and_offset(block: Any, part: int) -> Any:
    """The 6-bit scale and offset of an eighth of a block of Q4_K or Q5_K."""
    # bytes 4 to 15 hold 8 scales and 8 offsets of 6 bits: the first four of each are whole, in bytes 4 to 11
    if part < 4:
        return block[4 + part] & 63, block[8 + part] & 63
    # of the last four the lower bits are in bytes 12 to 15, the upper ones in the upper bits of bytes 4 to 11
    scale = block[8 + part] & 15 | block[part] >> 6 << 4
    offset = block[8 + part] >> 4 | block[4 + part] >> 6 << 4
    return scale, offset


@k.inline
def decode_affine(out: k.View, block: k.View, fifth: bool) -> None:
    """Decodes a block of Q4_K, or of Q5_K, whose fifth bits are in bytes of their own."""
    d = half_at(block, 0)
    m = half_at(block, 2)
    # Q4_K [d, m, scales 12, halves 128]; Q5_K has 32 bytes of fifth bits before the halves
    halves = 48 if fifth else 16
    for part in k.static_range(8):
        scale, offset = scale_and_offset(block, part)
        s = d * k.f32(scale)
        o = m * k.f32(offset)
        for i in k.static_range(0, 32, WIDTH):
            # parts 2 n and 2 n + 1 share 32 bytes, low and high halves
            q = block.load(halves + part // 2 * 32 + i, width=WIDTH)
            q = q >> 4 if part % 2 else q & 15
            if fifth:
                # bit `part` of each byte belongs to this part
                q = q | (block.load(16 + i, width=WIDTH) >> part & 1) << 4
            store_scaled(out, part * 32 + i, q, s, o)


@k.inline
def decode_q6_k(out: k.View, block: k.View) -> None:
    """Decodes a block of Q6_K."""
    # [low halves 128, upper bits 64, scales 16, d]
    d = half_at(block, 208)
    for half in k.static_range(2):
        for group in k.static_range(4):
            for i in k.static_range(0, 32, WIDTH):
                low = block.load(half * 64 + group % 2 * 32 + i, width=WIDTH)
                low = low >> 4 if group // 2 else low & 15
                # a byte has the upper two bits of four groups
                upper = block.load(128 + half * 32 + i, width=WIDTH) >> (2 * group) & 3
                part = half * 8 + group * 2 + i // 16  # a scale for 16 elements
                s = d * k.f32(k.bitcast(block[192 + part], k.i8))
                q = k.cast(low | upper << 4, k.f32) - 32.0  # the zero point is 32
                out.store(half * 128 + group * 32 + i, value=s * q)


@k.inline
def decode_q2_k(out: k.View, block: k.View) -> None:
    """Decodes a block of Q2_K."""
    # [scales and offsets 16, elements 64, d, m]
    d, m = half_at(block, 80), half_at(block, 82)
    for part in k.static_range(16):
        level = block[part]
        at = 16 + part // 8 * 32 + part % 2 * 16
        q = block.load(at, width=WIDTH) >> (2 * (part // 2 % 4)) & 3
        store_scaled(out, 16 * part, q, d * k.f32(level & 15), m * k.f32(level >> 4))


@k.inline
def third_scale(block: Any, part: int) -> Any:
    """The 6-bit scale of a sixteenth of a block of Q3_K."""
    # the lower bits are in bytes 96 to 103, the upper ones in bytes 104 to 107
    low = block[96 + part] & 15 if part < 8 else block[88 + part] >> 4
    return low | (block[104 + part % 4] >> (2 * (part // 4)) & 3) << 4


@k.inline
def level_scale(block: Any, part: int) -> Any:
    """The 6-bit scale of an eighth of a block of IQ4_XS."""
    # the upper bits are in bytes 2 and 3, the lower ones in bytes 4 to 7
    low = block[4 + part // 2] >> (4 * (part % 2)) & 15
    return low | (block[2 + part // 4] >> (2 * (part % 4)) & 3) << 4


@k.inline
def decode_q3_k(out: k.View, block: k.View) -> None:
    """Decodes a block of Q3_K."""
    # [upper bits 32, lower bits 64, scales 12, d]
    d = half_at(block, 108)
    for part in k.static_range(16):
        level = k.f32(third_scale(block, part)) - 32.0
        at = part // 8 * 32 + part % 2 * 16
        q = block.load(32 + at, width=WIDTH) >> (2 * (part // 2 % 4)) & 3
        upper = block.load(part % 2 * 16, width=WIDTH) >> (part // 2) & 1
        out.store(16 * part, value=d * level * (k.cast(q | upper << 2, k.f32) - 4.0))


@k.inline
def level_table() -> Any:
    """The levels with 128 added, as a vector of bytes."""
    words = k.select(k.iota(k.i64, 2) == 0, LEVEL_WORDS[0], LEVEL_WORDS[1])
    return k.bitcast(words, k.u8)


@k.inline
def store_levels(out: k.View, bytes_: k.Integer, scale: k.Value) -> None:
    """Stores 32 scaled levels, whose numbers are the halves of 16 bytes."""
    for half in k.static_range(2):
        number = bytes_ >> 4 if half else bytes_ & 15
        level = k.cast(k.lookup(level_table(), number), k.f32) - 128.0
        out.store(16 * half, value=scale * level)


@k.inline
def decode_iq4_xs(out: k.View, block: k.View) -> None:
    """Decodes a block of IQ4_XS."""
    # [d, upper bits of scales 2, lower ones 4, numbers 128]
    d = half_at(block, 0)
    for part in k.static_range(8):
        level = d * (k.f32(level_scale(block, part)) - 32.0)
        store_levels(out[32 * part :], block.load(8 + 16 * part, width=WIDTH), level)


@k.inline
def decode_block(out: k.View, block: k.View, encoding: str) -> None:
    """Decodes the elements of a block.

    Args:
        out: A flat view of float32, from the block's first element.
        block: A flat view of uint8, from the block's first byte.
        encoding: The format.
    """
    if encoding == "Q4_0":
        decode_q4_0(out, block)
    if encoding == "Q8_0":
        decode_q8_0(out, block)
    if encoding == "Q4_K":
        decode_affine(out, block, False)
    if encoding == "Q5_K":
        decode_affine(out, block, True)
    if encoding == "Q6_K":
        decode_q6_k(out, block)
    if encoding == "Q2_K":
        decode_q2_k(out, block)
    if encoding == "Q3_K":
        decode_q3_k(out, block)
    if encoding == "IQ4_NL":
        store_levels(out, block.load(2, width=WIDTH), half_at(block, 0))
    if encoding == "IQ4_XS":
        decode_iq4_xs(out, block)


@k.kernel
def dequantize(out: k.Output, x: k.Input, ctx: k.Context, *, encoding: str) -> None:
    """`out` `[blocks * elements]` from `x` `[blocks * bytes]`."""
    elements, size = BLOCK_FORMATS[encoding]
    for b in ctx.parallel(x.shape[0] // size):
        decode_block(out[b * elements :], x[b * size :], encoding)


def lower_flat(kernel: Any) -> Any:
    """The lowering of a kernel whose operand and result are flat sequences of blocks."""

    def lower(
        operands: Sequence[Operand],
        results: Sequence[Operand],
        attributes: Mapping[str, Any],
        target: k.Target,
    ) -> KernelCall:
        """The call of the kernel on flat views."""
        out, x = results[0], operands[0]
        args = (
            view("result", 0, out, (range(len(out.shape)),), static=False),
            view("operand", 0, x, (range(len(x.shape)),), static=False),
        )
        return KernelCall(kernel, args, {"encoding": attributes["encoding"]})

    return lower


LOWERINGS = {"mo.dequantize": lower_flat(dequantize)}
