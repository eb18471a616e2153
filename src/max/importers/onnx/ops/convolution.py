"""Convolutions and transposed convolutions of one to three spatial axes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from max.graph import TensorValue, ops
from max.importers.functions.convolutions import (
    Pairs,
    convolution,
    insert_zeros,
    transposed_convolution,
    with_bias,
)
from max.importers.functions.deformable import deformable_convolution
from max.importers.functions.indexing import pad_axes
from max.importers.functions.integer_products import quantized_convolution, quantized_of
from max.importers.functions.scaled_sums import scaled_convolution
from max.importers.node import Node
from max.importers.onnx.ops.windows import paddings, steps
from max.importers.onnx.table import op
from max.importers.values import Imported


def _taps(node: Node, weight: TensorValue, index: int = 1) -> list[int]:
    return [node.static(dim, index) for dim in weight.shape[2:]]


@op("Conv")
def conv(node: Node) -> TensorValue | Imported:
    weight = node.value(1)
    y = None
    if quantized_of(weight) is not None and weight.rank == 4:
        kernel = [node.static(dim, 1) for dim in weight.shape[2:]]
        strides, dilations = steps(node, "strides", 2), steps(node, "dilations", 2)
        pairs = paddings(node, node.value(0).shape[2:], kernel, strides, dilations)
        groups = node.attr("group", 1)
        options = strides, dilations, pairs, groups
        bias = node.value(2) if node.has(2) else None
        exact = scaled_convolution(node.value(0), weight, bias, *options)
        if exact is not None:
            return exact
        y = quantized_convolution(node.value(0), weight, *options)
    if y is None:
        y = convolve(node, node.tensor(0), node.tensor(1))
    return with_bias(y, node.tensor(2) if node.has(2) else None)


def convolve(node: Node, x: TensorValue, weight: TensorValue) -> TensorValue:
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
        # `output_shape` has all axes or the spatial ones
        target = wanted[-n:][i] if wanted else size * strides[i]
        window = (kernel[i] - 1) * dilations[i] + 1
        # of: size of the result = stride * (size - 1) + extra + window - total
        total = strides[i] * (size - 1) + extra[i] + window - target
        # SAME_UPPER puts the odd element behind
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
    for index in range(3):
        node.static_shape(index)
    pads = node.attr("pads") or [0] * 4
    y = deformable_convolution(
        x, weight, offset, mask, steps(node, "strides", 2), pads[:2], steps(node, "dilations", 2),
        node.attr("group", 1), node.attr("offset_group", 1),
    )  # fmt: skip
    return with_bias(y, bias)


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
    windows = ops.reshape(x, [batch, channels, taps, *counts])  # [N, C, taps, *counts]
    total: TensorValue | None = None
    for tap, place in enumerate(np.ndindex(*block)):
        # the elements of one tap lie `stride` apart in the image: zeros between and around them
        part = windows[:, :, tap]
        for axis in range(n):
            if strides[axis] > 1:
                part = insert_zeros(part, 2 + axis, strides[axis])
        amounts = []
        for axis in range(n):
            before = place[axis] * dilations[axis]
            length = (counts[axis] - 1) * strides[axis] + 1
            amounts.append((before, padded_size[axis] - before - length))
        part = pad_axes(part, [(0, 0), (0, 0), *amounts], "constant", 0)
        total = part if total is None else total + part
    assert total is not None
    index = [slice(pads[i], pads[i] + image[i]) for i in range(n)]  # without the padding
    return total[(slice(None), slice(None), *index)]
