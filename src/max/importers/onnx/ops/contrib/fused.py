"""Fused ops that ONNX Runtime's optimizer and exporters write (`com.microsoft`): activations, norms, products."""

from __future__ import annotations

from typing import Any

import numpy as np

from max.dtype import DType
from max.graph import TensorValue, ops
from max.importers.errors import Unsupported
from max.importers.functions import mathematics
from max.importers.functions.reductions import over
from max.importers.node import Node
from max.importers.onnx.ops.convolution import conv
from max.importers.onnx.table import op

_MS = "com.microsoft"


@op(f"{_MS}:Gelu")
def gelu(node: Node, x: TensorValue) -> TensorValue:
    return ops.gelu(x)


@op(f"{_MS}:BiasGelu")
def bias_gelu(node: Node, x: TensorValue, bias: TensorValue) -> TensorValue:
    return ops.gelu(x + bias)


@op(f"{_MS}:FastGelu")
def fast_gelu(node: Node, x: TensorValue, bias: TensorValue | None = None) -> TensorValue:
    return ops.gelu(x if bias is None else x + bias, "tanh")


@op(f"{_MS}:QuickGelu")
def quick_gelu(node: Node, x: TensorValue) -> TensorValue:
    return x * ops.sigmoid(x * node.attr("alpha", 1.702))


@op(f"{_MS}:BiasAdd")
def bias_add(node: Node, x: TensorValue, bias: TensorValue, skip: TensorValue) -> TensorValue:
    return x + bias + skip


@op(f"{_MS}:BiasSplitGelu")
def bias_split_gelu(node: Node, x: TensorValue, bias: TensorValue) -> TensorValue:
    first, second = ops.chunk(x + bias, 2, x.rank - 1)
    return first * ops.gelu(second)


@op(f"{_MS}:FusedMatMul", f"{_MS}:TransposeMatMul")
def fused_matmul(node: Node, a: TensorValue, b: TensorValue) -> TensorValue:
    if node.attr("transBatchA", 0) or node.attr("transBatchB", 0):
        raise Unsupported("transposes batches")
    a = ops.transpose(a, -2, -1) if node.attr("transA", 0) and a.rank > 1 else a
    b = ops.transpose(b, -2, -1) if node.attr("transB", 0) and b.rank > 1 else b
    y = ops.matmul(a, b)
    alpha = node.attr("alpha", 1.0)
    return y if alpha == 1.0 else y * alpha


_ACTIVATIONS: dict[str, Any] = {
    "Relu": ops.relu, "Sigmoid": ops.sigmoid, "Tanh": ops.tanh, "Gelu": ops.gelu, "": lambda x: x,
}  # fmt: skip


def apply_activation(node: Node, y: TensorValue) -> TensorValue:
    """The result of a fused op after its activation."""
    name = node.attr("activation", "")
    parameters = node.attr("activation_params") or []
    if name in _ACTIVATIONS:
        return _ACTIVATIONS[name](y)
    match name:
        case "LeakyRelu":
            alpha = parameters[0] if parameters else node.attr("activation_alpha", 0.01)
            return ops.where(y < 0, y * alpha, y)
        case "Clip":
            return mathematics.clamp(y, parameters[0], parameters[1])
        case "HardSigmoid":
            return mathematics.clamp(y * parameters[0] + parameters[1], 0.0, 1.0)
        case _:
            raise Unsupported(f"the activation is {name!r}")


@op(f"{_MS}:FusedConv")
def fused_conv(
    node: Node,
    x: TensorValue,
    weight: TensorValue,
    bias: TensorValue | None = None,
    addend: TensorValue | None = None,
) -> TensorValue:
    y = conv(node)
    return apply_activation(node, y if addend is None else y + addend)


@op(f"{_MS}:FusedGemm")
def fused_gemm(
    node: Node, a: TensorValue, b: TensorValue, c: TensorValue | None = None
) -> TensorValue:
    a = ops.transpose(a, 0, 1) if node.attr("transA", 0) else a
    b = ops.transpose(b, 0, 1) if node.attr("transB", 0) else b
    y = ops.matmul(a, b) * node.attr("alpha", 1.0)
    return apply_activation(node, y if c is None else y + c * node.attr("beta", 1.0))


@op("SimplifiedLayerNormalization", f"{_MS}:SimplifiedLayerNormalization")
def simplified_layer_norm(node: Node, x: TensorValue, scale: TensorValue) -> Any:
    axis = node.axis("axis", x.rank, -1)
    if axis != x.rank - 1:
        raise Unsupported("normalizes more than the last axis")
    epsilon = node.attr("epsilon", 1e-5)
    y = ops.rms_norm(x, ops.cast(scale, x.dtype), epsilon)
    return (y, _inverse(x, epsilon)) if node.wants(1) else (y,)


def _inverse(x: TensorValue, epsilon: float) -> TensorValue:
    wide = ops.cast(x, DType.float32)
    return 1.0 / ops.sqrt(ops.mean(wide * wide, x.rank - 1) + epsilon)


def _add_skip(node: Node, first: int, bias: int) -> TensorValue:
    total = node.tensor(0) + node.tensor(first)
    return total + node.tensor(bias) if node.has(bias) else total


@op(f"{_MS}:SkipLayerNormalization")
def skip_layer_norm(node: Node) -> Any:
    total = _add_skip(node, 1, 4)
    gamma = node.tensor(2)
    # `ops.layer_norm` requires one
    beta = node.tensor(3) if node.has(3) else gamma * 0.0
    return ops.layer_norm(total, gamma, beta, node.attr("epsilon", 1e-5)), None, None, total


@op(f"{_MS}:SkipSimplifiedLayerNormalization")
def skip_simplified_layer_norm(node: Node) -> Any:
    total = _add_skip(node, 1, 3)
    return ops.rms_norm(total, node.tensor(2), node.attr("epsilon", 1e-5)), None, None, total


@op(f"{_MS}:EmbedLayerNormalization")
def embed_layer_norm(node: Node) -> Any:
    ids, segments = node.tensor(0), node.tensor(1) if node.has(1) else None
    words, positions = node.tensor(2), node.tensor(3)
    total = ops.gather(words, ids, 0)
    length = ids.shape[1]
    if node.has(8):
        total = total + ops.gather(positions, node.tensor(8), 0)
    else:
        places = ops.range(0, length, 1, dtype=DType.int64, device=ids.device)
        total = total + ops.gather(positions, places, 0)
    if segments is not None:
        total = total + ops.gather(node.tensor(4), segments, 0)
    y = ops.layer_norm(total, node.tensor(5), node.tensor(6), node.attr("epsilon", 1e-12))
    if node.has(7):
        counts = ops.reshape(ops.sum(ops.cast(node.tensor(7), DType.int32), 1), [ids.shape[0]])
    else:
        counts = ops.broadcast_to(ops.constant(np.int32(0)), [ids.shape[0]])
    return y, counts, total


@op(f"{_MS}:GroupNorm")
def group_norm(node: Node, x: TensorValue, gamma: TensorValue, beta: TensorValue) -> TensorValue:
    """Over images with channels last; with SiLU if the model says so."""
    batch, height, width, channels = x.shape
    groups = node.attr("groups")
    if not node.attr("channels_last", 1):
        raise Unsupported("has channels first")
    size = node.static(channels) // groups
    wide = ops.cast(x, DType.float32)
    # channels of a group are adjacent
    parts = ops.reshape(wide, [batch, height * width, groups, size])
    centered = parts - over(parts, [1, 3], ops.mean)
    y = centered / ops.sqrt(
        over(centered * centered, [1, 3], ops.mean) + node.attr("epsilon", 1e-5)
    )
    y = ops.reshape(y, x.shape) * ops.cast(gamma, DType.float32) + ops.cast(beta, DType.float32)
    return ops.cast(ops.silu(y) if node.attr("activation", 0) else y, x.dtype)


@op(f"{_MS}:BiasSoftmax")
def bias_softmax(node: Node, x: TensorValue, bias: TensorValue) -> TensorValue:
    axis = node.axis("axis", x.rank, 1)
    if axis != x.rank - 1:
        raise Unsupported("takes the softmax over more than the last axis")
    return ops.softmax(x + bias)


@op(f"{_MS}:Inverse")
def inverse(node: Node, x: TensorValue) -> TensorValue:
    """Gauss-Jordan elimination with the largest pivot of each column."""
    size = node.static(x.shape[-1])
    lead = x.shape[:-2]
    identity = ops.constant(np.eye(size, dtype=x.dtype.to_numpy()))
    left = x
    right = ops.broadcast_to(identity, x.shape)
    rows = ops.reshape(ops.range(0, size, 1, dtype=DType.int64, device=x.device), [size, 1])
    for step in range(size):
        column = left[..., step : step + 1]
        # rows above are done, and are no pivots
        sizes = ops.where(rows >= step, ops.abs(column), -1.0)
        pivot = ops.argmax(sizes, len(lead))
        at_pivot, at_step = ops.equal(rows, pivot), ops.equal(rows, step)
        both = [left, right]
        for index, matrix in enumerate(both):
            # the pivot's row differs within the batch: a sum over a mask selects it
            pivot_row = ops.sum(ops.where(at_pivot, matrix, 0.0), len(lead))
            step_row = matrix[..., step : step + 1, :]
            both[index] = ops.where(
                at_step, pivot_row, ops.where(at_pivot, step_row, matrix)
            )  # the two rows exchanged
        left, right = both
        value = left[..., step : step + 1, step : step + 1]
        own_left, own_right = (
            left[..., step : step + 1, :] / value,
            right[..., step : step + 1, :] / value,
        )
        # the column becomes 0 in all rows but the pivot's
        factor = ops.where(at_step, 0.0, left[..., step : step + 1])
        left = ops.where(at_step, own_left, left - factor * own_left)
        right = ops.where(at_step, own_right, right - factor * own_right)
    return right
