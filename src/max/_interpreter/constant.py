"""Constants, weights, transfers between devices."""

from __future__ import annotations

from collections.abc import Sequence

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
