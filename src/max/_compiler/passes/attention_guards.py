"""Guards of probabilities: what programs do about rows of scores whose keys are all masked, whose softmax is NaN."""

from __future__ import annotations

import math
from typing import NamedTuple

from xdsl.ir import SSAValue

from max._compiler.passes.base import constant_of
from max._compiler.passes.canonicalize import producer
from max.dtype import DType
from max.mlir import MoOp, TensorType
from max.mlir.ops.elementwise import CastOp, EqualOp, IsNanOp, SelectOp
from max.mlir.ops.reduction import ReduceMaxOp
from max.mlir.ops.shape import BroadcastToOp

__all__ = ["Guard", "guard_of", "number_of"]


class Guard(NamedTuple):
    """A select of 0 for some rows of probabilities.

    Args:
        kind: "nan": probabilities that are NaN become 0; "masked": those of rows whose scores are all -inf do; "":
            there is no guard.
        result: The probabilities after it.
        reader: The op that reads the scores besides the softmax; None if none does.
    """

    kind: str
    result: SSAValue
    reader: MoOp | None


def guard_of(softmax: MoOp) -> Guard:
    """The guard of a softmax, if nothing else reads its probabilities."""
    value = softmax.results[0]
    users = [use.operation for use in value.uses]
    selects = [user for user in users if type(user) is SelectOp]
    none = Guard("", value, None)
    if len(selects) != 1:
        return none
    condition, zero, kept = selects[0].operands
    if kept is not value or number_of(zero) != 0:
        return none
    tests = [user for user in users if type(user) is IsNanOp]
    if len(users) == 2 and len(tests) == 1:
        test = tests[0].results[0]
        if condition is test and test.has_one_use():
            return Guard("nan", selects[0].results[0], None)
    if len(users) == 1 and (reader := _greatest_is_masked(condition, softmax)) is not None:
        return Guard("masked", selects[0].results[0], reader)
    return none


def _greatest_is_masked(condition: SSAValue, softmax: MoOp) -> MoOp | None:
    """The op for the greatest score of each row, if it is read by the condition only, which is that it is -inf."""
    while (inner := producer(condition, BroadcastToOp)) is not None:
        condition = inner.operands[0]
    test = producer(condition, EqualOp)
    if test is None or number_of(test.operands[1]) != -math.inf:
        return None
    greatest = producer(test.operands[0], ReduceMaxOp)
    if greatest is None or not greatest.results[0].has_one_use():
        return None
    same_rows = greatest.attr("axis") == softmax.attr("axis")
    return greatest if same_rows and greatest.operands[0] is softmax.operands[0] else None


def number_of(value: SSAValue) -> float | None:
    """The value of a scalar constant, seen through casts, reshapes and broadcasts; else None."""
    dtypes: list[DType] = []
    while isinstance(owner := value.owner, MoOp) and (owner.spec.in_order or type(owner) is CastOp):
        assert isinstance(value.type, TensorType)
        dtypes.append(value.type.dtype)
        value = owner.operands[0]
    array = constant_of(value.owner)
    if array is None or array.size != 1:
        return None
    # rounded as the casts round it, the innermost first
    for dtype in reversed(dtypes):
        array = array.astype(dtype.to_numpy())
    return float(array.item())
