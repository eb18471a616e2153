"""Normalizations, and losses, which the standard counts as ops."""

from __future__ import annotations

import math
from typing import Any

from max.dtype import DType
from max.graph import TensorValue, ops
from max.importers.errors import Unsupported
from max.importers.functions.reductions import over
from max.importers.node import Node
from max.importers.onnx.element_types import dtype_of
from max.importers.onnx.table import op


def _channels(x: TensorValue, rank: int) -> TensorValue:
    return ops.reshape(x, [x.shape[0], *[1] * (rank - 2)])


@op("BatchNormalization")
def batch_normalization(
    node: Node,
    x: TensorValue,
    scale: TensorValue,
    bias: TensorValue,
    mean: TensorValue,
    variance: TensorValue,
) -> Any:
    epsilon = node.attr("epsilon", 1e-5)
    if not node.attr("training_mode", 0):
        # one factor and one summand per channel
        factor = scale / ops.sqrt(variance + epsilon)
        shift = bias - mean * factor
        if x.rank < 2:
            return (x * factor + shift,)
        return (ops.cast(x * _channels(factor, x.rank) + _channels(shift, x.rank), x.dtype),)
    axes = [axis for axis in range(x.rank) if axis != 1]
    own_mean = over(x, axes, ops.mean)
    centered = x - own_mean
    own_variance = over(centered * centered, axes, ops.mean)
    momentum = node.attr("momentum", 0.9)
    y = centered / ops.sqrt(own_variance + epsilon)
    y = y * _channels(scale, x.rank) + _channels(bias, x.rank)
    flat = [x.shape[1]]
    return (
        ops.cast(y, x.dtype),
        mean * momentum + ops.cast(ops.reshape(own_mean, flat), mean.dtype) * (1 - momentum),
        variance * momentum
        + ops.cast(ops.reshape(own_variance, flat), mean.dtype) * (1 - momentum),
    )


@op("InstanceNormalization")
def instance_normalization(
    node: Node, x: TensorValue, scale: TensorValue, bias: TensorValue
) -> TensorValue:
    axes = list(range(2, x.rank))
    centered = x - over(x, axes, ops.mean)
    variance = over(centered * centered, axes, ops.mean)
    y = centered / ops.sqrt(variance + node.attr("epsilon", 1e-5))
    return y * _channels(scale, x.rank) + _channels(bias, x.rank)


@op("LayerNormalization")
def layer_normalization(
    node: Node, x: TensorValue, scale: TensorValue, bias: TensorValue | None = None
) -> Any:
    axis = node.axis("axis", x.rank, -1)
    epsilon = node.attr("epsilon", 1e-5)
    stash = dtype_of(node.attr("stash_type", 1))
    # the fused op scales the last axis, and has no results but y
    one = axis == x.rank - 1 and scale.rank == 1
    if one and not node.wants(1) and not node.wants(2) and scale.shape[0] == x.shape[-1]:
        # it takes a bias in any case
        beta = bias if bias is not None else scale * 0.0
        return (ops.layer_norm(x, scale, beta, epsilon),)
    axes = list(range(axis, x.rank))
    wide = ops.cast(x, stash)
    mean = over(wide, axes, ops.mean)
    centered = wide - mean
    inverse = 1.0 / ops.sqrt(over(centered * centered, axes, ops.mean) + epsilon)
    y = ops.cast(centered * inverse, x.dtype) * scale
    return (y if bias is None else y + bias), mean, inverse


@op("RMSNormalization")
def rms_normalization(node: Node, x: TensorValue, scale: TensorValue) -> TensorValue:
    axis = node.axis("axis", x.rank, -1)
    epsilon = node.attr("epsilon", 1e-5)
    if (
        axis == x.rank - 1
        and scale.rank == 1
        and scale.dtype is x.dtype
        and scale.shape[0] == x.shape[-1]
    ):
        return ops.rms_norm(x, scale, epsilon, multiply_before_cast=False)
    axes = list(range(axis, x.rank))
    wide = ops.cast(x, dtype_of(node.attr("stash_type", 1)))
    y = wide / ops.sqrt(over(wide * wide, axes, ops.mean) + epsilon)
    return ops.cast(y, scale.dtype) * scale


@op("GroupNormalization")
def group_normalization(
    node: Node, x: TensorValue, scale: TensorValue, bias: TensorValue
) -> TensorValue:
    groups = node.attr("num_groups")
    batch, channels, *spatial = x.shape
    size = node.static(channels)
    if size % groups:
        raise Unsupported(f"has {groups} groups for {size} channels")
    parts = [batch, groups, size // groups * math.prod(spatial, start=1)]
    wide = ops.reshape(ops.cast(x, DType.float32) if x.dtype.size_in_bytes < 4 else x, parts)
    centered = wide - ops.mean(wide, 2)
    y = centered / ops.sqrt(ops.mean(centered * centered, 2) + node.attr("epsilon", 1e-5))
    if node.version < 21:
        # a scale and a bias for each group
        y = y * ops.reshape(scale, [groups, 1]) + ops.reshape(bias, [groups, 1])
        return ops.cast(ops.reshape(y, x.shape), x.dtype)
    y = ops.cast(ops.reshape(y, x.shape), x.dtype)
    return y * _channels(scale, x.rank) + _channels(bias, x.rank)
