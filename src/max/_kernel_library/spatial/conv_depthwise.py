"""Convolutions where each channel is a group (depthwise): channels are the lanes, and the filter is not copied."""

from __future__ import annotations

from typing import Any

from max import kernel as k
from max._kernel_library.spatial.conv_input import pad_input
from max._kernel_library.tiles.strips import identity
from max._kernel_library.tiles.tiling import multiply_add

POSITIONS = 8
"""Neighbouring positions of a tile."""


@k.inline
def depthwise_tile(
    out: Any, row: Any, count: Any, a: Any, lines: Any, step: Any, weight: Any, mask: Any, c: Any,
    height: int, width: int, dilation: Any, epilogue: Any, extra: Any,
) -> None:  # fmt: skip
    """The sums of one vector of channels, from `c` on, for `height` neighbouring positions, of which `count` are kept.

    Args:
        out: The result `[rows, C]`.
        row: The first position's row.
        count: How many are kept.
        a: The padded input, flat, from the first position's first tap on.
        lines: Elements from depth to depth, line to line, column to column.
        step: Elements from position to position.
        weight: `[Q, R, S, 1, C]`.
        mask: Which channels there are.
        c: The first channel.
        height: Positions.
        width: Lanes of a vector.
        dilation: The distances of taps.
        epilogue: The epilogue.
        extra: Its views.
    """
    taps = weight.shape
    sums = k.tile(a.dtype, (height,), width=width, fill=0)
    for q in range(taps[0]):
        for r in range(taps[1]):
            line = q * dilation[0] * lines[0] + r * dilation[1] * lines[1]
            for s in range(taps[2]):
                by = k.cast(weight.load(q, r, s, 0, c, width=width, mask=mask), a.dtype)
                at = line + s * dilation[2] * lines[2] + c
                for i in k.static_range(height):
                    seen = a.load(at + i * step, width=width, mask=mask)
                    sums[i] = multiply_add(sums[i], seen, by)
    for i in k.static_range(height):
        if i < count:
            at = row + i
            out.store(at, c, value=epilogue(sums[i], at, c, mask, extra), mask=mask)


@k.kernel
def depthwise(
    out: k.Output,
    x: k.Input,
    weight: k.Input,
    padded: k.InOut,
    *extra: k.Input,
    ctx: k.Context,
    stride: Any,
    dilation: Any,
    padding: Any,
    epilogue: Any = identity,
) -> None:
    """`conv` where each channel is a group with one channel in the result: `weight` is `[Q, R, S, 1, C]`."""
    width = ctx.target.width(padded.dtype)
    channels = weight.shape[4]
    high = x.shape[1] + padding[0] + padding[1]
    tall = x.shape[2] + padding[2] + padding[3]
    wide = x.shape[3] + padding[4] + padding[5]
    pad_input(padded, x, (padding[0], padding[2], padding[4]), (high, tall, wide), 1, ctx)
    ctx.barrier()
    rows = out.reshape(out.shape[0] * out.shape[1] * out.shape[2] * out.shape[3], channels)
    lines = (tall * wide * channels, wide * channels, channels)
    step = stride[2] * channels
    for n, d, h in ctx.parallel((out.shape[0], out.shape[1], out.shape[2])):
        line = ((n * high + d * stride[0]) * tall + h * stride[1]) * wide * channels
        row = ((n * out.shape[1] + d) * out.shape[2] + h) * out.shape[3]
        for w in range(0, out.shape[3], POSITIONS):
            a = padded[line + w * step :]
            for c, mask in k.vectors(channels, width):
                depthwise_tile(
                    rows, row + w, out.shape[3] - w, a, lines, step, weight, mask, c,
                    POSITIONS, width, dilation, epilogue, extra,
                )  # fmt: skip
