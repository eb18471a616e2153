"""Deformable convolutions: the taps of a filter read at places that another tensor shifts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from max.dtype import DType
from max.graph import TensorValue, ops
from max.importers.errors import Unsupported

__all__ = ["deformable_convolution"]


def deformable_convolution(
    x: TensorValue,
    weight: TensorValue,
    offset: TensorValue,
    mask: TensorValue | None,
    strides: Sequence[int],
    pads: Sequence[int],
    dilations: Sequence[int],
    groups: int,
    parts: int,
) -> TensorValue:
    """Bilinear samples at shifted taps, then a product with the filter. All sizes are numbers.

    Args:
        x: The images, ``[N, C, H, W]``.
        weight: The filter, ``[F, C / groups, KH, KW]``.
        offset: The shifts, ``[N, parts * KH * KW * 2, rows, columns]``: of the rows, then of the columns.
        mask: The factors of the samples, ``[N, parts * KH * KW, rows, columns]``; None: all are 1.
        strides: The steps of both axes.
        pads: The padding before both axes.
        dilations: The distances of taps of both axes.
        groups: The groups of channels that the filter sees.
        parts: The groups of channels that share their shifts.
    """
    batch, channels, height, width = (int(dim) for dim in x.shape)
    features, _, *kernel = (int(dim) for dim in weight.shape)
    rows, columns = (int(dim) for dim in offset.shape[2:])
    taps = kernel[0] * kernel[1]
    if min(groups, parts) < 1 or channels % groups or channels % parts or features % groups:
        raise Unsupported(
            f"{channels} channels and {features} filters do not split into {groups} groups, {parts} of offsets"
        )
    offsets = ops.reshape(offset, [batch, parts, taps, 2, rows, columns])
    base = np.zeros((taps, 2, rows, columns), np.float64)
    for tap in range(taps):
        row, column = divmod(tap, kernel[1])
        base[tap, 0] = (np.arange(rows) * strides[0] - pads[0] + row * dilations[0])[:, None]
        base[tap, 1] = (np.arange(columns) * strides[1] - pads[1] + column * dilations[1])[None]
    places = offsets + ops.constant(base.astype(x.dtype.to_numpy()))
    flat = ops.reshape(x, [batch * parts, channels // parts, height * width])
    y = ops.reshape(places[:, :, :, 0], [batch * parts, taps * rows * columns])
    z = ops.reshape(places[:, :, :, 1], [batch * parts, taps * rows * columns])
    samples = _bilinear(flat, y, z, height, width)
    samples = ops.reshape(samples, [batch, parts, channels // parts, taps, rows * columns])
    if mask is not None:
        samples = samples * ops.reshape(mask, [batch, parts, 1, taps, rows * columns])
    windows = ops.reshape(samples, [batch, groups, channels // groups * taps, rows * columns])
    filters = ops.reshape(weight, [1, groups, features // groups, channels // groups * taps])
    return ops.reshape(ops.matmul(filters, windows), [batch, features, rows, columns])


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
