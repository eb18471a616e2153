"""Fourier transforms."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from max._interpreter.core import Array, Frame, implements
from max.mlir import MoOp


@implements("irfft")
def _irfft(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Array:
    x = operands[0].astype(np.float64)
    spectrum = x[..., 0] + 1j * x[..., 1]
    return np.fft.irfft(spectrum, op.attr("n"), op.attr("axis"), op.attr("normalization"))
