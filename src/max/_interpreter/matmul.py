"""Matrix multiplication."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from max._interpreter.core import Array, Frame, implements, widen
from max.mlir import MoOp


@implements("matmul")
def _matmul(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Array:
    return np.matmul(widen(operands[0]), widen(operands[1]))
