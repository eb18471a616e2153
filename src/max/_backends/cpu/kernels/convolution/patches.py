"""Patches of convolutions: their places in the input, their products, their copies.

A patch is what a filter sees at a position of the result: `[taps…, C]`. Patches with enough channels are read in place.
Taps in the padding then read zeros: each position has a bit for each tap that says whether it lies in the input. Taps
that no position of a register tile has there are left out, of which wide dilations have many. Other patches are read
from a copy of the input with its padding around it; where their elements do not make whole lanes, K blocks of patches
are copied from there to scratch memory.

A patch is a sequence of runs, neighbors in memory: with dilation 1 the taps of a line make one run, else each tap
does::

    input line   …│pixel 4│pixel 5│pixel 6│…          runs of position 4, 3 × 3 taps, dilation 1
                   └───────── run ────────┘            offsets[i]: from the patch's first element to run i
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from max import kernel as k
from max._backends.cpu.kernels.convolution.inputs import inside
from max._backends.cpu.kernels.convolution.int8_filters import add_byte_products
from max._backends.cpu.kernels.tiles.micro_kernels import add_sums, load_sums, store_sums
from max._backends.cpu.kernels.tiles.strips import COLUMNS
from max._backends.cpu.kernels.tiles.tiling import Matrix, Tiling, multiply_add

if TYPE_CHECKING:
    Integer = k.Integer
else:
    Integer = k.i64

MAX_HEIGHT = 13
"""The maximum number of positions of a tile."""
MAX_TAPS = 62
"""The maximum number of taps that have bits."""
LINE = 16
"""Lanes of 32 bits in a cache line."""


class Layout(NamedTuple):
    """The places of patches in the input, in elements.

    Args:
        size: Elements of a patch.
        run: Elements of a run.
        runs: Runs of a patch.
        pieces: Runs of a line of taps.
        pixel: From column to column of the input.
        line: From line to line of taps.
        plane: From plane to plane of taps.
        sizes: Volumes between images, and `[D, H, W]` of the input.
        low: The padding before D, H and W that the input lacks.
    """

    size: Any
    run: Any
    runs: Any
    pieces: Any
    pixel: Any
    line: Any
    plane: Any
    sizes: Any
    low: Any


class Steps(NamedTuple):
    """The compile-time parameters of a window, by axis.

    Args:
        stride: From position to position.
        dilation: From tap to tap.
        padding: Before and after each axis.
    """

    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[int, ...]


class RunTimeSteps(NamedTuple):
    """What of a convolution its code takes at run time, so that one kernel serves several.

    Args:
        deep: The stride along D.
        down: The stride along H.
        along: The stride along W.
        folds: As of `Patches`.
    """

    deep: Integer
    down: Integer
    along: Integer
    folds: Integer


class Window(NamedTuple):
    """The window of a convolution.

    Args:
        taps: `[Q, R, S]`.
        stride: From position to position along the axes.
        dilation: From tap to tap along the axes.
        padding: Before and after each axis.
    """

    taps: Any
    stride: Any
    dilation: Any
    padding: Any


class Patches(NamedTuple):
    """The patches of a task.

    Args:
        lanes: The input or the copy of patches, flat lanes.
        starts: Lanes before each patch; None: they are `step` apart.
        step: Lanes from patch to patch of a copy.
        valid: The bits of the runs that lie in the input; None: all do.
        zeros: What the other runs read.
        offsets: Lanes from the beginning of a patch to each run.
        folds: 1 if each K block has accumulators of its own, which are then added to the sums, else 0; see
            `kernels.products.blocking.FOLDED_SIZE`.
        flips: Of bytes: the sign bits of a vector; see `int8_filters.add_byte_products`.
    """

    lanes: Any
    starts: Any
    step: Any
    valid: Any
    zeros: Any
    offsets: Any
    folds: Any = 0
    flips: Any = None


class Runs(NamedTuple):
    """The part of patches that a K block has.

    Args:
        first: The first run.
        last: The run after the last one.
        begin: The first lane of each run.
        length: Lanes of each run.
    """

    first: Any
    last: Any
    begin: Any
    length: Any


@k.inline
def line_bits(
    first: k.Value, step: int, taps: k.Value, size: k.Value, ones: k.Integer, apart: k.Value
) -> Any:
    """The bits of the taps of an axis that lie in the input, `apart` bits from each other.

    Args:
        first: The place of the first tap.
        step: From tap to tap.
        taps: The number of taps.
        size: The size of the input along the axis.
        ones: A bit for each tap.
        apart: Bits from tap to tap.
    """
    begin, end = inside(first, step, taps, size)
    # bits of the taps before `end`, without those before `begin`
    below = ones & ((k.i64(1) << (k.max(end, begin) * apart)) - 1)
    return below >> (begin * apart) << (begin * apart)


@k.inline
def repeated_bits(count: k.Integer, apart: k.Value) -> Any:
    """`count` bits, `apart` bits from each other."""
    bits = k.i64(0)
    for i in range(count):
        bits = bits | (k.i64(1) << (i * apart))
    return bits


@k.inline
def find_patches(
    starts: k.View, valid: k.View | None, first: k.Value, count: k.Integer, shape: Any, layout: Layout, window: Window,
    pixel: k.Value,
) -> None:  # fmt: skip
    """Writes the places of the patches of some positions; those up to the next whole tile equal the last.

    Args:
        starts: Elements of the input before each patch, with room for `MAX_HEIGHT` more.
        valid: The bits of the taps that lie in the input; None: not needed.
        first: The first position.
        count: The number of positions.
        shape: `[N, D, H, W]` of the result.
        layout: The layout of the input.
        window: The window.
        pixel: From column to column of the input, in the unit of `starts`.
    """
    sizes, low, taps = layout.sizes, layout.low, window.taps
    stride, dilation = window.stride, window.dilation
    w = first % shape[3]
    h = first // shape[3] % shape[2]
    d = first // (shape[3] * shape[2]) % shape[1]
    n = first // (shape[3] * shape[2] * shape[1])
    of_s, of_r, of_q = k.i64(0), k.i64(0), k.i64(0)
    if valid is not None:
        # a bit for each tap of an axis, as far apart as the taps of the inner axes need
        of_s = repeated_bits(taps[2], 1)
        of_r = repeated_bits(taps[1], taps[2])
        of_q = repeated_bits(taps[0], taps[1] * taps[2])
    start, lines = k.i64(0), k.i64(0)
    for i in range(count):
        if i == 0 or w == 0:
            at_d = d * stride[0] - low[0]
            at_h = h * stride[1] - low[1]
            # negative where the first taps lie in the padding: they have no bit, and are not read
            start = ((n * sizes[0] * sizes[1] + at_d) * sizes[2] + at_h) * sizes[3] * pixel
            if valid is not None:
                lines = line_bits(at_h, dilation[1], taps[1], sizes[2], of_r, taps[2])
                # one bit per line, times the bits of a line, gives those of a plane
                lines *= line_bits(
                    at_d, dilation[0], taps[0], sizes[1], of_q, taps[1] * taps[2]
                )  # fmt: skip
        at_w = w * stride[2] - low[2]
        starts[i] = start + at_w * pixel
        if valid is not None:
            valid[i] = lines * line_bits(at_w, dilation[2], taps[2], sizes[3], of_s, 1)
        # the next position, over the ends of lines, planes and images
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
    for i in range(count, count + MAX_HEIGHT):
        starts[i] = starts[count - 1]
        if valid is not None:
            valid[i] = valid[count - 1]


@k.inline
def copy_patches(
    copy: k.View, x: k.View, starts: Any, count: k.Integer, begin: k.Value, end: k.Value, layout: Layout,
    window: Window, step: k.Value, pair: int,
) -> None:  # fmt: skip
    """Copies elements `[begin, end)` of some patches.

    Whole vectors are copied; what they write past a run is overwritten by the next run or never read.

    Args:
        copy: Flat lanes.
        x: The input, flat, with room for a vector behind it.
        starts: Elements of the input before each patch.
        count: The number of patches.
        begin: The first element, a whole lane.
        end: After the last; the second half of a last half lane is 0.
        layout: The layout of the input.
        window: The window.
        step: Lanes of the copy from patch to patch.
        pair: Elements of a lane.
    """
    elements = copy.view(x.dtype) if pair == 2 else copy
    width = k.target().width(elements.dtype)
    run, column = layout.run, layout.pixel * window.dilation[2]
    pieces, lines = k.max(layout.pieces, 1), k.max(window.taps[1], 1)
    # the runs that overlap [begin, end)
    for i in range(begin // k.max(run, 1), k.ceildiv(end, k.max(run, 1))):
        offset = i % pieces * column + i // pieces % lines * layout.line
        offset += i // (pieces * lines) * layout.plane
        # the part of the run that lies in [begin, end)
        first = k.max(begin - i * run, 0)
        last = k.min(end - i * run, run)
        target = i * run + first - begin
        for n in range(count):
            source = starts[n] + offset + first
            for j in range(0, last - first, width):
                value = x.load(source + j, width=width)
                elements.store(n * step * pair + target + j, value=value)
    # the other half of the last lane is multiplied too: stale memory could hold NaN
    if pair == 2 and (end - begin) % 2 == 1:
        for n in range(count):
            elements[n * step * pair + end - begin] = k.cast(k.f32(0), elements.dtype)


@k.inline
def rows_of_run(patches: Patches, run: k.Integer, begin: k.Value, height: int) -> Any:
    """Views of a run of `height` patches: in the input, in the copy, or zeros."""
    offset = patches.offsets[run] + begin
    if patches.starts is None:
        rows = [patches.lanes[i * patches.step + offset :] for i in k.static_range(height)]
    else:
        rows = [patches.lanes[patches.starts[i] + offset :] for i in k.static_range(height)]
    if patches.valid is not None:
        rows = [
            # selects a view, not values: the loop over k has no test
            k.select(patches.valid[i] >> run & 1 == 1, rows[i], patches.zeros)
            for i in k.static_range(height)
        ]
    return rows


@k.inline
def used_runs(patches: Patches, height: int) -> Any:
    """The bits of the runs that some of `height` patches have in the input; None: all are multiplied."""
    # bytes of the padding are codes, whose products count
    if patches.valid is None or patches.flips is not None:
        return None
    used = patches.valid[0]
    for i in k.static_range(1, height):
        used = used | patches.valid[i]
    return used


@k.inline
def add_lane_products(acc: k.SIMD, left: k.SIMD, right: k.SIMD, flips: Any) -> Any:
    """Adds the products of lanes of patches and of a strip; with flips they are lanes of four bytes."""
    if flips is not None:
        return add_byte_products(acc, left, right, flips)
    return multiply_add(acc, left, right)


@k.inline
def multiply_patches(
    c: Any, patches: Patches, runs: Runs, b: k.View, first: Any, initial: k.View | None, ahead: k.View | None,
    step: k.Value, height: int, t: Tiling,
) -> None:  # fmt: skip
    """Multiplies runs of `height` patches by rows of a strip: one register tile.

    Args:
        c: The sums, `COLUMNS` a row; set where `first`, else added to.
        patches: The patches, from the tile's first on.
        runs: The runs of the K block.
        b: Rows of the strip, `COLUMNS` lanes each.
        first: Whether this is the first K block.
        initial: What the sums of each column begin with; None: with 0.
        ahead: The part of the strip that is multiplied next which this tile prefetches, lanes; None: nothing.
        step: Lanes of it per step.
        height: Positions.
        t: The tiling.
    """
    sums = k.tile(t.sums, (height, 2), width=t.width, fill=0)
    if patches.folds == 0:
        if not first:
            load_sums(sums, Matrix(c, COLUMNS), height, 2, t.width)
        elif initial is not None:
            # all rows begin with the same
            load_sums(sums, Matrix(initial, 0), height, 2, t.width)
    flips = patches.flips.load(0, width=t.width) if patches.flips is not None else None
    used = used_runs(patches, height)
    for run in range(runs.first, runs.last):
        rows = rows_of_run(patches, run, runs.begin, height)
        # rows of the strip are those of the K block's runs, one after the other
        done = (run - runs.first) * runs.length
        length = runs.length if used is None else k.select(used >> run & 1 == 1, runs.length, 0)
        for n in range(length):
            low = b.load((done + n) * COLUMNS, width=t.width)
            high = b.load((done + n) * COLUMNS + t.width, width=t.width)
            if ahead is not None:
                # into the L2 cache, as the L1 cache holds the current K block
                ahead.prefetch((done + n) * step, locality=2)
            for i in k.static_range(height):
                left = k.splat(rows[i][n], t.width)
                sums[i, 0] = add_lane_products(sums[i, 0], left, low, flips)
                sums[i, 1] = add_lane_products(sums[i, 1], left, high, flips)
    if patches.folds == 1:
        if not first:
            add_sums(sums, Matrix(c, COLUMNS), height, 2, t.width)
    store_sums(Matrix(c, COLUMNS), sums, height, 2, t.width)
