"""Convolution, pooling, resize and fold; windows are evaluated with one array operation per tap."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np

from max._interpreter.core import Array, Frame, InterpreterError, implements, widest
from max.mlir import MoOp


def _pairs(flat: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(flat[0::2], flat[1::2], strict=True))


def _windows(
    sizes: Sequence[int], taps: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
    """Yields each tap with the slices of the spatial axes that select its element of every window."""
    # the slice of no windows must be empty: the formula of its end assumes one or more
    for tap in product(*map(range, taps)):
        axes = zip(tap, dilation, stride, sizes, strict=True)
        yield (
            tap,
            tuple(slice(t * d, t * d + s * (n - 1) + 1 if n else 0, s) for t, d, s, n in axes),
        )


@implements("conv")
def _conv(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Array:
    # x: [batch, *spatial, channels]; weight: [*taps, channels / groups, filters]
    x, weight = (widest(a) for a in operands)
    x = np.pad(x, [(0, 0), *_pairs(op.attr("padding")), (0, 0)])
    shape = frame.shape(op.results[0].type)
    groups: int = op.attr("groups")
    out = np.zeros((*shape[:-1], groups, shape[-1] // groups), x.dtype)
    windows = _windows(shape[1:-1], weight.shape[:-2], op.attr("stride"), op.attr("dilation"))
    for tap, places in windows:
        elements = x[(slice(None), *places)]
        elements = elements.reshape(*elements.shape[:-1], groups, weight.shape[-2])
        filters = weight[tap].reshape(weight.shape[-2], groups, -1)
        out += np.einsum("...gc,cgf->...gf", elements, filters)
    return out.reshape(shape)


@implements("conv_transpose")
def _conv_transpose(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Array:
    x, weight = (widest(a) for a in operands)
    shape = frame.shape(op.results[0].type)
    padding = _pairs(op.attr("padding"))
    # each element of x adds a window to a large enough result, which is cropped at the end
    uncropped = [n + low + high for n, (low, high) in zip(shape[1:3], padding, strict=True)]
    stride: tuple[int, ...] = op.attr("stride")
    sizes = [max(n, (m + 1) * s) for n, m, s in zip(uncropped, x.shape[1:3], stride, strict=True)]
    reach = [d * r for d, r in zip(op.attr("dilation"), weight.shape[:2], strict=True)]
    out = np.zeros(
        (shape[0], *(n + r for n, r in zip(sizes, reach, strict=True)), shape[3]), x.dtype
    )
    for tap, places in _windows(x.shape[1:3], weight.shape[:2], stride, op.attr("dilation")):
        out[(slice(None), *places)] += x @ weight[tap]
    (top, _), (left, _) = padding
    return out[:, top : top + shape[1], left : left + shape[2]]


def _pad_for_windows(
    frame: Frame, op: MoOp, x: Array, fill: float
) -> tuple[Array, list[tuple[tuple[int, ...], tuple[slice, ...]]]]:
    """Pads the input so that all windows fit, including those of `ceil_mode`; also returns the taps' slices."""
    taps, stride, dilation = (op.attr(name) for name in ("kernel", "stride", "dilation"))
    sizes = frame.shape(op.results[0].type)[1:3]
    pads = [(0, 0)]
    for i, (low, high) in enumerate(_pairs(op.attr("padding"))):
        # one beyond the last element that the last window reads
        end = (sizes[i] - 1) * stride[i] + (taps[i] - 1) * dilation[i] + 1
        pads.append((low, max(high, end - low - x.shape[1 + i])))
    padded = np.pad(x, [*pads, (0, 0)], constant_values=fill)
    return padded, list(_windows(sizes, taps, stride, dilation))


@implements("max_pool")
def _max_pool(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Array:
    x = widest(operands[0])
    lowest = -np.inf if x.dtype.kind == "f" else np.iinfo(x.dtype).min
    padded, windows = _pad_for_windows(frame, op, x, lowest)
    out = np.full(frame.shape(op.results[0].type), lowest, x.dtype)
    for _, places in windows:
        out = np.maximum(out, padded[(slice(None), *places)])
    return out


@implements("avg_pool")
def _avg_pool(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Array:
    x = operands[0]
    # narrow integers are summed in int64, so that sums do not wrap
    x = x.astype(np.int64 if x.dtype.kind in "iu" else np.float64)
    padded, windows = _pad_for_windows(frame, op, x, 0)
    ones = np.ones((1, *x.shape[1:3], 1), np.int64)
    if op.attr("count_boundary"):
        ones = np.pad(ones, [(0, 0), *_pairs(op.attr("padding")), (0, 0)], constant_values=1)
        extra = [b - a for a, b in zip(ones.shape[1:3], padded.shape[1:3], strict=True)]
        counted = np.pad(ones, [(0, 0), (0, extra[0]), (0, extra[1]), (0, 0)])
    else:
        counted, _ = _pad_for_windows(frame, op, ones, 0)
    shape = frame.shape(op.results[0].type)
    total = np.zeros(shape, x.dtype)
    count = np.zeros((1, *shape[1:3], 1), np.int64)
    for _, places in windows:
        total += padded[(slice(None), *places)]
        count += counted[(slice(None), *places)]
    # a window may lie in padding as a whole
    count = np.maximum(count, 1)
    return total // count if x.dtype.kind in "iu" else total / count


def _cubic(t: Array) -> list[Array]:
    """Keys' cubic convolution weights, a = -0.75, of four neighbors for a position `t` after the second one."""
    a = -0.75
    distances = (1 + t, t, 1 - t, 2 - t)
    near = [((a + 2) * d - (a + 3)) * d * d + 1 for d in distances]
    far = [((a * d - 5 * a) * d + 8 * a) * d - 4 * a for d in distances]
    return [far[0], near[1], near[2], far[3]]


def _resize_axis(x: Array, axis: int, size: int, mode: str) -> Array:
    """Resizes one axis by a weighted sum of neighbors."""
    old_size = x.shape[axis]
    if mode == "nearest":
        return np.take(x, np.arange(size) * old_size // max(size, 1), axis)
    # centers of pixels are aligned, not corners
    position = (np.arange(size) + 0.5) * old_size / max(size, 1) - 0.5
    if mode == "bilinear":
        position = np.maximum(position, 0)
    first = np.floor(position).astype(np.int64)
    t = position - first
    weights, offset = ([1 - t, t], 0) if mode == "bilinear" else (_cubic(t), -1)
    shape = [-1 if i == axis else 1 for i in range(x.ndim)]
    return sum(
        # neighbors beyond the border repeat it
        np.take(x, np.clip(first + offset + i, 0, old_size - 1), axis) * weight.reshape(shape)
        for i, weight in enumerate(weights)
    )  # pyright: ignore[reportReturnType]


@implements("resize")
def _resize(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Array:
    shape = frame.shape(op.results[0].type)
    mode: str = op.attr("mode")
    if 0 in shape:
        return np.zeros(shape, operands[0].dtype)
    x = operands[0] if mode == "nearest" else operands[0].astype(np.float64)
    return _resize_axis(_resize_axis(x, 2, shape[2], mode), 3, shape[3], mode)


@implements("fold")
def _fold(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Array:
    x = widest(operands[0])
    shape = frame.shape(op.results[0].type)
    kernel, stride, dilation = (op.attr(name) for name in ("kernel", "stride", "dilation"))
    padding = _pairs(op.attr("padding"))
    uncropped = [n + low + high for n, (low, high) in zip(shape[2:], padding, strict=True)]
    axes = zip(uncropped, kernel, dilation, stride, strict=True)
    blocks = [(n - d * (k - 1) - 1) // s + 1 for n, k, d, s in axes]
    if blocks[0] * blocks[1] != x.shape[2]:
        raise InterpreterError(f"fold: {x.shape[2]} blocks, expected {blocks[0]} * {blocks[1]}")
    # [batch, channels, kernel rows, kernel columns, block rows, block columns]
    columns = x.reshape(*shape[:2], *kernel, *blocks)
    out = np.zeros((*shape[:2], *uncropped), x.dtype)
    for tap, places in _windows(blocks, kernel, stride, dilation):
        out[(slice(None), slice(None), *places)] += columns[:, :, tap[0], tap[1]]
    (top, _), (left, _) = padding
    return out[:, :, top : top + shape[2], left : left + shape[3]]
