"""Random numbers: Philox4x32-10, and the uniform and normal distributions of its output."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from max._interpreter.core import Array, Frame, implements
from max.mlir import MoOp

__all__ = ["philox"]


def philox(counter: Array, key: Array, rounds: int = 10) -> Array:
    """Philox4x32 (Salmon et al., 2011).

    Args:
        counter: ``[n, 4]`` of uint32.
        key: ``[2]`` of uint32.
        rounds: The number of rounds.

    Returns:
        ``[n, 4]`` of uint32.
    """
    c = [counter[:, i].astype(np.uint64) for i in range(4)]
    k0, k1 = (int(word) for word in key)
    low = np.uint64(0xFFFFFFFF)
    for _ in range(rounds):
        p0, p1 = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [
            (p1 >> np.uint64(32)) ^ c[1] ^ np.uint64(k0),
            p1 & low,
            (p0 >> np.uint64(32)) ^ c[3] ^ np.uint64(k1),
            p0 & low,
        ]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack(c, axis=1).astype(np.uint32)


@implements("random")
def _random(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Array:
    shape = frame.shape(op.results[0].type)
    size = int(np.prod(shape, dtype=np.int64))
    blocks = np.arange(-(-size // 4), dtype=np.uint64)
    counter = np.zeros((blocks.size, 4), np.uint32)
    # the number of the block of 4 words, in 64 bits
    counter[:, 0], counter[:, 1] = blocks & np.uint64(0xFFFFFFFF), blocks >> np.uint64(32)
    counter[:, 2] = op.attr("stream")
    seed = int(operands[0]) & (1 << 64) - 1
    words = philox(counter, np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32))
    # 24 bits, which a float32 holds exactly: no rounding gives 1
    unit = (words >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)
    if op.attr("distribution") == "normal":
        # Box-Muller on pairs of neighbors; the offset keeps the logarithm finite
        radius = np.sqrt(-2 * np.log(unit[:, ::2].astype(np.float64) + 2.0**-25))
        angle = unit[:, 1::2].astype(np.float64) * (2 * np.pi)
        pairs = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=2)
        unit = pairs.reshape(-1, 4).astype(np.float32)
    return unit.reshape(-1)[:size].reshape(shape)
