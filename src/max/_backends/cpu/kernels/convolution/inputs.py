"""Inputs of convolutions and pooling: the axes of images and volumes, taps inside of an image, copies with padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from max import kernel as k


def image_axes(rank: int) -> list[Sequence[int]]:
    """The axes of an image or a volume as those of a volume.

    Args:
        rank: 4 or 5.
    """
    # an image has no depth: its axis of the volume is empty
    return [(0,), () if rank == 4 else (1,), (rank - 3,), (rank - 2,), (rank - 1,)]


@k.inline
def inside(first: k.Value, step: k.Value, taps: k.Value, size: k.Value) -> Any:
    """The taps of a window that lie in `[0, size)`: the first one, and the one after the last."""
    # the first tap at 0 or behind it
    begin = k.max(k.ceildiv(-first, step), 0)
    end = k.min(k.ceildiv(size - first, step), taps)
    return begin, end


@k.inline
def fill_row(row: k.View, fill: int, width: int) -> None:
    """Sets a row to a number."""
    value = k.splat(k.cast(k.i32(fill), row.dtype), width)
    for j, mask in k.vectors(row.size, width):
        row.store(j, value=value, mask=mask)


@k.inline
def copy_cast(target: k.View, source: k.View, width: int) -> None:
    """Copies a row to another dtype."""
    for j, mask in k.vectors(target.size, width):
        value = k.cast(source.load(j, width=width, mask=mask), target.dtype)
        target.store(j, value=value, mask=mask)


@k.inline
def pad_input(
    padded: k.View, x: k.View, low: Any, sizes: Any, groups: int, ctx: k.Context, fill: int = 0
) -> None:
    """Copies `x` `[N, D, H, W, C]` to `[N, groups, *sizes, channels]`, with padding around each spatial axis.

    Args:
        padded: The result, flat.
        x: The input.
        low: For each spatial axis the padding before it.
        sizes: The sizes of the spatial axes with their padding.
        groups: Groups of channels.
        ctx: The context.
        fill: What the padding holds.
    """
    width = ctx.target.width(padded.dtype)
    channels = x.shape[4] // groups
    line = sizes[2] * channels
    for n, g, d, h in ctx.parallel((x.shape[0], groups, sizes[0], sizes[1])):
        at = (((n * groups + g) * sizes[0] + d) * sizes[1] + h) * line
        target = padded[at : at + line]
        from_d = d - low[0]
        from_h = h - low[1]
        # lines in the padding of D or H have no elements of x
        if from_d >= 0 and from_d < x.shape[1] and from_h >= 0 and from_h < x.shape[2]:
            begin = low[2] * channels
            size = x.shape[3] * channels
            fill_row(target[:begin], fill, width)
            fill_row(target[begin + size :], fill, width)
            row = x[n, from_d, from_h]
            if groups == 1:
                copy_cast(target[begin : begin + size], row.reshape(size), width)
            else:
                # channels of a group are side by side in the copy, not in the input
                for w in range(x.shape[3]):
                    pixel = target[begin + w * channels : begin + (w + 1) * channels]
                    copy_cast(pixel, row[w, g * channels :], width)
        else:
            fill_row(target, fill, width)


@k.inline
def padded_sizes(x: k.View, padding: Any) -> Any:
    """The sizes of the spatial axes with their padding.

    Args:
        x: The input `[N, D, H, W, C]`.
        padding: Before and after each axis.
    """
    return (
        x.shape[1] + padding[0] + padding[1],
        x.shape[2] + padding[2] + padding[3],
        x.shape[3] + padding[4] + padding[5],
    )
