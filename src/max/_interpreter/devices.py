"""What a device holds: constants, weights, transfers and collectives.

The interpreter has one memory: a transfer moves nothing, and every device gets the same array of a collective.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from max._interpreter.core import Array, Frame, implements
from max.mlir import MoOp


@implements("constant")
def _constant(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Array:
    return op.attr("value")


@implements("constant.external")
def _constant_external(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Array:
    return frame.weight(op.attr("name"), op.results[0].type)


@implements("transfer")
def _transfer(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Array:
    return operands[0]


def _inputs(op: MoOp, operands: Sequence[Array]) -> Sequence[Array]:
    return operands[: len(op.results) - 1]


@implements("allreduce")
def _allreduce(frame: Frame, op: MoOp, operands: Sequence[Array]) -> tuple[Array, ...]:
    inputs = _inputs(op, operands)
    dtype = inputs[0].dtype
    # narrow floats are accumulated in f32 and rounded once
    wide = np.dtype(np.float32) if dtype.itemsize < 4 and dtype.kind in "fV" else dtype
    total = inputs[0].astype(wide)
    for x in inputs[1:]:
        total = total + x.astype(wide)
    result = total.astype(dtype)
    return (result,) * len(inputs)


@implements("allgather")
def _allgather(frame: Frame, op: MoOp, operands: Sequence[Array]) -> tuple[Array, ...]:
    inputs = _inputs(op, operands)
    result = np.concatenate(inputs, axis=op.attr("axis"))
    return (result,) * len(inputs)
