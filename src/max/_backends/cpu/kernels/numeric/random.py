"""Random numbers by a counter: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).

The key is the seed, the counter the number of a block of four elements and the stream, the number of the op in its
graph. So an element depends on nothing but seed, stream and its place: not on the number of workers, nor on the width
of vectors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from max import kernel as k
from max._backends.kernel_call import KernelCall, Operand, view

MULTIPLIER_0, MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10
TWO_PI = 6.283185307179586


@k.inline
def high_and_low(x: k.Value, multiplier: int) -> Any:
    """Both halves of the 64-bit products of lanes."""
    product = k.cast(x, k.u64) * k.u64(multiplier)
    return k.cast(product >> k.u64(32), k.u32), k.cast(product, k.u32)


@k.inline
def philox(block: k.SIMD, stream: k.Value, seed: k.Integer) -> Any:
    """The four words of each block."""
    width = block.width
    c0 = k.cast(block, k.u32)
    c1 = k.cast(block >> k.u64(32), k.u32)  # the upper half of the block's number
    c2 = k.splat(k.u32(stream), width)
    c3 = k.splat(k.u32(0), width)
    key_0 = k.u32(seed)
    key_1 = k.u32(seed >> k.u64(32))
    for _ in k.static_range(ROUNDS):
        high_0, low_0 = high_and_low(c0, MULTIPLIER_0)
        high_1, low_1 = high_and_low(c2, MULTIPLIER_1)
        c0 = high_1 ^ c1 ^ key_0
        c1 = low_1
        c2 = high_0 ^ c3 ^ key_1
        c3 = low_0
        key_0 = key_0 + k.u32(WEYL_0)
        key_1 = key_1 + k.u32(WEYL_1)
    return c0, c1, c2, c3


@k.inline
def unit(word: k.Integer) -> Any:
    """The upper 24 bits of words as numbers in [0, 1)."""
    # 24 bits are exact in f32
    return k.cast(k.cast(word >> k.u32(8), k.i32), k.f32) * k.f32(2.0**-24)


@k.inline
def gaussian_pair(first: k.Integer, second: k.Integer) -> Any:
    """Two standard normal numbers of two words each (Box and Muller, 1958)."""
    # the middle of an interval of 2^-24: never 0
    radius = k.sqrt(k.f32(-2) * k.log(unit(first) + k.f32(2.0**-25)))
    angle = unit(second) * k.f32(TWO_PI)
    return radius * k.cos(angle), radius * k.sin(angle)


@k.kernel
def random(
    out: k.Output[k.f32, 1],
    seed: k.Input[k.i64, 1],
    ctx: k.Context,
    *,
    stream: int,
    normal: bool,
) -> None:
    """`out[i]` is element `i % 4` of block `i // 4`."""
    width = ctx.target.width(k.f32)
    size = out.shape[0]
    key = k.u64(seed[0])
    for step in ctx.parallel(k.ceildiv(size, 4 * width)):
        block = k.iota(k.u64, width) + k.u64(step * width)  # four words a block
        a, b, c, d = philox(block, stream, key)
        if normal:
            w, x = gaussian_pair(a, b)
            y, z = gaussian_pair(c, d)
        else:
            w, x, y, z = unit(a), unit(b), unit(c), unit(d)
        # block by block: w x y z
        four = k.interleave(k.interleave(w, y), k.interleave(x, z))
        first = step * (4 * width)
        if first + 4 * width <= size:
            out.store(first, value=four)
        else:
            out.store(first, value=four, mask=k.iota(k.i64, 4 * width) < size - first)


def _lower_random(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    """The call for `mo.random`, on a flat result."""
    rank = len(results[0].shape)
    args = (
        view("result", 0, results[0], (range(rank),), static=False),
        view("operand", 0, operands[0], ((),)),
    )
    params = {
        "stream": int(attributes["stream"]),
        "normal": attributes["distribution"] == "normal",
    }
    return KernelCall(random, args, params)


LOWERINGS = {"mo.random": _lower_random}
