"""Pooling over windows and over whole images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from max.dtype import DType
from max.graph import TensorValue, ops
from max.graph.ops.elementwise.binary import maximum
from max.graph.ops.staging.stage import stage
from max.importers.errors import Unsupported
from max.importers.node import Node
from max.importers.onnx.ops.convolution import Pairs, paddings, steps
from max.importers.onnx.ops.indexing import padded
from max.importers.onnx.ops.reduction import over
from max.importers.onnx.table import op


class Windows:
    """The windows of a pooling op.

    Args:
        node: The op.
        x: Its operand, ``[N, C, …]``.
    """

    def __init__(self, node: Node, x: TensorValue) -> None:
        self.kernel = list(node.attr("kernel_shape"))
        n = len(self.kernel)
        if x.rank != n + 2:
            raise Unsupported(f"has {n} sizes of windows for an operand of rank {x.rank}")
        self.strides, self.dilations = steps(node, "strides", n), steps(node, "dilations", n)
        self.pairs: Pairs = paddings(node, x.shape[2:], self.kernel, self.strides, self.dilations)
        self.ceil = bool(node.attr("ceil_mode", 0))

    def counts(self, sizes: Sequence[int]) -> list[int]:
        """The number of windows along each axis."""
        found: list[int] = []
        for size, taps, stride, dilation, (low, high) in zip(
            sizes, self.kernel, self.strides, self.dilations, self.pairs, strict=True
        ):
            room = size + low + high - dilation * (taps - 1) - 1
            if room < 0:
                raise Unsupported(f"a window of {taps} elements is larger than an axis of {size}")
            count = (-(-room // stride) if self.ceil else room // stride) + 1
            if self.ceil and (count - 1) * stride >= size + low:
                count -= 1
            found.append(count)
        return found

    def taps(self, x: TensorValue, sizes: Sequence[int], fill: Any) -> list[TensorValue]:
        """For each element of a window the tensor of that element of all windows."""
        counts = self.counts(sizes)
        pairs: Pairs = []
        for size, count, taps, stride, dilation, (low, _) in zip(
            sizes, counts, self.kernel, self.strides, self.dilations, self.pairs, strict=True
        ):
            end = (count - 1) * stride + dilation * (taps - 1) + 1
            pairs.append((low, end - size - low))
        x = padded(x, [(0, 0), (0, 0), *pairs], "constant", fill)
        parts: list[TensorValue] = []
        for place in np.ndindex(*self.kernel):
            index = [
                slice(p * d, p * d + (count - 1) * s + 1, s)
                for p, d, count, s in zip(place, self.dilations, counts, self.strides, strict=True)
            ]
            parts.append(x[(slice(None), slice(None), *index)])
        return parts

    def attributes(self) -> dict[str, Any]:
        """The attributes of the ops of two spatial axes."""
        one = [1] * (2 - len(self.kernel))
        pairs = [*[(0, 0)] * len(one), *self.pairs]
        return {
            "kernel": tuple([*one, *self.kernel]),
            "stride": tuple([*one, *self.strides]),
            "dilation": tuple([*one, *self.dilations]),
            "padding": tuple(amount for pair in pairs for amount in pair),
            "ceil_mode": self.ceil,
        }

    @property
    def is_plain(self) -> bool:
        """Whether the ops of images compute it."""
        return len(self.kernel) <= 2 and all(
            0 <= low <= window // 2 and 0 <= high <= window // 2
            for (low, high), window in zip(self.pairs, self.kernel, strict=True)
        )


def _images(name: str, x: TensorValue, attributes: dict[str, Any]) -> TensorValue:
    """A pooling op of images with channels last."""
    flat = x.rank == 3
    images = ops.unsqueeze(x, 2) if flat else x
    y = stage(name, (ops.permute(images, [0, 2, 3, 1]),), attributes)
    y = ops.permute(y, [0, 3, 1, 2])
    return ops.squeeze(y, 2) if flat else y


@op("MaxPool")
def max_pool(node: Node, x: TensorValue) -> Any:
    windows = Windows(node, x)
    if windows.is_plain and not node.wants(1):
        return (_images("max_pool", x, windows.attributes()),)
    sizes = [node.static(dim) for dim in x.shape[2:]]
    dtype = x.dtype
    low = -math.inf if dtype.is_float() else np.iinfo(dtype.to_numpy()).min
    parts = windows.taps(x, sizes, low)
    if not node.wants(1):
        result = parts[0]
        for part in parts[1:]:
            result = maximum(result, part)
        return (result,)
    stacked = ops.stack(parts, 0)
    best = ops.argmax(stacked, 0)
    values = ops.max(stacked, axis=0)
    shape = parts[0].shape
    return ops.reshape(values, shape), _flat_indices(
        node, x, windows, sizes, ops.reshape(best, shape)
    )


def _flat_indices(
    node: Node, x: TensorValue, windows: Windows, sizes: list[int], best: TensorValue
) -> TensorValue:
    """The places of maxima in the operand, counted in its memory's order."""
    column_major = node.attr("storage_order", 0)
    counts = windows.counts(sizes)
    order = range(len(sizes)) if column_major else reversed(range(len(sizes)))
    strides = dict.fromkeys(range(len(sizes)), 1)
    total = 1
    for axis in order:
        strides[axis] = total
        total *= sizes[axis]
    offsets = np.zeros(windows.kernel, np.int64)
    base = np.zeros(counts, np.int64)
    for axis in range(len(sizes)):
        tap = np.arange(windows.kernel[axis]) * windows.dilations[axis] * strides[axis]
        first = (
            np.arange(counts[axis]) * windows.strides[axis] - windows.pairs[axis][0]
        ) * strides[axis]
        shape = [-1 if other == axis else 1 for other in range(len(sizes))]
        offsets += tap.reshape(shape)
        base += first.reshape(shape)
    inner = ops.gather(ops.constant(offsets.reshape(-1)), best, 0) + ops.constant(base)
    batch, channels = x.shape[:2]
    image = ops.range(0, batch * channels, 1, dtype=DType.int64, device=x.device) * total
    return inner + ops.reshape(image, [batch, channels, *[1] * len(sizes)])


@op("AveragePool")
def average_pool(node: Node, x: TensorValue) -> TensorValue:
    windows = Windows(node, x)
    counts_padding = bool(node.attr("count_include_pad", 0))
    if windows.is_plain and x.dtype.is_float():
        attributes = {**windows.attributes(), "count_boundary": counts_padding}
        return _images("avg_pool", x, attributes)
    sizes = [node.static(dim) for dim in x.shape[2:]]
    total = _sum(windows.taps(x, sizes, 0))
    number = np.ones(windows.counts(sizes))
    for axis, count in enumerate(windows.counts(sizes)):
        low, high = windows.pairs[axis] if counts_padding else (0, 0)
        places = np.arange(count)[:, None] * windows.strides[axis] - windows.pairs[axis][0]
        places = places + np.arange(windows.kernel[axis]) * windows.dilations[axis]
        inside = ((places >= -low) & (places < sizes[axis] + high)).sum(1)
        number = number * inside.reshape([-1 if i == axis else 1 for i in range(len(sizes))])
    return total / ops.constant(number.astype(x.dtype.to_numpy()))


def _sum(parts: list[TensorValue]) -> TensorValue:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


@op("LpPool")
def lp_pool(node: Node, x: TensorValue) -> TensorValue:
    windows = Windows(node, x)
    p = float(node.attr("p", 2))
    sizes = [node.static(dim) for dim in x.shape[2:]]
    return _root(_sum([_powered(part, p) for part in windows.taps(x, sizes, 0)]), p)


def _powered(x: TensorValue, p: float) -> TensorValue:
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
    return _root(over(_powered(x, p), axes, ops.sum), p)


@op("MaxUnpool")
def max_unpool(node: Node) -> TensorValue:
    x, indices = node.tensor(0), node.tensor(1)
    kernel = list(node.attr("kernel_shape"))
    n = len(kernel)
    strides = steps(node, "strides", n)
    pads = node.attr("pads") or [0] * (2 * n)
    sizes = node.static_shape(0)
    inner = [(sizes[2 + i] - 1) * strides[i] + kernel[i] - pads[i] - pads[i + n] for i in range(n)]
    shape = [*sizes[:2], *inner]
    result = shape
    if node.has(2):
        result = node.ints(2)
    zeros = ops.broadcast_to(ops.constant(np.zeros((), x.dtype.to_numpy())), [math.prod(shape)])
    places = ops.reshape(ops.cast(indices, DType.int64), [-1])
    y = ops.reshape(ops.scatter(zeros, ops.reshape(x, [-1]), places, 0), shape)
    if result == shape:
        return y
    return padded(
        y, [(0, new - old) for old, new in zip(shape, result, strict=True)], "constant", 0
    )
