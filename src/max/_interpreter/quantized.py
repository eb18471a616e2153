"""Ops on quantized weights, without quantization of the left operand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from max._interpreter.core import Array, Frame, implements
from max.dtype.blocks import decode, encode
from max.mlir import MoOp


@implements("dequantize")
def _dequantize(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Array:
    return decode(operands[0], op.attr("encoding"))


@implements("quantize")
def _quantize(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Array:
    return encode(operands[0], op.attr("encoding"), *operands[1:])


@implements("qmatmul")
def _qmatmul(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Array:
    x, blocks = operands
    return x.astype(np.float32) @ decode(blocks, op.attr("encoding")).T


def unpack(words: Array, bits: int) -> Array:
    """Unpacks the integers in 32-bit words, lowest bits first: ``[…, n]`` to ``[…, n * 32 / bits]``."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    parts = words.view(np.uint32)[..., None] >> shifts & np.uint32(2**bits - 1)
    return parts.reshape(*words.shape[:-1], -1).astype(np.int32)


@implements("qmatmul_gptq")
def _qmatmul_gptq(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Array:
    x, weight, zeros, scales = operands[:4]
    bits: int = op.attr("bits")
    q = unpack(np.ascontiguousarray(weight.T), bits).T
    # checkpoints store zero points minus 1, modulo 2**bits
    zero = unpack(np.ascontiguousarray(zeros), bits) + 1 & 2**bits - 1
    group = np.arange(len(q)) // op.attr("group_size") if len(operands) == 4 else operands[4]
    out_of_range = (group < 0) | (group >= len(scales))
    if out_of_range.any():
        raise IndexError(
            f"qmatmul_gptq: g_idx has the group {group[out_of_range][0]}, there are {len(scales)}"
        )
    w = scales.astype(np.float32)[group] * (q - zero[group]).astype(np.float32)
    return x.astype(np.float32) @ w
