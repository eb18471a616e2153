"""`clamp`, which bounds the elements of a tensor."""

from __future__ import annotations

from max.graph import TensorValue, ops

__all__ = ["clamp"]


def clamp(x: TensorValue, min: float | None = None, max: float | None = None) -> TensorValue:
    """Bounds the elements of a tensor.

    Args:
        x: The tensor.
        min: The lower bound; None: no bound.
        max: The upper bound; None: no bound.

    Raises:
        ValueError: `min` is greater than `max`.
    """
    if min is not None and max is not None and min > max:
        raise ValueError(f"clamp: min {min} is greater than max {max}")
    if min is not None:
        x = ops.max(x, min)
    if max is not None:
        x = ops.min(x, max)
    return x
