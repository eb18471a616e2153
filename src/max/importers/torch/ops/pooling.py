"""Pooling over windows, and over parts of an image of equal number."""

from __future__ import annotations

from typing import Any

import numpy as np

from max.graph import TensorValue, ops
from max.importers.errors import Unsupported
from max.importers.functions.pooling import Windows, average_pool, max_pool, max_pool_with_places
from max.importers.functions.reductions import over
from max.importers.torch.ops.convolution import full
from max.importers.torch.table import Call, op


def _with_batch(x: TensorValue, n: int) -> TensorValue:
    return ops.unsqueeze(x, 0) if x.rank == n + 1 else x


def _windows(
    call: Call,
    n: int,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    ceil_mode: bool,
) -> Windows:
    sizes = full(kernel, n)
    pairs = [(pad, pad) for pad in full(padding, n)]
    # without a stride windows do not overlap
    strides = full(stride, n) or sizes
    return Windows(sizes, strides, full(dilation, n), pairs, call.static, ceil_mode)


@op("aten.max_pool2d_with_indices.default", "aten.max_pool3d_with_indices.default")
def max_pool_with_indices(
    call: Call,
    x: TensorValue,
    kernel: list[int],
    stride: list[int] = [],  # noqa: B006
    padding: list[int] = [0],  # noqa: B006
    dilation: list[int] = [1],  # noqa: B006
    ceil_mode: bool = False,
) -> Any:
    n = 3 if "3d" in call.node.op else 2
    windows = _windows(call, n, kernel, stride, padding, dilation, ceil_mode)
    images = _with_batch(x, n)
    results: list[TensorValue] = []
    if call.node.wants(1):
        y, places = max_pool_with_places(windows, images)
        plane = int(np.prod(windows.sizes(images)))
        # torch counts the places in the plane of each channel
        results += [y, ops.mod(places, ops.constant(np.array(plane, np.int64)))]
    else:
        results.append(max_pool(windows, images))
    if x.rank == n + 1:
        results = [ops.squeeze(result, 0) for result in results]
    return (*results, None)[:2]


@op("aten.avg_pool1d.default", "aten.avg_pool2d.default", "aten.avg_pool3d.default")
def avg_pool(
    call: Call,
    x: TensorValue,
    kernel: list[int],
    stride: list[int] = [],  # noqa: B006
    padding: list[int] = [0],  # noqa: B006
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> TensorValue:
    n = int(call.node.op.split("avg_pool")[1][0])
    sizes = full(kernel, n)
    if divisor_override is not None and ceil_mode:
        raise Unsupported("has both ceil_mode and divisor_override")
    windows = _windows(call, n, kernel, stride, padding, [1], ceil_mode)
    counts_padding = count_include_pad or divisor_override is not None
    y = average_pool(windows, _with_batch(x, n), counts_padding)
    # the mean over all elements of a window is its sum over their number
    if divisor_override is not None:
        y = y * (float(np.prod(sizes)) / divisor_override)
    return ops.squeeze(y, 0) if x.rank == n + 1 else y


def _edges(size: int, parts: int) -> list[tuple[int, int]]:
    """The first element of each part, and the one behind its last."""
    # parts overlap where their number does not divide the size
    return [(i * size // parts, -(-(i + 1) * size // parts)) for i in range(parts)]


@op(
    "aten._adaptive_avg_pool2d.default", "aten._adaptive_avg_pool3d.default", "aten.adaptive_avg_pool1d.default"
)  # fmt: skip
def adaptive_avg_pool(call: Call, x: TensorValue, output_size: list[int]) -> TensorValue:
    """Means over parts, by a product with a matrix for each axis."""
    n = len(output_size)
    for axis, parts in zip(range(x.rank - n, x.rank), output_size, strict=True):
        if parts == 1:
            x = over(x, [axis], ops.mean)
            continue
        size = call.static(x.shape[axis])
        if size == parts:
            continue
        weights = np.zeros((size, parts))  # the weight of each element in each part
        for part, (first, last) in enumerate(_edges(size, parts)):
            weights[first:last, part] = 1 / (last - first)
        # a product with a matrix is along the last axis
        order = [a for a in range(x.rank) if a != axis] + [axis]
        y = ops.matmul(ops.permute(x, order), ops.constant(weights.astype(x.dtype.to_numpy())))
        x = ops.permute(y, [order.index(a) for a in range(x.rank)])
    return x


@op("aten.adaptive_max_pool2d.default", "aten.adaptive_max_pool3d.default")
def adaptive_max_pool(call: Call, x: TensorValue, output_size: list[int]) -> Any:
    if call.node.wants(1):
        raise Unsupported("the places of the maxima are used")
    n = len(output_size)
    for axis, parts in zip(range(x.rank - n, x.rank), output_size, strict=True):
        columns: list[TensorValue] = []
        for first, last in _edges(call.static(x.shape[axis]), parts):
            index: list[Any] = [slice(None)] * x.rank
            index[axis] = slice(first, last)
            columns.append(ops.max(x[tuple(index)], axis=axis))
        x = ops.concat(columns, axis)
    return x, None
