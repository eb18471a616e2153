"""Convolutions over images and volumes, as products of patches that are never made.

The filter is packed as strips of 32 columns: for filters that a graph holds once, when it is loaded (`mok.pack_filter`), for others by
all workers before they begin. Each position of the result is an offset into the input, which is read where it is, or from a workspace
that has its padding around it and a group's channels side by side, or from copies of patches (see `MODES`, `max._kernel_library.spatial.conv_patches`).

A task is some hundred positions by some strips: K block by K block, whose part of a strip stays in the L1 cache, tiles of 12
positions by two vectors are multiplied in registers. Without dilation the taps of a row lie side by side in the workspace, so a first
layer with three channels has runs of 21 for a 7×7 filter.

Filters are `[taps…, C, F]`. bf16 is multiplied in pairs of neighbours where the machine can.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from max import kernel as k
from max._kernel_library.lowering import Arg, KernelCall, Operand, Workspace, product, view
from max._kernel_library.products.blocking import (
    BLOCK_ROWS,
    BLOCK_SUMS,
    LANES_K,
    STEP,
    choose_height,
    plan,
    taller_from,
    tile_heights,
)
from max._kernel_library.products.dense.panels import COPY_STRIDE, storage, widen_block
from max._kernel_library.spatial.conv_depthwise import POSITIONS, depthwise
from max._kernel_library.spatial.conv_input import image_axes, pad_input, padded_sizes
from max._kernel_library.spatial.conv_patches import (
    LINE,
    MAX_HEIGHT,
    MOST_TAPS,
    copy_patches,
    find_patches,
    multiply_patches,
)
from max._kernel_library.tiles.packing import pack_columns
from max._kernel_library.tiles.strips import COLUMNS, Results, identity, prefetch_tile, store_tile
from max._kernel_library.tiles.tiling import Tiling, round_up, tiling
from max.dtype import DType
from max.kernel import Target

LEAST_RUN = 48
"""Patches with fewer lanes of channels are not read in place, where taps are to be checked one by one: each takes some time."""
TASK_BYTES = 1 << 18
"""Bytes of the input that a task reads again for each strip, if they are no more: they stay in the L2 cache."""
COPY_ROWS = 84
"""Most patches of a task that are copied: the L1 cache holds those of few channels."""
MOST_RUNS = 512
"""Most runs of neighbours in a patch that is not copied."""
VECTOR = 64
"""Most elements of a vector."""
MODES = ("in_place", "padded", "copied")
"""How patches are read: in place, with zeros for what lies in the padding; from a copy of the input that has its padding around it and is
made first; from copies of K blocks of patches, which each task makes from that."""


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


@k.inline
def pack_strips(packed: Any, weight: Any, groups: int, stored: Tiling, ctx: Any) -> None:
    """Packs a filter `[taps…, C / groups, F]` as `[groups, strips, taps * channels][COLUMNS]`, pairs of rows side by side; what is not there is 0.

    Args:
        packed: Flat view of lanes.
        weight: The filter.
        groups: Into how many groups columns are split.
        stored: How lanes are packed.
        ctx: The context.
    """
    size = weight.shape[0] * weight.shape[1] * weight.shape[2] * weight.shape[3]
    lanes = k.ceildiv(size, stored.pair)
    features = weight.shape[4] // groups
    strips = k.ceildiv(features, COLUMNS)
    rows = weight.reshape(size, weight.shape[4])
    chunk = LANES_K * stored.pair
    for g, strip, part in ctx.parallel((groups, strips, k.ceildiv(size, chunk))):
        column = g * features + strip * COLUMNS
        last = k.min(column + COLUMNS, (g + 1) * features)
        at = ((g * strips + strip) * lanes + part * LANES_K) * COLUMNS
        source = rows[part * chunk : k.min(part * chunk + chunk, size), column:last]
        pack_columns(packed[at:], source, COLUMNS // stored.width, stored)


@k.kernel
def pack_filter(out: k.Output, weight: k.Input, ctx: k.Context, *, groups: int) -> None:
    """`out` `[groups * strips, elements]` from `weight` `[Q, R, S, C / groups, F]`."""
    t = conv_tiling(ctx.target, weight.dtype, weight.dtype)
    stored = filter_tiling(ctx.target, weight.dtype, t)
    flat = out.reshape(out.shape[0] * out.shape[1])
    pack_strips(flat.view(stored.lane), weight, groups, stored, ctx)


@k.inline
def convolve(
    out: Any, x: Any, padded: Any, weight: Any, packed: Any, extra: Any, taps: Any, channels: Any,
    stride: Any, dilation: Any, padding: Any, groups: int, mode: str, stored: Tiling, t: Tiling,
    epilogue: Any, ctx: Any,
) -> None:  # fmt: skip
    """Multiplies patches by strips.

    Args:
        out: `[N, D, H, W, F]`.
        x: The input `[N, D, H, W, C]`.
        padded: The input with its padding, flat, `[N, groups, D, H, W, C / groups]`, where it is read.
        weight: The filter, for its element type.
        packed: The packed filter, flat lanes.
        extra: The epilogue's views.
        taps: `[Q, R, S]`.
        channels: Channels of a group.
        stride: From position to position along the axes.
        dilation: From tap to tap along the axes.
        padding: Before and after each axis.
        groups: Into how many groups channels and columns are split.
        mode: How patches are read; see `MODES`.
        stored: How the filter's lanes are packed.
        t: The tiling.
        epilogue: The epilogue.
        ctx: The context.
    """
    heights = tile_heights(t)
    copied = mode == "copied"
    in_place = mode == "in_place"
    bounded = in_place and any(padding)
    c = ctx.scratch(t.sums, (BLOCK_SUMS + MAX_HEIGHT * COLUMNS,))
    wide = ctx.scratch(t.lane, (LANES_K * COLUMNS if stored.pair != t.pair else 1,))
    room = BLOCK_ROWS + MAX_HEIGHT
    copy = ctx.scratch(t.lane, (room * COPY_STRIDE if copied else 1,))
    starts = ctx.scratch(k.i64, (room,))
    # the bits of taps that are in the input
    valid = ctx.scratch(k.i64, (room if bounded else 1,))
    offsets = ctx.scratch(k.i64, (1 if copied else MOST_RUNS,))
    zeros = ctx.scratch(t.lane, (LANES_K,))
    features = out.shape[4] // groups
    strips = k.ceildiv(features, COLUMNS)
    positions = out.shape[0] * out.shape[1] * out.shape[2] * out.shape[3]
    rows = out.reshape(positions, out.shape[4])
    size = taps[0] * taps[1] * taps[2] * channels
    strip_lanes = k.ceildiv(size, stored.pair) * COLUMNS
    # neighbouring taps of a line lie side by side where groups do not lie between them
    whole = dilation[2] == 1 and (groups == 1 or not in_place) and not bounded
    pieces = 1 if whole else taps[2]
    runs = taps[0] * taps[1] * pieces
    run = taps[2] * channels if whole else channels
    pixel = x.shape[4] if in_place else channels
    low = (padding[0], padding[2], padding[4]) if in_place else (0, 0, 0)
    spread = x.shape[1:4] if in_place else padded_sizes(x, padding)
    sizes = (1 if in_place else groups, *spread)
    line = dilation[1] * sizes[3] * pixel
    plane = dilation[0] * sizes[2] * sizes[3] * pixel
    if copied:
        blocks = k.ceildiv(size, LANES_K * t.pair)
        part = k.max(round_up(k.ceildiv(size, k.max(blocks, 1)), STEP), STEP)
        blocks = k.ceildiv(size, part)
        parts, at_once = k.i64(1), k.i64(1)
        offsets[0] = 0
        # room for what a vector brings too much
        copy_step = k.min(round_up(part // t.pair, LINE) + LINE, COPY_STRIDE)
    else:
        # from here on all is counted in lanes
        copy_step = k.i64(COPY_STRIDE)
        run = run // t.pair
        pixel = pixel // t.pair
        # a K block is a part of a run, or some runs
        parts = k.max(k.ceildiv(run, LANES_K), 1)
        part = round_up(k.ceildiv(run, parts), 2)
        at_once = k.max(LANES_K // k.max(run, 1), 1)
        at_once = k.max(k.ceildiv(runs, k.max(k.ceildiv(runs, at_once), 1)), 1)
        blocks = k.ceildiv(runs, at_once) * parts
        for i in range(runs):
            q, r, s = i // (taps[1] * pieces), i // pieces % taps[1], i % pieces
            offsets[i] = (q * plane + r * line) // t.pair + s * dilation[2] * pixel
        for i in k.static_range(0, LANES_K, t.width):
            zeros.store(i, value=k.splat(k.cast(k.i32(0), t.lane), t.width))
    # one block at least: it sets the sums to 0 where there is nothing to sum
    blocks = k.max(blocks, 1)
    all_taps = taps[0] * taps[1] * taps[2]
    # where the input of a task stays in the L2 cache it has one strip, whose sums need little of it
    alone = all_taps > 1 and BLOCK_ROWS * channels * x.dtype.size <= TASK_BYTES
    most_sums = k.i64(BLOCK_ROWS * COLUMNS) if alone else k.i64(BLOCK_SUMS)
    tiles, wanted = plan(
        positions, features, k.ceildiv(ctx.num_workers, groups), t,
        COPY_ROWS if copied else BLOCK_ROWS, most_sums, all_taps,
    )  # fmt: skip
    block_rows = tiles * t.height
    tasks = (groups, k.ceildiv(positions, block_rows), k.ceildiv(strips, wanted))
    for g, row_block, strip_group in ctx.parallel(tasks, grain=1):
        first = row_block * block_rows
        count = k.min(block_rows, positions - first)
        first_strip = strip_group * wanted
        here = k.min(wanted, strips - first_strip)
        taller = taller_from(count, t)
        first_lane = (g * strips + first_strip) * strip_lanes
        results = Results(rows[:, : (g + 1) * features], extra, epilogue, t.width)
        find_patches(
            starts, valid if bounded else None, first, count, out.shape, sizes,
            (stride, dilation, low), pixel, taps,
        )  # fmt: skip
        if in_place:
            left = x.reshape(x.size)[g * channels :].view(t.lane)
        else:
            left = padded if copied else padded.view(t.lane)
            left = left[g * sizes[1] * sizes[2] * sizes[3] * pixel :]
        # what changes from block to block is kept in variables, so that the inner loops do not compute it anew
        block, first_run, begin, from_row = k.i64(0), k.i64(0), k.i64(0), k.i64(0)
        last_run = k.i64(1) if copied else k.min(at_once, runs)
        length = k.ceildiv(k.min(part, size), t.pair) if copied else k.min(part, run)
        while block < blocks:
            depth = (last_run - first_run) * length
            if copied:
                copy_patches(
                    copy, left, starts, count, block * part, k.min(block * part + part, size), run,
                    (pixel * dilation[2], line, plane, k.max(pieces, 1), k.max(taps[1], 1)),
                    copy_step, t.pair,
                )  # fmt: skip
            for strip in range(here):
                b = packed[first_lane + strip * strip_lanes + from_row * COLUMNS :]
                if stored.pair != t.pair:
                    widen_block(wide, b, k.ceildiv(depth, 2), weight.dtype, t)
                right = wide if stored.pair != t.pair else b
                # what comes next is asked for while the first tiles are multiplied: the next strip, or the next block of the first one
                after = (strip + 1) * strip_lanes + from_row * COLUMNS
                if strip + 1 == here:
                    after = (from_row + depth * t.pair // stored.pair) * COLUMNS
                ahead = packed[first_lane + after :]
                column = g * features + (first_strip + strip) * COLUMNS
                columns = k.min(COLUMNS, features - (first_strip + strip) * COLUMNS)
                row = k.i64(0)
                while row < count:
                    rest = count - row
                    wanted_height = choose_height(row, count, taller, t)
                    place = row + strip * block_rows if blocks > 1 else k.i64(0)
                    sums = c[place * COLUMNS :]
                    if block == blocks - 1:
                        prefetch_tile(results, first + row, column, t.height)
                    for height in k.unroll(heights):
                        if height == wanted_height:
                            for half in k.static_range(0, COLUMNS, 2 * t.width):
                                if half < columns:
                                    multiply_patches(
                                        sums[half:], copy[row * copy_step :] if copied else left,
                                        None if copied else starts[row:], copy_step,
                                        valid[row:] if bounded else None, zeros, offsets,
                                        right[half:], first_run, last_run, begin, length, block == 0,
                                        ahead if half == 0 else None, row // t.height * depth,
                                        height, t,
                                    )  # fmt: skip
                    done = k.min(rest, wanted_height)
                    if block == blocks - 1:
                        store_tile(results, sums, first + row, done, column)
                    row += done
            block += 1
            if copied:
                from_row = block * part // stored.pair
                length = k.ceildiv(k.min(part, size - block * part), t.pair)
            else:
                begin += part
                if begin >= run:
                    begin = k.i64(0)
                    first_run += at_once
                    last_run = k.min(first_run + at_once, runs)
                length = k.min(part, run - begin)
                from_row = (first_run * run + begin) * t.pair // stored.pair


@k.kernel
def conv(
    out: k.Output,
    x: k.Input,
    weight: k.Input,
    packed: k.InOut,
    padded: k.InOut,
    *extra: k.Input,
    ctx: k.Context,
    stride: Any,
    dilation: Any,
    padding: Any,
    groups: int,
    mode: str,
    epilogue: Any = identity,
) -> None:
    """`out` `[N, D, H, W, F]` from `x` `[N, D, H, W, C]` and `weight` `[Q, R, S, C / groups, F]`."""
    t = conv_tiling(ctx.target, x.dtype, weight.dtype)
    stored = filter_tiling(ctx.target, weight.dtype, t)
    strips = packed.view(stored.lane)
    how = mode_of(mode, x, t)
    pack_strips(strips, weight, groups, stored, ctx)
    if how != "in_place":
        pad(padded, x, padding, groups, t, ctx)
    ctx.barrier()
    taps = (weight.shape[0], weight.shape[1], weight.shape[2])
    convolve(
        out, x, padded_elements(padded, x, t), weight, strips, extra, taps, weight.shape[3], stride, dilation,
        padding, groups, how, stored, t, epilogue, ctx,
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
    mode: str,
    epilogue: Any = identity,
) -> None:
    """`conv` with a packed filter, `[groups * strips, elements]`, of `taps` `[Q, R, S]`."""
    t = conv_tiling(ctx.target, x.dtype, weight.dtype)
    stored = filter_tiling(ctx.target, weight.dtype, t)
    strips = weight.reshape(weight.size).view(stored.lane)
    how = mode_of(mode, x, t)
    if how != "in_place":
        pad(padded, x, padding, groups, t, ctx)
        ctx.barrier()
    convolve(
        out, x, padded_elements(padded, x, t), weight, strips, extra, taps, x.shape[4] // groups, stride,
        dilation, padding, groups, how, stored, t, epilogue, ctx,
    )  # fmt: skip


@k.inline
def mode_of(mode: str, x: Any, t: Tiling) -> str:
    """How patches are read: in place only where elements are multiplied as they are."""
    if mode == "in_place" and x.dtype != t.lane and t.pair == 1:
        return "padded"
    return mode


@k.inline
def padded_elements(padded: Any, x: Any, t: Tiling) -> Any:
    """The padded input: elements of pairs, or lanes."""
    return padded.view(x.dtype if t.pair == 2 else t.lane)


@k.inline
def pad(padded: Any, x: Any, padding: Any, groups: int, t: Tiling, ctx: Any) -> None:
    """Makes the padded input."""
    elements = padded_elements(padded, x, t)
    low = (padding[0], padding[2], padding[4])
    pad_input(elements, x, low, padded_sizes(x, padding), groups, ctx)


def filter_elements(taps: Sequence[int], channels: int, dtype: DType) -> int:
    """Elements of a strip of a packed filter.

    Args:
        taps: How many there are along each axis.
        channels: Channels of a group.
        dtype: Element type of the filter.
    """
    pair = 2 if dtype in (DType.bfloat16, DType.float16) else 1
    return -(-product(taps) * channels // pair) * pair * COLUMNS


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


def _mode(
    x: Operand,
    taps: Sequence[Any],
    channels: Any,
    kind: DType,
    window: Mapping[str, Any],
    groups: int,
) -> tuple[str, Workspace]:
    """How patches are read (see `MODES`), and memory for a padded input.

    Args:
        x: The input.
        taps: How many there are along the axes.
        channels: Channels of a group.
        kind: Element type of the filter.
        window: Stride, dilation and padding.
        groups: Into how many groups channels are split.
    """
    sums = sum_dtype(x.dtype, kind)
    pair = 2 if kind in (DType.bfloat16, DType.float16) else 1
    known = isinstance(channels, int) and all(isinstance(n, int) for n in taps)
    padding = window["padding"][10 - 2 * len(x.shape) :]
    sizes = [n + padding[2 * i] + padding[2 * i + 1] for i, n in enumerate(x.shape[1:-1])]
    # vectors that are copied may begin with the last element
    padded = Workspace(sums, (product((x.shape[0], *sizes, x.shape[-1])) + VECTOR,))
    if not known or product(taps) > MOST_RUNS or channels % pair:
        return "copied", padded
    plain = not any(padding)
    long = channels // pair >= LEAST_RUN and (plain or product(taps) <= MOST_TAPS)
    if long or (plain and groups == 1):
        # elements that are not multiplied as they are have to be converted first
        return "in_place", Workspace(sums, (1,)) if x.dtype == sums else padded
    return "padded", padded


def _lower_conv(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
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
    pairs = weight.dtype in (DType.bfloat16, DType.float16)
    depth = product(weight.shape[:-1])
    kind = weight.dtype if pairs else sum_dtype(x.dtype, weight.dtype)
    # a strip may have a column less than 32, and a row of padding
    strips = Workspace(kind, ((depth + pairs) * (weight.shape[-1] + groups * COLUMNS),))
    mode, padded = _mode(x, weight.shape[:-2], weight.shape[-2], weight.dtype, window, groups)
    args += [
        view("workspace", 0, strips, static=False),
        view("workspace", 1, padded, static=False),
    ]
    params = {**window, "groups": groups, "mode": mode}
    return KernelCall(conv, tuple(args), params, epilogue=True, workspaces=(strips, padded))


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
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
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
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    x, weight = operands
    rank, groups = len(x.shape), int(attributes["groups"])
    window = _window(attributes, rank)
    taps = tuple(int(n) for n in attributes["taps"])
    channels = x.shape[-1] // groups if isinstance(x.shape[-1], int) else None
    mode, padded = _mode(x, taps, channels, weight.dtype, window, groups)
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
        "mode": mode,
    }
    return KernelCall(conv_packed, args, params, epilogue=True, workspaces=(padded,))


LOWERINGS = {
    "mo.conv": _lower_conv,
    "mok.pack_filter": _lower_pack_filter,
    "mok.packed_conv": _lower_packed_conv,
}
