"""Normalizations over the last axis."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from max._interpreter.core import Array, Frame, implements, widen
from max._interpreter.reduction import total
from max.mlir import MoOp


@implements("layer_norm")
def _layer_norm(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Array:
    x, gamma, beta = (widen(v) for v in operands)
    mean = np.mean(x, axis=-1, keepdims=True, dtype=np.float64)
    centered = (x - mean).astype(x.dtype)
    variance = total(centered * centered, -1) / x.dtype.type(x.shape[-1])
    return centered / np.sqrt(variance + x.dtype.type(op.attr("epsilon"))) * gamma + beta


@implements("rms_norm")
def _rms_norm(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Array:
    x, gamma = (widen(v) for v in operands)
    scale = gamma + gamma.dtype.type(op.attr("weight_offset"))
    mean = total(x * x, -1) / x.dtype.type(x.shape[-1])
    normal = x / np.sqrt(mean + x.dtype.type(op.attr("epsilon")))
    if not op.attr("multiply_before_cast"):
        normal = widen(normal.astype(operands[0].dtype))
    return normal * scale
