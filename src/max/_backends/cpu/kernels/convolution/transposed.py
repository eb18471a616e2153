"""Transposed convolutions over images.

All workers first copy the input to a workspace with its margin around it, and the filter as strips two vectors wide.
Columns of the result that are a stride apart (a phase) see the same taps, of neighboring columns of the input: they
make the tiles, whose sums stay in registers through all taps and channels: 12 × 2 vectors with 32 registers, 6 × 2 with
16, besides two vectors of the filter and a broadcast element. No inserted zeros are multiplied::

    result   0 1 2 0 1 2 0 1 2      stride 3: phases 0, 1, 2
             └─────┴─────┘          a tile of phase 0: columns 0, 3, 6 … see taps s with
                                  (phase + padding - s · dilation) % 3 == 0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from max import kernel as k
from max._backends.cpu.kernels.convolution.inputs import image_axes, pad_input
from max._backends.cpu.kernels.convolution.patches import Steps
from max._backends.cpu.kernels.products.blocking import is_long
from max._backends.cpu.kernels.tiles.micro_kernels import add_sums, load_sums, store_sums
from max._backends.cpu.kernels.tiles.strips import Results, identity
from max._backends.cpu.kernels.tiles.tiling import Matrix, multiply_add
from max._backends.kernel_call import KernelCall, Operand, Workspace, product, view
from max.dtype import DType

MAX_HEIGHT, MAX_STRIP = 12, 32
"""The maximum number of positions of a tile, and of columns of a strip."""
PIECE = 256
"""The number of channels with accumulators of their own, where sums are folded."""


@k.inline
def pack_vector_strips(packed: k.View, weight: k.View, groups: int, ctx: k.Context) -> None:
    """Copies a filter `[taps * channels, F]` as `[groups, strips, taps * channels, strip]`; zero-filled."""
    width = ctx.target.width(packed.dtype)
    features = weight.shape[1] // groups
    strips = k.ceildiv(features, 2 * width)
    for g, strip, i in ctx.parallel((groups, strips, weight.shape[0])):
        # [group][strip][tap * channel][2 vectors]
        at = ((g * strips + strip) * weight.shape[0] + i) * (2 * width)
        for j in k.static_range(2):
            column = strip * (2 * width) + j * width
            mask = k.iota(k.i64, width) + column < features
            value = weight.load(i, g * features + column, width=width, mask=mask)
            packed.store(at + j * width, value=k.cast(value, packed.dtype))


class Positions(NamedTuple):
    """Positions of the result a stride apart, and the columns of a strip.

    Args:
        row: The row of the first position.
        step: Rows from position to position.
        count: Positions that are stored.
        column: The first column.
        columns: Columns of the strip.
    """

    row: Any
    step: Any
    count: Any
    column: Any
    columns: Any


@k.inline
def add_tap(
    sums: k.View, a: Any, step: k.Value, b: k.View, size: k.Integer, height: int, width: int
) -> None:
    """Adds to a tile the products of the channels of each position with a tap of a strip.

    Args:
        sums: `height` × 2 vectors.
        a: The padded input, flat, from the first position's channels on.
        step: From position to position.
        b: Rows of the strip, flat, from the tap on.
        size: Channels.
        height: Positions.
        width: Lanes of a vector.
    """
    for n in range(size):
        low = b.load(n * (2 * width), width=width)
        high = b.load(n * (2 * width) + width, width=width)
        for i in k.static_range(height):
            left = k.splat(a[n + i * step], width)
            sums[i, 0] = multiply_add(sums[i, 0], left, low)
            sums[i, 1] = multiply_add(sums[i, 1], left, high)


@k.inline
def add_long_tap(
    buffer: Any, a: k.View, channels: k.Integer, b: k.View, height: int, width: int
) -> None:
    """`add_tap` to sums in memory: each piece of the channels has accumulators of its own, so that the error does not
    grow with their number.
    """
    for begin in range(0, channels, PIECE):
        sums = k.tile(buffer.dtype, (height, 2), width=width, fill=0)
        size = k.min(channels - begin, PIECE)
        add_tap(sums, a[begin:], channels, b[begin * (2 * width) :], size, height, width)
        add_sums(sums, Matrix(buffer, 2 * width), height, 2, width)
        store_sums(Matrix(buffer, 2 * width), sums, height, 2, width)


@k.inline
def store_positions(
    results: Results, sums: k.View, buffer: k.View, height: int, p: Positions
) -> None:
    """Stores the results of a tile.

    Args:
        results: The result `[rows, F]`, the epilogue and its views.
        sums: `height` × 2 vectors.
        buffer: Scratch memory for them.
        height: Positions of the tile.
        p: The positions and columns that are stored.
    """
    width = results.width
    store_sums(Matrix(buffer, 2 * width), sums, height, 2, width)
    for i in range(p.count):
        at = p.row + i * p.step
        for j, mask in k.vectors(p.columns, width):
            v = buffer.load(i * (2 * width) + j, width=width)
            value = results.epilogue(v, at, p.column + j, mask, results.extra)
            results.out.store(at, p.column + j, value=value, mask=mask)


@k.inline
def heights(ctx: k.Context) -> Any:
    """The heights of tiles: as registers allow, two thirds of that, a third."""
    return (12, 8, 4) if ctx.target.registers >= 32 else (6, 4, 2)


@k.kernel
def conv_transpose(
    out: k.Output,
    x: k.Input,
    weight: k.Input,
    padded: k.InOut,
    packed: k.InOut,
    *extra: k.Input,
    ctx: k.Context,
    steps: Steps,
    margin: Any,
    folds: bool,
    epilogue: Any = identity,
) -> None:
    """`out` `[N, 1, H, W, F]` from `x` `[N, 1, H, W, C]` and `weight` `[R, S, C, F]`.

    `margin` is the padding of the copy of `x`: before and after H, before and after W. With `folds` the sums of each
    tap are folded, as `Tiling.folds` describes.
    """
    width = ctx.target.width(padded.dtype)
    stride, dilation, padding = steps
    taps = weight.shape
    channels = taps[2]
    depth = taps[0] * taps[1] * channels
    strips = k.ceildiv(taps[3], 2 * width)
    tall = x.shape[2] + margin[0] + margin[1]
    wide = x.shape[3] + margin[2] + margin[3]
    pad_input(padded, x, (0, margin[0], margin[2]), (1, tall, wide), 1, ctx)
    pack_vector_strips(packed, weight.reshape(depth, taps[3]), 1, ctx)
    ctx.barrier()
    rows = out.reshape(out.shape[0] * out.shape[2] * out.shape[3], taps[3])
    buffer = ctx.scratch(padded.dtype, (MAX_HEIGHT * 2 * width,))
    results = Results(rows, extra, epilogue, width)
    # tasks of a phase write columns a stride apart, no two the same
    for strip, n, h, phase in ctx.parallel((strips, out.shape[0], out.shape[2], stride[1])):
        column = strip * (2 * width)
        strip_columns = k.min(taps[3] - column, 2 * width)
        filter_at = strip * depth * (2 * width)
        row = (n * out.shape[2] + h) * out.shape[3] + phase
        # columns of this phase in a line
        columns = k.ceildiv(out.shape[3] - phase, stride[1])
        w = k.i64(0)
        while w < columns:
            remaining = columns - w
            done = k.i64(0)
            for height in k.unroll(heights(ctx)):
                # the lowest tile that takes what remains, in steps of a third
                smaller = height - heights(ctx)[2]
                if done == 0 and (remaining > smaller or smaller == 0):
                    sums = k.tile(padded.dtype, (height, 2), width=width, fill=0)
                    if folds:
                        store_sums(Matrix(buffer, 2 * width), sums, height, 2, width)
                    for r in range(taps[0]):
                        from_h = h + padding[0] - r * dilation[0]
                        # other rows of taps fall between the lines of the input
                        if from_h % stride[0] == 0:
                            line = (n * tall + from_h // stride[0] + margin[0]) * wide
                            for s in range(taps[1]):
                                from_w = phase + padding[2] - s * dilation[1]
                                # other taps fall between its columns
                                if from_w % stride[1] == 0:
                                    # positions of a tile, a stride apart, are neighbors in the input
                                    a = line + w + from_w // stride[1] + margin[2]
                                    b = filter_at + (r * taps[1] + s) * channels * (2 * width)
                                    left, right = padded[a * channels :], packed[b:]
                                    if folds:
                                        add_long_tap(buffer, left, channels, right, height, width)
                                    else:
                                        add_tap(
                                            sums, left, channels, right, channels, height, width
                                        )
                    if folds:
                        load_sums(sums, Matrix(buffer, 2 * width), height, 2, width)
                    done = k.min(remaining, height)
                    tile = Positions(row + w * stride[1], stride[1], done, column, strip_columns)
                    store_positions(results, sums, buffer, height, tile)
            w += done


def _workspaces(
    x: Operand, sizes: Sequence[Any], weight: Operand, groups: int, channels: Any, step: int
) -> tuple[Workspace, Workspace]:
    """Memory for the padded input, whose positions have `channels` a group, and for the packed filter."""
    sums = x.dtype
    if sums.size_in_bytes < 4:
        sums = DType.float32 if sums.is_float() else DType.int32
    # tiles at the end of a row read past it (those results are discarded)
    beyond = channels * (MAX_HEIGHT * step)
    padded = product((x.shape[0], *sizes, x.shape[-1])) + beyond
    depth = product(weight.shape[:-1])
    packed = depth * (weight.shape[-1] + groups * MAX_STRIP)
    return Workspace(sums, (padded,)), Workspace(sums, (packed,))


def _lower_conv_transpose(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    """The call for `mo.conv_transpose`, with workspaces for the padded input and the packed filter."""
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
        view("result", 0, results[0], image_axes(4), static=False),
        view("operand", 0, x, image_axes(4), static=False),
        view("operand", 1, weight, static=False),
        *(view("workspace", i, space, static=False) for i, space in enumerate(workspaces)),
    )
    depth = product(weight.shape[:-1])
    params = {
        "steps": Steps(stride, dilation, padding),
        "margin": tuple(margin),
        "folds": is_long(depth if isinstance(depth, int) else None),
    }
    return KernelCall(conv_transpose, args, params, epilogue=True, workspaces=workspaces)


LOWERINGS = {"mo.conv_transpose": _lower_conv_transpose}
