"""Normalizations over the last axis, and over groups of channels."""

from __future__ import annotations

import operator

from max.dtype import DType
from max.graph.ops.creation.constant import constant
from max.graph.ops.elementwise.binary import add, mul
from max.graph.ops.movement.shape import broadcast_to, reshape
from max.graph.ops.staging.promotion import cast_to, is_weak, promote_weak
from max.graph.ops.staging.stage import as_tensor, stage
from max.graph.value import TensorValue, TensorValueLike

__all__ = ["group_norm", "layer_norm", "normalize_groups", "rms_norm"]


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
            false, the normalized value is rounded before the product, as Llama does.

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


def group_norm(
    input: TensorValueLike,
    gamma: TensorValueLike,
    beta: TensorValueLike,
    num_groups: int,
    epsilon: float,
) -> TensorValue:
    """Normalizes groups of channels: mean and variance over the channels of a group and all positions.

    Computed in float32, and in float64 for float64 (https://arxiv.org/abs/1803.08494).

    Args:
        input: The tensor ``[batch, channels, …]``, of a floating-point type, with a static number of channels.
        gamma: The scale ``[channels]``.
        beta: The offset ``[channels]``.
        num_groups: The number of groups; the channels are a multiple of it.
        epsilon: The positive number added to the variance.

    Returns:
        A tensor of the input's shape and dtype.

    Raises:
        ValueError: A shape does not match, the channels cannot be divided into the groups, or epsilon is not positive.
        TypeError: The input, scale or offset is not of a floating-point type.
    """
    x = as_tensor(input)
    if not x.dtype.is_float():
        raise TypeError(
            f"group_norm: the operand is {x.mlir_type.short}, expected a floating-point type"
        )
    groups = operator.index(num_groups)
    channels = x.mlir_type.shape[1] if x.rank > 1 else None
    if channels is None or not channels.is_static or groups < 1 or channels.value % groups:
        raise ValueError(
            f"group_norm: the input is {x.mlir_type.short}, expected [batch, channels, ...] with channels a multiple "
            f"of the {groups} groups"
        )
    if not epsilon > 0:
        raise ValueError(f"group_norm: epsilon is {epsilon}, expected a positive number")
    per_channel = [channels.value, *[1] * (x.rank - 2)]
    y = normalize_groups(x, groups, float(epsilon))
    vectors: list[TensorValue] = []
    for name, value in (("scale", gamma), ("offset", beta)):
        vector = _scale("group_norm", value, x)
        type_ = vector.mlir_type
        if not type_.dtype.is_float():
            raise TypeError(f"group_norm: the {name} is {type_.short}, expected floats")
        if type_.shape != (channels,):
            raise ValueError(
                f"group_norm: the {name} is {type_.short}, expected shape [{channels}]"
            )
        vectors.append(reshape(cast_to(vector, y.dtype), per_channel))
    return cast_to(add(mul(y, vectors[0]), vectors[1]), x.dtype)


def normalize_groups(x: TensorValue, num_groups: int, epsilon: float) -> TensorValue:
    """Groups of channels with mean 0 and variance 1, in float32 or float64.

    Args:
        x: The tensor ``[batch, channels, …]``.
        num_groups: The number of groups, which divides the channels.
        epsilon: The number added to the variance.
    """
    # mean and variance of many elements need more bits than float16 has
    wide = cast_to(x, DType.float64 if x.dtype is DType.float64 else DType.float32)
    groups = reshape(wide, [x.shape[0], num_groups, -1])
    ones, zeros = (
        broadcast_to(constant(number, wide.dtype, x.device), [groups.shape[-1]])
        for number in (1.0, 0.0)
    )
    return reshape(layer_norm(groups, ones, zeros, epsilon), x.shape)
