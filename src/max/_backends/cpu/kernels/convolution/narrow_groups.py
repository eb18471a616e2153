"""Convolutions of narrow groups, as many channels in as out, of which depthwise ones have one: channels are the lanes.

A vector holds the columns of whole groups. Each of its lanes is multiplied by a channel of its own group, which one
shuffle of the vector of the same channels of the input gives::

    groups of 4, channel 1 of each   x │ 0 1 2 3 │ 4 5 6 7 │ …  →  │ 1 1 1 1 │ 5 5 5 5 │ …

Strips of 32 columns, as other convolutions have, would hold zeros but for the columns of one group. The filter is not
packed: its rows `[…, channel, columns]` are these factors.

A task is a line of the result. It goes tile by tile of up to 8 positions and a vector of channels, whose sums stay in
registers through all taps: 8 accumulators, a factor, an element, and with groups 8 vectors of the input. The input is
read in place: taps in the padding are left out, and positions that have some are tiles of their own. Neighboring
columns stay in the L1 cache from tap to tap.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from max import kernel as k
from max._backends.cpu.kernels.convolution.inputs import inside
from max._backends.cpu.kernels.convolution.patches import Steps
from max._backends.cpu.kernels.tiles.strips import Results, identity
from max._backends.cpu.kernels.tiles.tiling import multiply_add

HEIGHTS = (8, 4, 2, 1)
"""Neighboring positions of a tile: their sums stay in registers through all taps."""


class Taps(NamedTuple):
    """The taps of a tile that lie in the input.

    Args:
        begin: The first one along each axis.
        end: The one after the last.
        step: Elements from tap to tap along each axis.
    """

    begin: Any
    end: Any
    step: Any


class Channels(NamedTuple):
    """A vector of channels of neighboring positions.

    Args:
        elements: The input, flat.
        origin: The first position's first tap, which may lie before the input.
        stride: Elements from position to position.
        first: The first channel.
        mask: The channels that exist; None: all.
    """

    elements: Any
    origin: Any
    stride: Any
    first: Any
    mask: Any


def sum_type(*dtypes: Any) -> Any:
    """The dtype of sums of products: the widest one, of 32 bits or more."""
    widest = max(dtypes, key=lambda dtype: dtype.size)
    if widest.size >= 4:
        return widest
    return k.f32 if widest.is_float else k.i32


@k.inline
def channel_of_groups(a: Channels, at: k.Value, channel: int, group: int, width: int) -> Any:
    """For each lane a channel of its group.

    Args:
        a: The input.
        at: The element of the first lane.
        channel: The channel, from 0 on.
        group: Channels of a group, at most `width`, of which it is a divisor.
        width: Lanes of a vector.
    """
    if group == width:
        # a vector is one group, and has no mask
        return k.splat(a.elements[at + channel], width)
    v = a.elements.load(at, width=width, mask=a.mask)
    if group == 1:
        return v
    return k.shuffle(v, None, [i // group * group + channel for i in k.static_range(width)])


@k.inline
def narrow_tile(
    results: Results,
    row: k.Value,
    a: Channels,
    weight: k.View,
    taps: Taps,
    height: int,
    group: int,
    sums_dtype: k.ScalarType,
) -> None:
    """Computes a vector of channels for `height` neighboring positions.

    Args:
        results: The result `[rows, C]`, the epilogue and its views.
        row: The first position's row.
        a: The input.
        weight: `[Q, R, S, group, C]`.
        taps: The taps that are read, the same for all positions.
        height: Positions of the tile.
        group: Channels of a group.
        sums_dtype: The dtype of the sums.
    """
    width, first, mask = results.width, a.first, a.mask
    sums = k.tile(sums_dtype, (height,), width=width, fill=0)
    for q in range(taps.begin[0], taps.end[0]):
        for r in range(taps.begin[1], taps.end[1]):
            line = a.origin + q * taps.step[0] + r * taps.step[1] + first
            for s in range(taps.begin[2], taps.end[2]):
                at = line + s * taps.step[2]
                for channel in k.static_range(group):
                    factor = weight.load(q, r, s, channel, first, width=width, mask=mask)
                    factor = k.cast(factor, sums_dtype)
                    for i in k.static_range(height):
                        v = channel_of_groups(a, at + i * a.stride, channel, group, width)
                        sums[i] = multiply_add(sums[i], k.cast(v, sums_dtype), factor)
    for i in k.static_range(height):
        value = results.epilogue(sums[i], row + i, first, mask, results.extra)
        results.out.store(row + i, first, value=value, mask=mask)


@k.kernel
def narrow_groups(
    out: k.Output,
    x: k.Input,
    weight: k.Input,
    *extra: k.Input,
    ctx: k.Context,
    steps: Steps,
    group: int,
    epilogue: Any = identity,
) -> None:
    """`conv` where a group has `group` channels and as many columns: `weight` is `[Q, R, S, group, C]`."""
    sums = sum_type(x.dtype, weight.dtype)
    width = ctx.target.width(sums)
    stride, dilation, padding = steps
    high, tall, wide, channels = x.shape[1], x.shape[2], x.shape[3], weight.shape[4]
    rows = out.reshape(out.shape[0] * out.shape[1] * out.shape[2] * out.shape[3], channels)
    results = Results(rows, extra, epilogue, width)
    elements = x.reshape(x.size)
    strides = (tall * wide * channels, wide * channels, channels)
    step = (dilation[0] * strides[0], dilation[1] * strides[1], dilation[2] * strides[2])
    # the positions of a line whose taps all lie in the input
    inner = k.ceildiv(padding[4], stride[2])
    reach = (weight.shape[2] - 1) * dilation[2]
    outer = k.max((wide - 1 - reach + padding[4] + stride[2]) // stride[2], 0)
    for n, d, h in ctx.parallel((out.shape[0], out.shape[1], out.shape[2])):
        row = ((n * out.shape[1] + d) * out.shape[2] + h) * out.shape[3]
        # the first tap of a position; in the padding it is negative
        plane, line = d * stride[0] - padding[0], h * stride[1] - padding[2]
        first_q, last_q = inside(plane, dilation[0], weight.shape[0], high)
        first_r, last_r = inside(line, dilation[1], weight.shape[1], tall)
        origin = n * high * strides[0] + plane * strides[0] + line * strides[1]
        w = k.i64(0)
        while w < out.shape[3]:
            column = w * stride[2] - padding[4]
            first_s, last_s = inside(column, dilation[2], weight.shape[2], wide)
            taps = Taps((first_q, first_r, first_s), (last_q, last_r, last_s), step)
            # between `inner` and `outer` positions have equal taps and share a tile
            whole = w >= inner and w < outer
            room = k.select(whole, k.min(outer, out.shape[3]) - w, k.i64(1))
            done = k.i64(0)
            for height in k.unroll(HEIGHTS):
                # the tallest tile that fits
                if done == 0 and room >= height:
                    for c, mask in k.vectors(channels, width):
                        a = Channels(
                            elements, origin + column * channels, stride[2] * channels, c, mask
                        )
                        narrow_tile(results, row + w, a, weight, taps, height, group, sums)
                    done = k.i64(height)
            w += done
