"""Complex numbers: pairs of a real and an imaginary part along the last axis."""

from __future__ import annotations

from max.graph.ops.movement.concat import stack
from max.graph.ops.movement.shape import as_interleaved_complex
from max.graph.ops.staging.stage import as_tensor
from max.graph.value import TensorValue, TensorValueLike

__all__ = ["as_interleaved_complex", "mul"]


def mul(lhs: TensorValueLike, rhs: TensorValueLike) -> TensorValue:
    """The product of complex numbers.

    Args:
        lhs: Complex numbers ``[…, 2]``.
        rhs: Complex numbers ``[…, 2]``; broadcasts with the left.

    Raises:
        ValueError: The last axis of an operand has another size, or the shapes do not broadcast.
    """
    x, y = as_tensor(lhs), as_tensor(rhs)
    for value in (x, y):
        if not value.rank or value.shape[-1] != 2:
            raise ValueError(
                f"complex.mul: an operand is {value!r}, expected a last axis of size 2"
            )
    (a, b), (c, d) = ([value[..., part] for part in (0, 1)] for value in (x, y))
    return stack([a * c - b * d, a * d + b * c], axis=-1)
