"""Linear maps: products of matrices, Fourier transforms."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from max._interpreter.core import Array, Frame, implements, widen
from max.mlir import MoOp


@implements("matmul")
def _matmul(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Array:
    return np.matmul(widen(operands[0]), widen(operands[1]))


@implements("irfft")
def _irfft(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Array:
    x = operands[0].astype(np.float64)
    spectrum = x[..., 0] + 1j * x[..., 1]
    return np.fft.irfft(spectrum, op.attr("n"), op.attr("axis"), op.attr("normalization"))
