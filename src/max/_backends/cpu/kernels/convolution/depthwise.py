"""Depthwise convolutions, where each channel is a group: channels are the lanes, and the filter is not packed.

A task is a line of the result. It goes tile by tile of `POSITIONS` positions and a vector of channels, whose sums stay
in registers through all taps: 8 accumulators, a factor and an element. The padded input is in a workspace; a tile reads
neighboring columns of it, which stay in the L1 cache from tap to tap.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from max import kernel as k
from max._backends.cpu.kernels.convolution.inputs import pad_input
from max._backends.cpu.kernels.convolution.patches import Steps
from max._backends.cpu.kernels.tiles.strips import Results, identity
from max._backends.cpu.kernels.tiles.tiling import multiply_add

POSITIONS = 8
"""Neighboring positions of a tile: their sums stay in registers through all taps."""


class Channels(NamedTuple):
    """A vector of channels of a line of positions.

    Args:
        lines: The padded input, flat, from the first position's first tap on.
        strides: Elements from depth to depth, line to line, column to column.
        stride: Elements from position to position.
        first: The first channel.
        mask: The channels that exist; None: all.
    """

    lines: Any
    strides: Any
    stride: Any
    first: Any
    mask: Any


@k.inline
def depthwise_tile(
    results: Results, row: Any, count: Any, a: Channels, weight: Any, height: int, dilation: Any
) -> None:
    """Computes a vector of channels for `height` neighboring positions.

    Args:
        results: The result `[rows, C]`, the epilogue and its views.
        row: The first position's row.
        count: Positions that are stored.
        a: The input.
        weight: `[Q, R, S, 1, C]`.
        height: Positions of the tile.
        dilation: From tap to tap along the axes.
    """
    taps, width, first, mask = weight.shape, results.width, a.first, a.mask
    sums = k.tile(a.lines.dtype, (height,), width=width, fill=0)
    for q in range(taps[0]):
        for r in range(taps[1]):
            line = q * dilation[0] * a.strides[0] + r * dilation[1] * a.strides[1]
            for s in range(taps[2]):
                factor = weight.load(q, r, s, 0, first, width=width, mask=mask)
                factor = k.cast(factor, a.lines.dtype)
                at = line + s * dilation[2] * a.strides[2] + first
                for i in k.static_range(height):
                    v = a.lines.load(at + i * a.stride, width=width, mask=mask)
                    sums[i] = multiply_add(sums[i], v, factor)
    for i in k.static_range(height):
        # the last tile of a line reads past it: those sums are dropped
        if i < count:
            at = row + i
            value = results.epilogue(sums[i], at, first, mask, results.extra)
            results.out.store(at, first, value=value, mask=mask)


@k.kernel
def depthwise(
    out: k.Output,
    x: k.Input,
    weight: k.Input,
    padded: k.InOut,
    *extra: k.Input,
    ctx: k.Context,
    steps: Steps,
    epilogue: Any = identity,
) -> None:
    """`conv` where each channel is a group with one channel in the result: `weight` is `[Q, R, S, 1, C]`."""
    width = ctx.target.width(padded.dtype)
    stride, dilation, padding = steps
    channels = weight.shape[4]
    high = x.shape[1] + padding[0] + padding[1]
    tall = x.shape[2] + padding[2] + padding[3]
    wide = x.shape[3] + padding[4] + padding[5]
    pad_input(padded, x, (padding[0], padding[2], padding[4]), (high, tall, wide), 1, ctx)
    ctx.barrier()
    rows = out.reshape(out.shape[0] * out.shape[1] * out.shape[2] * out.shape[3], channels)
    results = Results(rows, extra, epilogue, width)
    strides = (tall * wide * channels, wide * channels, channels)
    step = stride[2] * channels
    for n, d, h in ctx.parallel((out.shape[0], out.shape[1], out.shape[2])):
        line = ((n * high + d * stride[0]) * tall + h * stride[1]) * wide * channels
        row = ((n * out.shape[1] + d) * out.shape[2] + h) * out.shape[3]
        for w in range(0, out.shape[3], POSITIONS):
            lines = padded[line + w * step :]
            for c, mask in k.vectors(channels, width):
                a = Channels(lines, strides, step, c, mask)
                count = out.shape[3] - w
                depthwise_tile(results, row + w, count, a, weight, POSITIONS, dilation)
