"""Normalizations."""

from __future__ import annotations

from typing import Any

from max.dtype import DType
from max.graph import TensorValue, ops
from max.importers.functions.reductions import over
from max.importers.torch.ops.arithmetic import tensor_of
from max.importers.torch.table import Call, op


def _wide(x: TensorValue) -> TensorValue:
    return ops.cast(x, DType.float32) if x.dtype.size_in_bytes < 4 else x


def _standard(
    x: TensorValue, axes: list[int], eps: float
) -> tuple[TensorValue, TensorValue, TensorValue]:
    """The operand with mean 0 and variance 1 along axes, the mean, the inverse of the deviation."""
    center = over(x, axes, ops.mean)
    apart = x - center
    inverse = ops.rsqrt(over(apart * apart, axes, ops.mean) + tensor_of(eps, x.dtype))
    return apart * inverse, center, inverse


@op("aten.native_layer_norm.default")
def layer_norm(
    call: Call,
    x: TensorValue,
    normalized_shape: list[Any],
    weight: TensorValue | None,
    bias: TensorValue | None,
    eps: float,
) -> Any:
    count = len(normalized_shape)
    if (
        count == 1 and weight is not None and weight.dtype is x.dtype
        and not call.node.wants(1) and not call.node.wants(2)
    ):  # fmt: skip
        # the op takes a bias in any case
        beta = bias if bias is not None else weight * tensor_of(0, weight.dtype)
        return ops.layer_norm(x, weight, beta, eps), None, None
    axes = list(range(x.rank - count, x.rank))
    y, center, inverse = _standard(_wide(x), axes, eps)
    y = ops.cast(_affine(y, weight, bias, []), x.dtype)
    return y, center, inverse


def _affine(
    y: TensorValue, weight: TensorValue | None, bias: TensorValue | None, shape: list[Any]
) -> TensorValue:
    for factor, function in ((weight, ops.mul), (bias, ops.add)):
        if factor is not None:
            part = ops.cast(factor, y.dtype)
            y = function(y, ops.reshape(part, shape) if shape else part)
    return y


@op("aten.native_group_norm.default")
def group_norm(
    call: Call,
    x: TensorValue,
    weight: TensorValue | None,
    bias: TensorValue | None,
    n: Any,
    channels: Any,
    area: Any,
    groups: int,
    eps: float,
) -> Any:
    batch, depth, *spatial = x.shape
    part = call.static(depth) // groups
    wide = ops.reshape(_wide(x), [batch, groups, part, *spatial])  # [N, groups, C / groups, …]
    y, center, inverse = _standard(wide, list(range(2, wide.rank)), eps)
    y = _affine(ops.reshape(y, x.shape), weight, bias, [depth, *[1] * len(spatial)])
    flat = [batch, groups]
    return (
        ops.cast(y, x.dtype),
        ops.cast(ops.reshape(center, flat), x.dtype),
        ops.cast(ops.reshape(inverse, flat), x.dtype),
    )


@op(
    "aten._native_batch_norm_legit_no_training.default", "aten._native_batch_norm_legit.no_stats",
)  # fmt: skip
def batch_norm(call: Call, x: TensorValue, weight: Any, bias: Any, *others: Any) -> Any:
    """With running statistics, or with those of the batch; the mean and deviation are results of the latter alone."""
    shape = [x.shape[1], *[1] * (x.rank - 2)]
    # the last argument of both ops
    eps = others[-1]
    if call.node.op.endswith("no_stats"):
        axes = [axis for axis in range(x.rank) if axis != 1]
        y, center, inverse = _standard(_wide(x), axes, eps)
        y = ops.cast(_affine(y, weight, bias, shape), x.dtype)
        return y, ops.reshape(center, [x.shape[1]]), ops.reshape(inverse, [x.shape[1]])
    mean, variance = others[0], others[1]
    factor = ops.rsqrt(variance + tensor_of(eps, variance.dtype))
    if weight is not None:
        factor = factor * weight
    shift = -mean * factor if bias is None else bias - mean * factor
    y = x * ops.reshape(factor, shape) + ops.reshape(shift, shape)
    # statistics of the batch are results of training only
    nothing = ops.reshape(shift, [-1])[0:0]
    return ops.cast(y, x.dtype), nothing, nothing
