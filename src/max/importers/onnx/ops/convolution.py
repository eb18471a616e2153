"""Convolutions and transposed convolutions of one to three spatial axes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from max.dtype import DType
from max.graph import TensorValue, ops
from max.importers.functions.convolutions import (
    Pairs,
    convolution,
    spread,
    transposed_convolution,
    with_bias,
)
from max.importers.functions.indexing import padded
from max.importers.node import Node
from max.importers.onnx.ops.quantized.integer_products import quantized_convolution
from max.importers.onnx.ops.windows import paddings, steps
from max.importers.onnx.table import op


def _taps(node: Node, weight: TensorValue, index: int = 1) -> list[int]:
    return [node.static(dim, index) for dim in weight.shape[2:]]


@op("Conv")
def conv(node: Node) -> TensorValue:
    y = quantized_convolution(node)
    if y is None:
        y = convolved(node, node.tensor(0), node.tensor(1))
    return with_bias(y, node.tensor(2) if node.has(2) else None)


def convolved(node: Node, x: TensorValue, weight: TensorValue) -> TensorValue:
    """A convolution with the attributes of a node, without bias."""
    kernel = _taps(node, weight)
    n = len(kernel)
    strides, dilations = steps(node, "strides", n), steps(node, "dilations", n)
    pairs = paddings(node, x.shape[2:], kernel, strides, dilations)
    return convolution(x, weight, strides, dilations, pairs, node.attr("group", 1))


@op("ConvTranspose")
def conv_transpose(
    node: Node, x: TensorValue, weight: TensorValue, bias: TensorValue | None = None
) -> TensorValue:
    kernel = _taps(node, weight)
    n = len(kernel)
    strides, dilations = steps(node, "strides", n), steps(node, "dilations", n)
    extra = list(node.attr("output_padding") or [0] * n)
    pairs = _transposed_paddings(node, x, kernel, strides, dilations, extra)
    groups = node.attr("group", 1)
    y = transposed_convolution(x, weight, strides, dilations, pairs, extra, groups)
    return with_bias(y, bias)


def _transposed_paddings(
    node: Node,
    x: TensorValue,
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    extra: Sequence[int],
) -> Pairs:
    n = len(kernel)
    auto = node.attr("auto_pad", "NOTSET")
    wanted = node.attr("output_shape")
    if not wanted and auto in ("NOTSET", "", "VALID"):
        pads = (node.attr("pads") or [0] * (2 * n)) if auto != "VALID" else [0] * (2 * n)
        return [(pads[i], pads[i + n]) for i in range(n)]
    pairs: Pairs = []
    for i in range(n):
        size = node.static(x.shape[2 + i])
        target = wanted[-n:][i] if wanted else size * strides[i]
        window = (kernel[i] - 1) * dilations[i] + 1
        total = strides[i] * (size - 1) + extra[i] + window - target
        half = total // 2 if auto == "SAME_UPPER" else total - total // 2
        pairs.append((half, total - half))
    return pairs


@op("DeformConv")
def deform_conv(
    node: Node,
    x: TensorValue,
    weight: TensorValue,
    offset: TensorValue,
    bias: TensorValue | None = None,
    mask: TensorValue | None = None,
) -> TensorValue:
    """Bilinear samples at shifted taps, then a product with the filter."""
    kernel = _taps(node, weight)
    strides, dilations = steps(node, "strides", 2), steps(node, "dilations", 2)
    pads = node.attr("pads") or [0] * 4
    groups, parts = node.attr("group", 1), node.attr("offset_group", 1)
    batch, channels, height, width = node.static_shape(0)
    _, _, rows, columns = node.static_shape(2)
    taps = kernel[0] * kernel[1]
    offsets = ops.reshape(offset, [batch, parts, taps, 2, rows, columns])
    base = np.zeros((taps, 2, rows, columns), np.float64)
    for tap in range(taps):
        base[tap, 0] = (np.arange(rows) * strides[0] - pads[0] + tap // kernel[1] * dilations[0])[
            :, None
        ]
        base[tap, 1] = (np.arange(columns) * strides[1] - pads[1] + tap % kernel[1] * dilations[1])[
            None
        ]
    places = offsets + ops.constant(base.astype(x.dtype.to_numpy()))
    flat = ops.reshape(x, [batch * parts, channels // parts, height * width])
    y = ops.reshape(places[:, :, :, 0], [batch * parts, taps * rows * columns])
    z = ops.reshape(places[:, :, :, 1], [batch * parts, taps * rows * columns])
    samples = _bilinear(flat, y, z, height, width)
    samples = ops.reshape(samples, [batch, parts, channels // parts, taps, rows * columns])
    if mask is not None:
        samples = samples * ops.reshape(mask, [batch, parts, 1, taps, rows * columns])
    features = node.static(weight.shape[0], 1)
    columns_ = ops.reshape(samples, [batch, groups, channels // groups * taps, rows * columns])
    filters = ops.reshape(weight, [1, groups, features // groups, channels // groups * taps])
    result = ops.reshape(ops.matmul(filters, columns_), [batch, features, rows, columns])
    return result if bias is None else result + ops.reshape(bias, [features, 1, 1])


def _bilinear(
    flat: TensorValue, y: TensorValue, x: TensorValue, height: int, width: int
) -> TensorValue:
    """Samples of images ``[N, C, H * W]`` at places ``[N, P]``; 0 outside."""
    total: TensorValue | None = None
    low_y, low_x = ops.floor(y), ops.floor(x)
    batch, channels, _ = flat.shape
    count = y.shape[1]
    for dy in (0, 1):
        for dx in (0, 1):
            row, column = low_y + float(dy), low_x + float(dx)
            weight = (1.0 - ops.abs(y - row)) * (1.0 - ops.abs(x - column))
            inside = ops.logical_and(
                ops.logical_and(row >= 0.0, row <= height - 1.0),
                ops.logical_and(column >= 0.0, column <= width - 1.0),
            )
            place = ops.where(inside, row * float(width) + column, 0.0)
            index = ops.reshape(ops.cast(place, DType.int64), [batch, 1, count, 1])
            picked = ops.gather_nd(flat, ops.broadcast_to(index, [batch, channels, count, 1]), 2)
            part = picked * ops.reshape(ops.where(inside, weight, 0.0), [batch, 1, count])
            total = part if total is None else total + part
    assert total is not None
    return total


@op("Col2Im")
def col2im(node: Node) -> TensorValue:
    """The sum of windows, by slices of one tap each."""
    x = node.tensor(0)
    image, block = node.ints(1), node.ints(2)
    n = len(image)
    strides, dilations = steps(node, "strides", n), steps(node, "dilations", n)
    pads = list(node.attr("pads") or [0] * (2 * n))
    taps = math.prod(block)
    batch, depth = x.shape[0], node.static(x.shape[1])
    channels = depth // taps
    padded_size = [size + pads[i] + pads[i + n] for i, size in enumerate(image)]
    counts = [
        (padded_size[i] - dilations[i] * (block[i] - 1) - 1) // strides[i] + 1 for i in range(n)
    ]
    windows = ops.reshape(x, [batch, channels, taps, *counts])
    total: TensorValue | None = None
    for tap, place in enumerate(np.ndindex(*block)):
        part = windows[:, :, tap]
        for axis in range(n):
            if strides[axis] > 1:
                part = spread(part, 2 + axis, strides[axis])
        amounts = []
        for axis in range(n):
            before = place[axis] * dilations[axis]
            length = (counts[axis] - 1) * strides[axis] + 1
            amounts.append((before, padded_size[axis] - before - length))
        part = padded(part, [(0, 0), (0, 0), *amounts], "constant", 0)
        total = part if total is None else total + part
    assert total is not None
    index = [slice(pads[i], pads[i] + image[i]) for i in range(n)]
    return total[(slice(None), slice(None), *index)]
