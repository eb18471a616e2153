"""Normalisations over the last axis."""

from __future__ import annotations

from max.graph.ops._stage import as_tensor, stage
from max.graph.ops.promotion import is_weak, promote_weak
from max.graph.value import TensorValue, TensorValueLike

__all__ = ["layer_norm", "rms_norm"]


def _scale(op: str, value: TensorValueLike, like: TensorValue) -> TensorValue:
    if is_weak(value):
        return promote_weak(op, value, like.dtype, like.device)
    return as_tensor(value)


def layer_norm(
    input: TensorValue, gamma: TensorValueLike, beta: TensorValueLike, epsilon: float
) -> TensorValue:
    """``(x - mean) / sqrt(var + epsilon) * gamma + beta`` over the last axis.

    Args:
        input: The tensor ``[…, n]``, of a floating-point type.
        gamma: The scale ``[n]``.
        beta: The offset ``[n]``.
        epsilon: The positive number added to the variance.

    Returns:
        A tensor of the input's shape and dtype.

    Raises:
        ValueError: A shape does not match, or epsilon is not positive.
        TypeError: The input is not of a floating-point type, or a dtype does not match.
    """
    x = as_tensor(input)
    operands = (
        x,
        _scale("layer_norm", gamma, x),
        _scale("layer_norm", beta, x),
    )
    return stage("layer_norm", operands, {"epsilon": float(epsilon)})


def rms_norm(
    input: TensorValueLike,
    weight: TensorValueLike,
    epsilon: float,
    weight_offset: float = 0.0,
    multiply_before_cast: bool = True,
) -> TensorValue:
    """``x / sqrt(mean(x²) + epsilon) * (weight + weight_offset)`` over the last axis.

    Computed in float32.

    Args:
        input: The tensor ``[…, n]``, of a floating-point type.
        weight: The scale ``[n]``.
        epsilon: The positive number added to the mean square.
        weight_offset: The number added to the weight; 1 for Gemma.
        multiply_before_cast: Whether the result is rounded to the dtype once, after the product with the weight. If
            false, the normalised value is rounded before the product, as Llama does.

    Returns:
        A tensor of the input's shape and dtype.

    Raises:
        ValueError: A shape does not match, or epsilon is not positive.
        TypeError: The input is not of a floating-point type, or a dtype does not match.
    """
    x = as_tensor(input)
    attrs = {
        "epsilon": float(epsilon),
        "weight_offset": float(weight_offset),
        "multiply_before_cast": bool(multiply_before_cast),
    }
    return stage("rms_norm", (x, _scale("rms_norm", weight, x)), attrs)
