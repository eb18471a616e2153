"""Convolutions over images and volumes, as products of patches that are never made.

The filter is packed as strips of 32 columns: for filters that a graph holds once, when it is loaded (`mok.pack_filter`), for others by
all workers before they begin. The input is copied into a workspace that has its padding around it and a group's channels side by side;
without padding it is read where it is. Then no index is checked any more, and each position of the result is an offset into the input.

A task is some hundred positions by a strip: K block by K block, whose part of the strip stays in the L1 cache, tiles of 12
positions by two vectors are multiplied in registers. The taps of a row lie side by side where they are not dilated, so a first
layer with three channels has runs of 21 for a 7×7 filter.

Filters are `[taps…, C, F]`. bf16 is multiplied in pairs of neighbouring channels where the machine can.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from max import kernel as k
from max._kernels.conv_depthwise import POSITIONS, depthwise
from max._kernels.conv_input import image_axes, pad_input
from max._kernels.lowering import Arg, KernelCall, Operand, Workspace, product, view
from max._kernels.matmul import BLOCK_ROWS, LANES_K, identity, round_up
from max._kernels.panel_blocks import (
    COLUMNS,
    multiply_step,
    storage,
    widen_block,
)
from max._kernels.strips import store_tile
from max._kernels.tiles import Tiling, pack_columns, tiling
from max.dtype import DType
from max.kernel import Target

MAX_HEIGHT = 12
"""Most positions of a tile."""
TASKS_A_WORKER = 8
"""So many tasks keep workers equally busy, one of which may be slowed down by others."""


def conv_tiling(target: Target, x: k.ScalarType, weight: k.ScalarType) -> Tiling:
    """How products are made: as those of matrices, but small integers are summed in 32 bits.

    Args:
        target: The machine.
        x: Element type of the input.
        weight: Element type of the filter.
    """
    t = tiling(target, x, weight)
    if not t.sums.is_float and t.sums.bits < 32:
        return replace(t, sums=k.i32, lane=k.i32, width=target.width(k.i32))
    return t


def is_pairs(dtype: k.ScalarType) -> bool:
    """Whether a packed filter has two neighbouring channels side by side."""
    return dtype.is_float and dtype.bits == 16


def filter_tiling(target: Target, dtype: k.ScalarType, t: Tiling) -> Tiling:
    """How filters are packed.

    Args:
        target: The machine.
        dtype: Element type of the filter.
        t: The tiling of the products.
    """
    return storage(target, dtype) if is_pairs(dtype) else t


def tile_heights(t: Tiling) -> tuple[int, ...]:
    """The heights of tiles: most positions, two thirds of them, a third."""
    return (t.height, t.height * 2 // 3, t.height // 3)


@k.inline
def pack_strips(packed: Any, weight: Any, groups: int, stored: Tiling, ctx: Any) -> None:
    """Packs a filter `[taps…, C / groups, F]` as `[groups, strips, taps * channels][COLUMNS][pair]`; what is not there is 0.

    Args:
        packed: Flat view of lanes.
        weight: The filter.
        groups: Into how many groups columns are split.
        stored: How lanes are packed.
        ctx: The context.
    """
    taps = weight.shape[0] * weight.shape[1] * weight.shape[2]
    channels = weight.shape[3]
    lanes = k.ceildiv(channels, stored.pair)
    features = weight.shape[4] // groups
    strips = k.ceildiv(features, COLUMNS)
    rows = weight.reshape(taps * channels, weight.shape[4])
    for g, strip, tap in ctx.parallel((groups, strips, taps)):
        column = g * features + strip * COLUMNS
        last = k.min(column + COLUMNS, (g + 1) * features)
        at = ((g * strips + strip) * taps + tap) * lanes * COLUMNS
        source = rows[tap * channels : (tap + 1) * channels, column:last]
        pack_columns(packed[at:], source, COLUMNS // stored.width, stored)


@k.kernel
def pack_filter(out: k.Output, weight: k.Input, ctx: k.Context, *, groups: int) -> None:
    """`out` `[groups * strips, elements]` from `weight` `[Q, R, S, C / groups, F]`."""
    t = conv_tiling(ctx.target, weight.dtype, weight.dtype)
    stored = filter_tiling(ctx.target, weight.dtype, t)
    flat = out.reshape(out.shape[0] * out.shape[1])
    pack_strips(flat.view(stored.lane), weight, groups, stored, ctx)


@k.inline
def find_starts(starts: Any, first: Any, count: Any, shape: Any, steps: Any) -> None:
    """Where the patches of `count` positions from `first` on begin in the input; some more equal the last.

    Args:
        starts: What is found, with room for `count + MAX_HEIGHT`.
        first: The first position.
        count: How many.
        shape: `[N, D, H, W]` of the result.
        steps: Lanes of the input from image to image, and from position to position along D, H and W.
    """
    w = first % shape[3]
    h = first // shape[3] % shape[2]
    d = first // (shape[3] * shape[2]) % shape[1]
    n = first // (shape[3] * shape[2] * shape[1])
    for i in range(count + MAX_HEIGHT):
        starts[i] = n * steps[0] + d * steps[1] + h * steps[2] + w * steps[3]
        if i + 1 < count:
            w += 1
            if w == shape[3]:
                w = k.i64(0)
                h += 1
            if h == shape[2]:
                h = k.i64(0)
                d += 1
            if d == shape[1]:
                d = k.i64(0)
                n += 1


@k.inline
def multiply_patches(
    c: Any, a: Any, starts: Any, b: Any, first_run: Any, last_run: Any, begin: Any, length: Any,
    taps: Any, steps: Any, first: Any, height: int, t: Tiling,
) -> None:  # fmt: skip
    """Multiplies some runs of `height` patches by rows of a strip: a register tile of sums.

    Args:
        c: The sums, `COLUMNS` a row; set where `first`, else added to.
        a: The input, flat lanes.
        starts: Where each patch begins.
        b: Rows of the strip, `COLUMNS` lanes each.
        first_run: The first run of neighbouring elements of a patch.
        last_run: After the last.
        begin: The first lane of each run.
        length: How many lanes of each run.
        taps: How many there are along the second axis, and runs of a line.
        steps: Lanes of the input from tap to tap along the axes.
        first: Whether nothing was summed yet.
        height: Positions.
        t: The tiling.
    """
    sums = k.tile(t.sums, (height, 2), width=t.width, fill=0)
    if not first:
        for i in k.static_range(height):
            for j in k.static_range(2):
                sums[i, j] = c.load(i * COLUMNS + j * t.width, width=t.width)
    at = [starts[i] for i in k.static_range(height)]
    for run in range(first_run, last_run):
        q = run // (taps[0] * taps[1])
        r = run // taps[1] % taps[0]
        s = run % taps[1]
        here = a[q * steps[0] + r * steps[1] + s * steps[2] + begin :]
        rows = b[(run - first_run) * length * COLUMNS :]
        for n in range(length):
            multiply_step(sums, here, at, rows, n, height, t)
    for i in k.static_range(height):
        for j in k.static_range(2):
            c.store(i * COLUMNS + j * t.width, value=sums[i, j])


@k.inline
def convolve(
    out: Any, a: Any, weight: Any, packed: Any, extra: Any, taps: Any, channels: Any, stride: Any,
    dilation: Any, sizes: Any, groups: int, stored: Tiling, t: Tiling, epilogue: Any, ctx: Any,
) -> None:  # fmt: skip
    """Multiplies patches of the padded input by strips.

    Args:
        out: `[N, D, H, W, F]`.
        a: The padded input `[N, groups, *sizes, channels]`, flat lanes.
        weight: The filter, for its element type.
        packed: The packed filter, flat lanes.
        extra: The epilogue's views.
        taps: `[Q, R, S]`.
        channels: Lanes of a position of a group.
        stride: From position to position along the axes.
        dilation: From tap to tap along the axes.
        sizes: Of the padded input.
        groups: Into how many groups channels and columns are split.
        stored: How the filter's lanes are packed.
        t: The tiling.
        epilogue: The epilogue.
        ctx: The context.
    """
    heights = tile_heights(t)
    c = ctx.scratch(t.sums, ((BLOCK_ROWS + MAX_HEIGHT) * COLUMNS,))
    wide = ctx.scratch(t.lane, (LANES_K * COLUMNS if stored.pair != t.pair else 1,))
    starts = ctx.scratch(k.i64, (BLOCK_ROWS + MAX_HEIGHT,))
    features = out.shape[4] // groups
    strips = k.ceildiv(features, COLUMNS)
    positions = out.shape[0] * out.shape[1] * out.shape[2] * out.shape[3]
    rows = out.reshape(positions, out.shape[4])
    # without dilation the taps of a line lie side by side
    whole = dilation[2] == 1
    run = taps[2] * channels if whole else channels
    pieces = 1 if whole else taps[2]
    runs = taps[0] * taps[1] * pieces
    line = sizes[2] * channels
    tap_steps = (dilation[0] * sizes[1] * line, dilation[1] * line, dilation[2] * channels)
    image = sizes[0] * sizes[1] * line
    steps = (groups * image, stride[0] * sizes[1] * line, stride[1] * line, stride[2] * channels)
    # a K block is a part of a run, or some runs
    parts = k.max(k.ceildiv(run, LANES_K), 1)
    part = round_up(k.ceildiv(run, parts), 2)
    at_once = k.max(LANES_K // k.max(run, 1), 1)
    blocks = k.ceildiv(runs, at_once) * parts
    tiles = k.ceildiv(positions, t.height)
    wanted = k.ceildiv(TASKS_A_WORKER * ctx.num_workers, k.max(strips * groups, 1))
    row_blocks = k.max(k.ceildiv(positions, BLOCK_ROWS), k.min(wanted, k.ceildiv(tiles, 4)))
    block_rows = k.ceildiv(tiles, k.max(row_blocks, 1)) * t.height
    row_blocks = k.ceildiv(positions, k.max(block_rows, 1))
    for g, row_block, strip in ctx.parallel((groups, row_blocks, strips), grain=1):
        first = row_block * block_rows
        count = k.min(block_rows, positions - first)
        column = strip * COLUMNS
        here = k.min(features - column, COLUMNS)
        mine = rows[:, : (g + 1) * features]
        find_starts(starts, first, count, out.shape, steps)
        group = a[g * image :]
        filter_at = (g * strips + strip) * runs * run
        # one block at least: it sets the sums to 0 where there is nothing to sum
        for block in range(k.max(blocks, 1)):
            first_run = block // parts * at_once
            last_run = k.min(first_run + at_once, runs)
            begin = block % parts * part
            length = k.min(part, run - begin)
            depth = (last_run - first_run) * length
            from_lane = (filter_at + first_run * run + begin) // (stored.pair // t.pair)
            b = packed[from_lane * COLUMNS :]
            if stored.pair != t.pair:
                widen_block(wide, b, depth // 2, weight.dtype, t)
            right = wide if stored.pair != t.pair else b
            row = k.i64(0)
            while row < count:
                left = count - row
                done = k.i64(0)
                for height in k.unroll(heights):
                    smaller = height - heights[2]
                    if done == 0 and (left > smaller or smaller == 0):
                        for half in k.static_range(0, COLUMNS, 2 * t.width):
                            if half < here:
                                multiply_patches(
                                    c[row * COLUMNS + half :], group, starts[row:], right[half:],
                                    first_run, last_run, begin, length, (taps[1], pieces),
                                    tap_steps, block == 0, height, t,
                                )  # fmt: skip
                        done = k.min(left, height)
                if block + 1 >= blocks:
                    store_tile(
                        mine, c[row * COLUMNS :], first + row, done, g * features + column, extra,
                        epilogue, t.width,
                    )  # fmt: skip
                row += done


@k.inline
def is_direct(x: Any, t: Tiling, plain: bool) -> bool:
    """Whether an input is multiplied where it is."""
    return plain and (x.dtype == t.lane or t.pair == 2)


@k.inline
def flat_lanes(x: Any, t: Tiling) -> Any:
    """All lanes of a view."""
    return x.reshape(x.size).view(t.lane)


@k.inline
def prepare(
    padded: Any, x: Any, padding: Any, groups: int, stored: Tiling, t: Tiling, ctx: Any
) -> None:
    """Makes the padded input."""
    sizes = padded_sizes(x, padding)
    elements = padded.view(x.dtype if t.pair == 2 else t.lane)
    low = (padding[0], padding[2], padding[4])
    pad_input(elements, x, low, sizes, groups, stored.pair, ctx)


@k.inline
def padded_sizes(x: Any, padding: Any) -> Any:
    """The sizes of the spatial axes with their padding."""
    return (
        x.shape[1] + padding[0] + padding[1],
        x.shape[2] + padding[2] + padding[3],
        x.shape[3] + padding[4] + padding[5],
    )


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
    plain: bool,
    epilogue: Any = identity,
) -> None:
    """`out` `[N, D, H, W, F]` from `x` `[N, D, H, W, C]` and `weight` `[Q, R, S, C / groups, F]`."""
    t = conv_tiling(ctx.target, x.dtype, weight.dtype)
    stored = filter_tiling(ctx.target, weight.dtype, t)
    strips = packed.view(stored.lane)
    if not is_direct(x, t, plain):
        prepare(padded, x, padding, groups, stored, t, ctx)
    pack_strips(strips, weight, groups, stored, ctx)
    ctx.barrier()
    a = flat_lanes(x, t) if is_direct(x, t, plain) else padded.view(t.lane)
    taps = (weight.shape[0], weight.shape[1], weight.shape[2])
    channels = round_up(weight.shape[3], stored.pair) // t.pair
    convolve(
        out, a, weight, strips, extra, taps, channels, stride, dilation, padded_sizes(x, padding),
        groups, stored, t, epilogue, ctx,
    )  # fmt: skip


@k.kernel
def conv_packed(
    out: k.Output,
    x: k.Input,
    weight: k.Input,
    padded: k.InOut,
    *extra: k.Input,
    ctx: k.Context,
    taps: Any,
    stride: Any,
    dilation: Any,
    padding: Any,
    groups: int,
    plain: bool,
    epilogue: Any = identity,
) -> None:
    """`conv` with a packed filter, `[groups * strips, elements]`, of `taps` `[Q, R, S]`."""
    t = conv_tiling(ctx.target, x.dtype, weight.dtype)
    stored = filter_tiling(ctx.target, weight.dtype, t)
    if not is_direct(x, t, plain):
        prepare(padded, x, padding, groups, stored, t, ctx)
        ctx.barrier()
    a = flat_lanes(x, t) if is_direct(x, t, plain) else padded.view(t.lane)
    channels = round_up(x.shape[4] // groups, stored.pair) // t.pair
    convolve(
        out, a, weight, flat_lanes(weight, stored), extra, taps, channels, stride, dilation,
        padded_sizes(x, padding), groups, stored, t, epilogue, ctx,
    )  # fmt: skip


def filter_elements(taps: Sequence[int], channels: int, dtype: DType) -> int:
    """Elements of a strip of a packed filter.

    Args:
        taps: How many there are along each axis.
        channels: Channels of a group.
        dtype: Element type of the filter.
    """
    pair = 2 if dtype in (DType.bfloat16, DType.float16) else 1
    return product(taps) * (-(-channels // pair) * pair) * COLUMNS


def sum_dtype(*dtypes: DType) -> DType:
    """What products are summed in, of 32 bits or more."""
    widest = max(dtypes, key=lambda dtype: dtype.size_in_bytes)
    if widest.size_in_bytes >= 4:
        return widest
    return DType.float32 if widest.is_float() else DType.int32


def _window(attributes: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """The stride, dilation and padding along three axes."""
    stride, dilation, padding = (
        tuple(int(n) for n in attributes[name]) for name in ("stride", "dilation", "padding")
    )
    if rank == 4:
        stride, dilation, padding = (1, *stride), (1, *dilation), (0, 0, *padding)
    return {"stride": stride, "dilation": dilation, "padding": padding}


def _padded(
    x: Operand, weight_dtype: DType, window: Mapping[str, Any], groups: int
) -> tuple[bool, Workspace]:
    """Whether the input has no padding and may be read where it is, and memory for the padded one."""
    padding, channels = window["padding"][10 - 2 * len(x.shape) :], x.shape[-1]
    pairs = weight_dtype in (DType.bfloat16, DType.float16)
    plain = groups == 1 and not any(padding)
    plain = plain and (not pairs or (isinstance(channels, int) and channels % 2 == 0))
    sums = sum_dtype(x.dtype, weight_dtype)
    if plain and x.dtype == weight_dtype == sums:
        return True, Workspace(sums, (1,))
    sizes = [n + padding[2 * i] + padding[2 * i + 1] for i, n in enumerate(x.shape[1:-1])]
    return plain, Workspace(sums, (product((x.shape[0], *sizes, channels + groups * pairs)),))


def _lower_conv(
    operands: Sequence[Operand], results: Sequence[Operand], attributes: Mapping[str, Any]
) -> KernelCall:
    x, weight = operands
    rank, groups = len(x.shape), int(attributes["groups"])
    window = _window(attributes, rank)
    taps = [() if rank == 4 else (0,), *((i,) for i in range(rank - 4, rank))]
    args: list[Arg] = [
        view("result", 0, results[0], image_axes(rank), static=False),
        view("operand", 0, x, image_axes(rank), static=False),
        view("operand", 1, weight, taps, static=False),
    ]
    if weight.shape[-2] == 1 and weight.shape[-1] == groups:
        return lower_depthwise(args, x, weight, window)
    plain, padded = _padded(x, weight.dtype, window, groups)
    pairs = weight.dtype in (DType.bfloat16, DType.float16)
    depth = product((*weight.shape[:-2], weight.shape[-2] + pairs))
    kind = weight.dtype if pairs else sum_dtype(x.dtype, weight.dtype)
    packed = Workspace(kind, (depth * (weight.shape[-1] + groups * COLUMNS),))
    args += [
        view("workspace", 0, padded, static=False),
        view("workspace", 1, packed, static=False),
    ]
    params = {**window, "groups": groups, "plain": plain}
    return KernelCall(conv, tuple(args), params, epilogue=True, workspaces=(padded, packed))


def lower_depthwise(
    args: Sequence[Arg], x: Operand, weight: Operand, window: Mapping[str, Any]
) -> KernelCall:
    """A convolution whose groups have one channel and one column.

    Args:
        args: Views of the result, the input and the filter.
        x: The input.
        weight: The filter.
        window: Its stride, dilation and padding.
    """
    rank, stride, padding = len(x.shape), window["stride"], window["padding"]
    padding = padding[10 - 2 * rank :]
    sizes = [n + padding[2 * i] + padding[2 * i + 1] for i, n in enumerate(x.shape[1:-1])]
    # tiles at the end of a row read, and drop, what lies behind it
    beyond = x.shape[-1] * (POSITIONS * stride[2])
    elements = product((x.shape[0], *sizes, x.shape[-1])) + beyond
    padded = Workspace(sum_dtype(x.dtype, weight.dtype), (elements,))
    args = (*args, view("workspace", 0, padded, static=False))
    return KernelCall(depthwise, args, window, epilogue=True, workspaces=(padded,))


def _lower_pack_filter(
    operands: Sequence[Operand], results: Sequence[Operand], attributes: Mapping[str, Any]
) -> KernelCall:
    weight = operands[0]
    rank = len(weight.shape)
    taps = [() if rank == 4 else (0,), *((i,) for i in range(rank - 4, rank))]
    args = (
        view("result", 0, results[0], static=False),
        view("operand", 0, weight, taps, static=False),
    )
    return KernelCall(pack_filter, args, {"groups": int(attributes["groups"])})


def _lower_packed_conv(
    operands: Sequence[Operand], results: Sequence[Operand], attributes: Mapping[str, Any]
) -> KernelCall:
    x, weight = operands
    rank, groups = len(x.shape), int(attributes["groups"])
    window = _window(attributes, rank)
    plain, padded = _padded(x, weight.dtype, window, groups)
    taps = tuple(int(n) for n in attributes["taps"])
    args = (
        view("result", 0, results[0], image_axes(rank), static=False),
        view("operand", 0, x, image_axes(rank), static=False),
        view("operand", 1, weight, static=False),
        view("workspace", 0, padded, static=False),
    )
    params = {
        **window,
        "taps": taps if rank == 5 else (1, *taps),
        "groups": groups,
        "plain": plain,
    }
    return KernelCall(conv_packed, args, params, epilogue=True, workspaces=(padded,))


LOWERINGS = {
    "mo.conv": _lower_conv,
    "mok.pack_filter": _lower_pack_filter,
    "mok.packed_conv": _lower_packed_conv,
}
