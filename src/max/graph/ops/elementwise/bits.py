"""Ops on the bits of integers, for importers: they are not names of `max.graph.ops`."""

from __future__ import annotations

from max.graph.ops.staging.broadcasting import broadcast_all
from max.graph.ops.staging.promotion import promote_operands
from max.graph.ops.staging.stage import stage
from max.graph.value import TensorValue, TensorValueLike

__all__ = ["bit_and", "bit_or", "bit_xor", "shift_left", "shift_right"]


def _bits(op: str, lhs: TensorValueLike, rhs: TensorValueLike) -> TensorValue:
    return stage(op, broadcast_all(op, promote_operands(op, lhs, rhs)))


def bit_and(lhs: TensorValueLike, rhs: TensorValueLike) -> TensorValue:
    """The bits that both operands have.

    Args:
        lhs: The left operand: integers.
        rhs: The right operand; broadcasts with the left.

    Returns:
        A tensor of the common shape and the promoted dtype.

    Raises:
        ValueError: The shapes do not broadcast.
        TypeError: The operands are not integers.
    """
    return _bits("bit_and", lhs, rhs)


def bit_or(lhs: TensorValueLike, rhs: TensorValueLike) -> TensorValue:
    """The bits that one of the operands has; operands as of `bit_and`."""
    return _bits("bit_or", lhs, rhs)


def bit_xor(lhs: TensorValueLike, rhs: TensorValueLike) -> TensorValue:
    """The bits that differ; operands as of `bit_and`."""
    return _bits("bit_xor", lhs, rhs)


def shift_left(lhs: TensorValueLike, rhs: TensorValueLike) -> TensorValue:
    """The bits moved up; 0 for shifts that are negative, or at least the width. Operands as of `bit_and`."""
    return _bits("shift_left", lhs, rhs)


def shift_right(lhs: TensorValueLike, rhs: TensorValueLike) -> TensorValue:
    """The bits moved down, with the sign. Shifts that are negative, or at least the width, leave the sign only.

    Operands as of `bit_and`.
    """
    return _bits("shift_right", lhs, rhs)
