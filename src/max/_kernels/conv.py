"""Convolutions over images and volumes, and transposed ones over images.

All workers first copy the input into a workspace that has its padding around it and a group's channels side by side, and the
filter as strips of two vectors' width. Then a task is a row of the result by a strip: tiles of neighbouring positions, whose sums
stay in registers through all taps and channels. No index is checked there, and no matrix of patches is made.

Filters are `[taps…, C, F]`. Where each channel is a group (depthwise) channels are the lanes, and the filter is not copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from max import kernel as k
from max._kernels.lowering import Arg, KernelCall, Operand, Workspace, product, view
from max._kernels.matmul import identity
from max._kernels.tiles import multiply_add
from max.dtype import DType

MAX_HEIGHT, MAX_STRIP = 12, 32
"""Most positions of a tile, most columns of a strip."""


@k.inline
def fill_zero(row: Any, width: int) -> None:
    """Sets a row to 0."""
    zero = k.splat(row.dtype(0), width)
    for j, mask in k.vectors(row.shape[0], width):
        row.store(j, value=zero, mask=mask)


@k.inline
def copy_cast(target: Any, source: Any, width: int) -> None:
    """Copies a row to another dtype."""
    for j, mask in k.vectors(target.shape[0], width):
        value = k.cast(source.load(j, width=width, mask=mask), target.dtype)
        target.store(j, value=value, mask=mask)


@k.inline
def pad_input(padded: Any, x: Any, low: Any, sizes: Any, groups: int, ctx: Any) -> None:
    """Copies `x` `[N, D, H, W, C]` to `[N, groups, *sizes, C / groups]`, with `low` zeros before each spatial axis.

    Args:
        padded: Flat, of the dtype of sums.
        x: The input.
        low: For each spatial axis the zeros before it.
        sizes: The sizes of the spatial axes with all their padding.
        groups: Into how many groups channels are split.
        ctx: The context.
    """
    width = ctx.target.width(padded.dtype)
    channels = x.shape[4] // groups
    line = sizes[2] * channels
    for n, g, d, h in ctx.parallel((x.shape[0], groups, sizes[0], sizes[1])):
        at = (((n * groups + g) * sizes[0] + d) * sizes[1] + h) * line
        target = padded[at : at + line]
        from_d = d - low[0]
        from_h = h - low[1]
        if from_d >= 0 and from_d < x.shape[1] and from_h >= 0 and from_h < x.shape[2]:
            begin = low[2] * channels
            size = x.shape[3] * channels
            fill_zero(target[:begin], width)
            fill_zero(target[begin + size :], width)
            row = x[n, from_d, from_h]
            if groups == 1:
                copy_cast(target[begin : begin + size], row.reshape(size), width)
            else:
                for w in range(x.shape[3]):
                    there = target[begin + w * channels : begin + (w + 1) * channels]
                    copy_cast(there, row[w, g * channels : (g + 1) * channels], width)
        else:
            fill_zero(target, width)


@k.inline
def pack_filter(packed: Any, weight: Any, groups: int, ctx: Any) -> None:
    """Copies a filter `[taps * channels, F]` as `[groups, strips, taps * channels, strip]`; columns that a strip lacks are 0."""
    width = ctx.target.width(packed.dtype)
    features = weight.shape[1] // groups
    strips = k.ceildiv(features, 2 * width)
    for g, strip, i in ctx.parallel((groups, strips, weight.shape[0])):
        at = ((g * strips + strip) * weight.shape[0] + i) * (2 * width)
        for j in k.static_range(2):
            column = strip * (2 * width) + j * width
            mask = k.iota(k.i64, width) + column < features
            value = weight.load(i, g * features + column, width=width, mask=mask)
            packed.store(at + j * width, value=k.cast(value, packed.dtype))


@k.inline
def add_products(
    sums: Any, a: Any, at: Any, step: Any, b: Any, start: Any, size: Any, height: int, width: int
) -> None:
    """Adds to a tile the products of `size` neighbouring elements of each position with rows of a strip.

    Args:
        sums: `height` × 2 vectors.
        a: The padded input, flat.
        at: Where the first position's elements begin.
        step: From position to position.
        b: The packed filter, flat.
        start: Where the strip's rows begin.
        size: How many elements.
        height: Positions.
        width: Lanes of a vector.
    """
    for n in range(size):
        low = b.load(start + n * (2 * width), width=width)
        high = b.load(start + n * (2 * width) + width, width=width)
        for i in k.static_range(height):
            left = k.splat(a[at + n + i * step], width)
            sums[i, 0] = multiply_add(sums[i, 0], left, low)
            sums[i, 1] = multiply_add(sums[i, 1], left, high)


@k.inline
def store_tile(
    out: Any, row: Any, step: Any, count: Any, col: Any, here: Any, sums: Any, room: Any,
    height: int, width: int, epilogue: Any, extra: Any,
) -> None:  # fmt: skip
    """Writes the first `count` positions of a tile to rows `row + i * step`, and to `here` columns from `col` on."""
    for i in k.static_range(height):
        for j in k.static_range(2):
            room.store((i * 2 + j) * width, value=sums[i, j])
    for i in range(count):
        at = row + i * step
        for j, mask in k.vectors(here, width):
            v = room.load(i * (2 * width) + j, width=width)
            out.store(at, col + j, value=epilogue(v, at, col + j, mask, extra), mask=mask)


@k.inline
def heights(ctx: Any) -> Any:
    """The heights of tiles: most positions, two thirds of them, a third."""
    return (12, 8, 4) if ctx.target.registers >= 32 else (6, 4, 2)


@k.kernel
def conv(
    out: k.Output,
    x: k.Input,
    weight: k.Input,
    padded: k.InOut,
    packed: k.InOut,
    *extra: k.Input,
    ctx: k.Context,
    stride: Any,
    dilation: Any,
    padding: Any,
    groups: int,
    epilogue: Any = identity,
) -> None:
    """`out` `[N, D, H, W, F]` from `x` `[N, D, H, W, C]` and `weight` `[Q, R, S, C / groups, F]`."""
    width = ctx.target.width(padded.dtype)
    taps = weight.shape
    channels = taps[3]
    depth = taps[0] * taps[1] * taps[2] * channels
    features = taps[4] // groups
    strips = k.ceildiv(features, 2 * width)
    high = x.shape[1] + padding[0] + padding[1]
    tall = x.shape[2] + padding[2] + padding[3]
    wide = x.shape[3] + padding[4] + padding[5]
    pad_input(
        padded, x, (padding[0], padding[2], padding[4]), (high, tall, wide), groups, ctx
    )  # fmt: skip
    pack_filter(packed, weight.reshape(depth, taps[4]), groups, ctx)
    ctx.barrier()
    rows = out.reshape(out.shape[0] * out.shape[1] * out.shape[2] * out.shape[3], taps[4])
    room = ctx.scratch(padded.dtype, (MAX_HEIGHT * 2 * width,))
    # without dilation the taps of a row lie side by side
    run = taps[2] * channels if dilation[2] == 1 else channels
    pieces = 1 if dilation[2] == 1 else taps[2]
    step = stride[2] * channels
    shape = (groups, strips, out.shape[0], out.shape[1], out.shape[2])
    for g, strip, n, d, h in ctx.parallel(shape):
        column = strip * (2 * width)
        here = k.min(features - column, 2 * width)
        filter_at = (g * strips + strip) * depth * (2 * width)
        image = (n * groups + g) * high
        row = ((n * out.shape[1] + d) * out.shape[2] + h) * out.shape[3]
        w = k.i64(0)
        while w < out.shape[3]:
            left = out.shape[3] - w
            done = k.i64(0)
            for height in k.unroll(heights(ctx)):
                smaller = height - heights(ctx)[2]
                if done == 0 and (left > smaller or smaller == 0):
                    sums = k.tile(padded.dtype, (height, 2), width=width, fill=0)
                    b = filter_at
                    for q in range(taps[0]):
                        for r in range(taps[1]):
                            line = (image + d * stride[0] + q * dilation[0]) * tall
                            line = (line + h * stride[1] + r * dilation[1]) * wide
                            a = line * channels + w * step
                            for _ in range(pieces):
                                add_products(sums, padded, a, step, packed, b, run, height, width)
                                a += dilation[2] * channels
                                b += run * (2 * width)
                    done = k.min(left, height)
                    store_tile(
                        rows, row + w, 1, done, g * features + column, here, sums, room,
                        height, width, epilogue, extra,
                    )  # fmt: skip
            w += done


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
        for w in range(0, out.shape[3], 8):
            a = padded[line + w * step :]
            for c, mask in k.vectors(channels, width):
                depthwise_tile(
                    rows, row + w, out.shape[3] - w, a, lines, step, weight, mask, c,
                    8, width, dilation, epilogue, extra,
                )  # fmt: skip


@k.kernel
def conv_transpose(
    out: k.Output,
    x: k.Input,
    weight: k.Input,
    padded: k.InOut,
    packed: k.InOut,
    *extra: k.Input,
    ctx: k.Context,
    stride: Any,
    dilation: Any,
    padding: Any,
    margin: Any,
    epilogue: Any = identity,
) -> None:
    """`out` `[N, 1, H, W, F]` from `x` `[N, 1, H, W, C]` and `weight` `[R, S, C, F]`.

    Columns of the result that are `stride` apart see the same taps, of neighbouring columns of `x`: they make the tiles.
    `margin` is what `x` gets around it: before and after H, before and after W.
    """
    width = ctx.target.width(padded.dtype)
    taps = weight.shape
    channels = taps[2]
    depth = taps[0] * taps[1] * channels
    strips = k.ceildiv(taps[3], 2 * width)
    tall = x.shape[2] + margin[0] + margin[1]
    wide = x.shape[3] + margin[2] + margin[3]
    pad_input(padded, x, (0, margin[0], margin[2]), (1, tall, wide), 1, ctx)
    pack_filter(packed, weight.reshape(depth, taps[3]), 1, ctx)
    ctx.barrier()
    rows = out.reshape(out.shape[0] * out.shape[2] * out.shape[3], taps[3])
    room = ctx.scratch(padded.dtype, (MAX_HEIGHT * 2 * width,))
    for strip, n, h, phase in ctx.parallel((strips, out.shape[0], out.shape[2], stride[1])):
        column = strip * (2 * width)
        here = k.min(taps[3] - column, 2 * width)
        filter_at = strip * depth * (2 * width)
        row = (n * out.shape[2] + h) * out.shape[3] + phase
        columns = k.ceildiv(out.shape[3] - phase, stride[1])
        w = k.i64(0)
        while w < columns:
            left = columns - w
            done = k.i64(0)
            for height in k.unroll(heights(ctx)):
                smaller = height - heights(ctx)[2]
                if done == 0 and (left > smaller or smaller == 0):
                    sums = k.tile(padded.dtype, (height, 2), width=width, fill=0)
                    for r in range(taps[0]):
                        from_h = h + padding[0] - r * dilation[0]
                        if from_h % stride[0] == 0:
                            line = (n * tall + from_h // stride[0] + margin[0]) * wide
                            for s in range(taps[1]):
                                from_w = phase + padding[2] - s * dilation[1]
                                if from_w % stride[1] == 0:
                                    a = line + w + from_w // stride[1] + margin[2]
                                    b = filter_at + (r * taps[1] + s) * channels * (2 * width)
                                    add_products(
                                        sums, padded, a * channels, channels, packed, b, channels,
                                        height, width,
                                    )  # fmt: skip
                    done = k.min(left, height)
                    store_tile(
                        rows, row + w * stride[1], stride[1], done, column, here, sums, room,
                        height, width, epilogue, extra,
                    )  # fmt: skip
            w += done


def _workspaces(
    x: Operand, sizes: Sequence[Any], weight: Operand, groups: int, channels: Any, step: int
) -> tuple[Workspace, Workspace]:
    """Memory for the padded input, whose positions have `channels` a group, and for the packed filter."""
    sums = x.dtype
    if sums.size_in_bytes < 4:
        sums = DType.float32 if sums.is_float() else DType.int32
    # tiles at the end of a row read, and drop, what lies behind it
    beyond = channels * (MAX_HEIGHT * step)
    padded = product((x.shape[0], *sizes, x.shape[-1])) + beyond
    depth = product(weight.shape[:-1])
    packed = depth * (weight.shape[-1] + groups * MAX_STRIP)
    return Workspace(sums, (padded,)), Workspace(sums, (packed,))


def _image(rank: int) -> list[Sequence[int]]:
    """The axes of an image or a volume as those of a volume."""
    return [(0,), () if rank == 4 else (1,), (rank - 3,), (rank - 2,), (rank - 1,)]


def _lower_conv(
    operands: Sequence[Operand], results: Sequence[Operand], attributes: Mapping[str, Any]
) -> KernelCall:
    x, weight = operands
    rank, groups = len(x.shape), int(attributes["groups"])
    padding = tuple(int(n) for n in attributes["padding"])
    strides = tuple(int(n) for n in attributes["stride"])
    three = rank == 5
    params: dict[str, Any] = {
        "stride": strides if three else (1, *strides),
        "dilation": tuple(attributes["dilation"]) if three else (1, *attributes["dilation"]),
        "padding": padding if three else (0, 0, *padding),
    }
    taps = [() if rank == 4 else (0,), *((i,) for i in range(rank - 4, rank))]
    args: list[Arg] = [
        view("result", 0, results[0], _image(rank), static=False),
        view("operand", 0, x, _image(rank), static=False),
        view("operand", 1, weight, taps, static=False),
    ]
    sizes = [x.shape[1 + i] + padding[2 * i] + padding[2 * i + 1] for i in range(rank - 2)]
    alone = weight.shape[-2] == 1 and weight.shape[-1] == groups
    channels = x.shape[-1] if alone else weight.shape[-2]
    workspaces = _workspaces(x, sizes, weight, groups, channels, strides[-1])
    if alone:
        args.append(view("workspace", 0, workspaces[0], static=False))
        return KernelCall(depthwise, tuple(args), params, epilogue=True, workspaces=workspaces[:1])
    args += [view("workspace", i, space, static=False) for i, space in enumerate(workspaces)]
    return KernelCall(
        conv, tuple(args), {**params, "groups": groups}, epilogue=True, workspaces=workspaces
    )


def _lower_conv_transpose(
    operands: Sequence[Operand], results: Sequence[Operand], attributes: Mapping[str, Any]
) -> KernelCall:
    x, weight = operands
    names = ("stride", "dilation", "padding", "output_padding")
    stride, dilation, padding, more = (tuple(int(n) for n in attributes[name]) for name in names)
    margin: list[int] = []
    for i in range(2):
        reach = (weight.shape[i] - 1) * dilation[i]
        before = max(0, -((padding[2 * i] - reach) // stride[i]))
        after = max(0, (reach + more[i] - padding[2 * i + 1]) // stride[i])
        margin += [before, after]
    sizes = [x.shape[1 + i] + margin[2 * i] + margin[2 * i + 1] for i in range(2)]
    workspaces = _workspaces(x, sizes, weight, 1, x.shape[-1], 1)
    args = (
        view("result", 0, results[0], _image(4), static=False),
        view("operand", 0, x, _image(4), static=False),
        view("operand", 1, weight, static=False),
        *(view("workspace", i, space, static=False) for i, space in enumerate(workspaces)),
    )
    params = {
        "stride": stride,
        "dilation": dilation,
        "padding": padding,
        "margin": tuple(margin),
    }
    return KernelCall(conv_transpose, args, params, epilogue=True, workspaces=workspaces)


LOWERINGS = {"mo.conv": _lower_conv, "mo.conv_transpose": _lower_conv_transpose}
