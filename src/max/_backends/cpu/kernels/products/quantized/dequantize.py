"""Dequantization of blocks to f32, in the formats that `max.dtype.blocks` describes; a task is a block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from max import kernel as k
from max._backends.kernel_call import KernelCall, Operand, view
from max.dtype.blocks import BLOCK_FORMATS

WIDTH = 16
"""The vector width in lanes: half of a block of 32."""


@k.inline
def half_at(block: Any, at: int) -> Any:
    """Loads the float16 at a byte offset of a block, which may be unaligned."""
    bits = k.u16(block[at]) | k.u16(block[at + 1]) << 8
    return k.f32(k.bitcast(bits, k.f16))


@k.inline
def store_scaled(out: Any, at: Any, q: Any, scale: Any, offset: Any) -> None:
    """Stores ``scale q - offset``."""
    out.store(at, value=k.cast(q, k.f32) * scale - offset)


@k.inline
def decode_q4_0(out: Any, block: Any) -> None:
    """Decodes a block of Q4_0."""
    d = half_at(block, 0)
    q = block.load(2, width=16)  # two elements a byte: 0 to 15 in low halves, 16 to 31 in high ones
    out.store(0, value=d * (k.cast(q & 15, k.f32) - 8.0))
    out.store(16, value=d * (k.cast(q >> 4, k.f32) - 8.0))


@k.inline
def decode_q8_0(out: Any, block: Any) -> None:
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
def decode_affine(out: Any, block: Any, fifth: bool) -> None:
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
def decode_q6_k(out: Any, block: Any) -> None:
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
def decode_block(out: Any, block: Any, encoding: str) -> None:
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
