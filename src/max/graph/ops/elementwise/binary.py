"""Element-wise ops of two operands, and `where`. Operands are promoted to one dtype and broadcast to one shape."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from max.dtype import DType
from max.graph.ops.staging.broadcasting import broadcast_all
from max.graph.ops.staging.promotion import cast_to, is_weak, promote_operands
from max.graph.ops.staging.stage import as_tensor, stage
from max.graph.value import TensorValue, TensorValueLike

__all__ = [
    "add",
    "div",
    "equal",
    "floor_div",
    "greater",
    "greater_equal",
    "logical_and",
    "logical_or",
    "logical_xor",
    "maximum",
    "minimum",
    "mod",
    "mul",
    "not_equal",
    "pow",
    "sub",
    "where",
]


_OF_BOOLS = {"mul": "and", "max": "or", "min": "and"}
"""The logical op that computes an arithmetic op on bools."""


def _binary(op: str, name: str, lhs: TensorValueLike, rhs: TensorValueLike) -> TensorValue:
    operands = broadcast_all(name, promote_operands(name, lhs, rhs))
    if op in _OF_BOOLS and operands[0].dtype is DType.bool:
        op = _OF_BOOLS[op]
    return stage(op, operands)


def add(lhs: TensorValueLike, rhs: TensorValueLike) -> TensorValue:
    """``lhs + rhs``, element by element.

    Args:
        lhs: The left operand.
        rhs: The right operand; broadcasts with the left.

    Returns:
        A tensor of the common shape and dtype (see `max.graph.ops.staging.promotion`). Integers wrap around.

    Raises:
        ValueError: The shapes do not broadcast.
        TypeError: The operands are bool, or no dtype fits both.
    """
    return _binary("add", "add", lhs, rhs)


def sub(lhs: TensorValueLike, rhs: TensorValueLike) -> TensorValue:
    """``lhs - rhs``, element by element; operands as of `add`.

    Args:
        lhs: The left operand.
        rhs: The right operand.
    """
    return _binary("sub", "sub", lhs, rhs)


def mul(lhs: TensorValueLike, rhs: TensorValueLike) -> TensorValue:
    """``lhs * rhs``, element by element; operands as of `add`, and bools, for which it is ``and``.

    Args:
        lhs: The left operand.
        rhs: The right operand.
    """
    return _binary("mul", "mul", lhs, rhs)


def div(lhs: TensorValueLike, rhs: TensorValueLike) -> TensorValue:
    """``lhs / rhs``, true division: integers are divided as floats.

    Args:
        lhs: The dividend.
        rhs: The divisor; broadcasts with the dividend.

    Returns:
        The quotient, of the promoted dtype if that is a float, else float64.

    Raises:
        ValueError: The shapes do not broadcast.
        TypeError: The operands are bool, or no dtype fits both.
    """
    if is_weak(lhs) != is_weak(rhs):
        tensor = as_tensor(rhs if is_weak(lhs) else lhs)
        lhs, rhs = _floating_operand(lhs, tensor), _floating_operand(rhs, tensor)
    x, y = promote_operands("div", lhs, rhs)
    return stage("div", broadcast_all("div", (_float_tensor(x), _float_tensor(y))))


def _floating_operand(value: TensorValueLike, tensor: TensorValue) -> TensorValueLike:
    """An operand of a division whose one tensor is `tensor`: integers beside integers, and those, as float64."""
    if not is_weak(value):
        return _float_tensor(as_tensor(value))
    if not tensor.dtype.is_integral():
        return value
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() <= 64:
        return float(value)
    if isinstance(value, np.ndarray):
        array = cast("np.ndarray[Any, np.dtype[Any]]", value)
        return array.astype(np.float64) if array.dtype.kind in "iu" else array
    return value


def _float_tensor(x: TensorValue) -> TensorValue:
    if not x.dtype.is_integral():
        return x
    return cast_to(x, DType.float64)


def floor_div(lhs: TensorValueLike, rhs: TensorValueLike) -> TensorValue:
    """``lhs // rhs``: the greatest integer that is not above the exact quotient; operands as of `add`.

    Args:
        lhs: The dividend.
        rhs: The divisor. Integer division by 0 gives 0; of floats the quotient by 0 is infinite or NaN.
    """
    x, y = broadcast_all("floor_div", promote_operands("floor_div", lhs, rhs))
    # `mo.div` of integers rounds down already
    return stage("floor_div" if x.dtype.is_float() else "div", (x, y))


def mod(lhs: TensorValueLike, rhs: TensorValueLike) -> TensorValue:
    """``lhs % rhs``, with the sign of `rhs`; operands as of `add`.

    Args:
        lhs: The dividend.
        rhs: The divisor. An integer remainder by 0 is 0.
    """
    return _binary("mod", "mod", lhs, rhs)


def pow(lhs: TensorValueLike, rhs: TensorValueLike) -> TensorValue:
    """``lhs ** rhs``, element by element; operands as of `add`.

    Args:
        lhs: The base.
        rhs: The exponent.
    """
    return _binary("pow", "pow", lhs, rhs)


def equal(lhs: TensorValueLike, rhs: TensorValueLike) -> TensorValue:
    """``lhs == rhs``, element by element; bool.

    Args:
        lhs: The left operand.
        rhs: The right operand; broadcasts with the left.
    """
    return _binary("equal", "equal", lhs, rhs)


def not_equal(lhs: TensorValueLike, rhs: TensorValueLike) -> TensorValue:
    """``lhs != rhs``, element by element; bool.

    Args:
        lhs: The left operand.
        rhs: The right operand; broadcasts with the left.
    """
    return _binary("not_equal", "not_equal", lhs, rhs)


def greater(lhs: TensorValueLike, rhs: TensorValueLike) -> TensorValue:
    """``lhs > rhs``, element by element; bool.

    Args:
        lhs: The left operand.
        rhs: The right operand; broadcasts with the left.
    """
    return _binary("greater", "greater", lhs, rhs)


def greater_equal(lhs: TensorValueLike, rhs: TensorValueLike) -> TensorValue:
    """``lhs >= rhs``, element by element; bool.

    Args:
        lhs: The left operand.
        rhs: The right operand; broadcasts with the left.
    """
    return _binary("greater_equal", "greater_equal", lhs, rhs)


def logical_and(lhs: TensorValueLike, rhs: TensorValueLike) -> TensorValue:
    """``lhs and rhs``, element by element.

    Args:
        lhs: The left operand, bool.
        rhs: The right operand, bool; broadcasts with the left.
    """
    return _binary("and", "logical_and", lhs, rhs)


def logical_or(lhs: TensorValueLike, rhs: TensorValueLike) -> TensorValue:
    """``lhs or rhs``, element by element.

    Args:
        lhs: The left operand, bool.
        rhs: The right operand, bool; broadcasts with the left.
    """
    return _binary("or", "logical_or", lhs, rhs)


def logical_xor(lhs: TensorValueLike, rhs: TensorValueLike) -> TensorValue:
    """Whether exactly one of `lhs` and `rhs` is true, element by element.

    Args:
        lhs: The left operand, bool.
        rhs: The right operand, bool; broadcasts with the left.
    """
    return _binary("xor", "logical_xor", lhs, rhs)


def maximum(lhs: TensorValueLike, rhs: TensorValueLike) -> TensorValue:
    """The element-wise maximum; ``or`` for bools."""
    return _binary("max", "max", lhs, rhs)


def minimum(lhs: TensorValueLike, rhs: TensorValueLike) -> TensorValue:
    """The element-wise minimum; ``and`` for bools."""
    return _binary("min", "min", lhs, rhs)


def where(condition: TensorValueLike, x: TensorValueLike, y: TensorValueLike) -> TensorValue:
    """``x`` where the condition is true, else ``y``, element by element.

    Args:
        condition: The condition, bool.
        x: The values for a true condition.
        y: The values for a false condition. All three broadcast.

    Returns:
        A tensor of the common shape and of the promoted dtype of `x` and `y`.

    Raises:
        ValueError: The shapes do not broadcast.
        TypeError: The condition is not bool, or no dtype fits both branches.
    """
    then, other = promote_operands("where", x, y)
    return stage("select", broadcast_all("where", (as_tensor(condition), then, other)))
