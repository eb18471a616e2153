"""Pooling over windows and over whole images."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from max.dtype import DType
from max.graph import TensorValue, ops
from max.importers.functions.indexing import pad_axes
from max.importers.functions.integer_products import chosen_codes, dequantized_tensor
from max.importers.functions.pooling import Windows, average_pool, max_pool, max_pool_with_places
from max.importers.functions.reductions import over
from max.importers.node import Node
from max.importers.onnx.ops.windows import paddings, steps
from max.importers.onnx.table import op


def windows_of(node: Node, x: TensorValue) -> Windows:
    """The windows of a pooling op whose operand is ``[N, C, …]``."""
    kernel = list(node.attr("kernel_shape"))
    n = len(kernel)
    strides, dilations = steps(node, "strides", n), steps(node, "dilations", n)
    pairs = paddings(node, x.shape[2:], kernel, strides, dilations)
    return Windows(kernel, strides, dilations, pairs, node.static, bool(node.attr("ceil_mode", 0)))


@op("MaxPool")
def max_pool_(node: Node, x: TensorValue) -> Any:
    windows = windows_of(node, x)
    if not node.wants(1):
        codes = None
        if windows.is_plain and not windows.ceil:
            # each window has an element
            codes = chosen_codes(node.value(0), lambda c: max_pool(windows, c))
        return (max_pool(windows, x) if codes is None else dequantized_tensor(codes),)
    return max_pool_with_places(windows, x, bool(node.attr("storage_order", 0)))


@op("AveragePool")
def average_pool_(node: Node, x: TensorValue) -> TensorValue:
    return average_pool(windows_of(node, x), x, bool(node.attr("count_include_pad", 0)))


@op("LpPool")
def lp_pool(node: Node, x: TensorValue) -> TensorValue:
    windows = windows_of(node, x)
    windows.check(x)
    p = float(node.attr("p", 2))
    total, *parts = [_power(part, p) for part in windows.taps(x, windows.sizes(x), 0)]
    for part in parts:
        total = total + part
    return _root(total, p)


def _power(x: TensorValue, p: float) -> TensorValue:
    return x * x if p == 2 else ops.pow(ops.abs(x), p)


def _root(x: TensorValue, p: float) -> TensorValue:
    return ops.sqrt(x) if p == 2 else ops.pow(x, 1 / p)


@op("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
def global_pool(node: Node, x: TensorValue) -> TensorValue:
    axes = list(range(2, x.rank))
    if node.op == "GlobalAveragePool":
        return over(x, axes, ops.mean)
    if node.op == "GlobalMaxPool":
        return over(x, axes, lambda y, axis: ops.max(y, axis=axis))
    p = float(node.attr("p", 2))
    return _root(over(_power(x, p), axes, ops.sum), p)


@op("MaxUnpool")
def max_unpool(node: Node) -> TensorValue:
    x, indices = node.tensor(0), node.tensor(1)
    kernel = list(node.attr("kernel_shape"))
    n = len(kernel)
    strides = steps(node, "strides", n)
    pads = node.attr("pads") or [0] * (2 * n)
    sizes = node.static_shape(0)
    # several sizes of an image have these windows: this is the least
    inner = [(sizes[2 + i] - 1) * strides[i] + kernel[i] - pads[i] - pads[i + n] for i in range(n)]
    shape = [*sizes[:2], *inner]
    result = shape
    if node.has(2):
        result = node.ints(2)
    zeros = ops.broadcast_to(ops.constant(np.zeros((), x.dtype.to_numpy())), [math.prod(shape)])
    # positions count in the flat image of that size
    places = ops.reshape(ops.cast(indices, DType.int64), [-1])
    y = ops.reshape(ops.scatter(zeros, ops.reshape(x, [-1]), places, 0), shape)
    if result == shape:
        return y
    return pad_axes(
        y, [(0, new - old) for old, new in zip(shape, result, strict=True)], "constant", 0
    )
