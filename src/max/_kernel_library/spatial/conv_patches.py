"""Patches of convolutions: where those of some positions lie in the input, how they are multiplied, how they are copied.

A patch is what a filter sees at a position of the result: `[taps…, C]`. Where its channels are long enough they are read where they are.
Taps that lie in the padding are read from zeros: each position has a bit for each tap that says whether it lies in the input. Others are
read from a copy of the input that has its padding around it; and where their elements do not make whole lanes, K blocks of patches are
copied from there to scratch.
"""

from __future__ import annotations

from typing import Any

from max import kernel as k
from max._kernel_library.spatial.conv_input import inside
from max._kernel_library.tiles.strips import COLUMNS
from max._kernel_library.tiles.tiling import Tiling, multiply_add

MAX_HEIGHT = 13
"""Most positions of a tile."""
MOST_TAPS = 62
"""So many taps have bits."""
LINE = 16
"""Lanes of 32 bits in a cache line."""


@k.inline
def line_bits(first: Any, step: int, taps: Any, size: Any, ones: Any, apart: Any) -> Any:
    """The bits of the taps of an axis that lie in the input, `apart` bits from each other.

    Args:
        first: Where the first tap lies.
        step: From tap to tap.
        taps: How many.
        size: Of the input along the axis.
        ones: A bit for each tap.
        apart: Bits from tap to tap.
    """
    begin, end = inside(first, step, taps, size)
    below = ones & ((k.i64(1) << (k.max(end, begin) * apart)) - 1)
    return below >> (begin * apart) << (begin * apart)


@k.inline
def repeated(count: Any, apart: Any) -> Any:
    """`count` bits, so far apart."""
    bits = k.i64(0)
    for i in range(count):
        bits = bits | (k.i64(1) << (i * apart))
    return bits


@k.inline
def find_patches(
    starts: Any, valid: Any, first: Any, count: Any, shape: Any, sizes: Any, window: Any,
    channels: Any, taps: Any,
) -> None:  # fmt: skip
    """Where the patches of some positions are; those up to the next whole tile equal the last.

    Args:
        starts: Elements of the input before each patch, with room for `MAX_HEIGHT` more.
        valid: The bits of the taps that lie in the input; None: they are not asked for.
        first: The first position.
        count: How many.
        shape: `[N, D, H, W]` of the result.
        sizes: How many volumes lie between images, and `[D, H, W]` of the input.
        window: Stride, dilation and padding before, along D, H and W.
        channels: Elements from column to column of the input.
        taps: `[Q, R, S]`.
    """
    stride, dilation, low = window
    w = first % shape[3]
    h = first // shape[3] % shape[2]
    d = first // (shape[3] * shape[2]) % shape[1]
    n = first // (shape[3] * shape[2] * shape[1])
    of_s, of_r, of_q = k.i64(0), k.i64(0), k.i64(0)
    if valid is not None:
        of_s = repeated(taps[2], 1)
        of_r = repeated(taps[1], taps[2])
        of_q = repeated(taps[0], taps[1] * taps[2])
    start, lines = k.i64(0), k.i64(0)
    for i in range(count):
        if i == 0 or w == 0:
            at_d = d * stride[0] - low[0]
            at_h = h * stride[1] - low[1]
            start = ((n * sizes[0] * sizes[1] + at_d) * sizes[2] + at_h) * sizes[3] * channels
            if valid is not None:
                lines = line_bits(at_h, dilation[1], taps[1], sizes[2], of_r, taps[2])
                # one bit a line by the bits of a line gives those of a plane
                lines *= line_bits(
                    at_d, dilation[0], taps[0], sizes[1], of_q, taps[1] * taps[2]
                )  # fmt: skip
        at_w = w * stride[2] - low[2]
        starts[i] = start + at_w * channels
        if valid is not None:
            valid[i] = lines * line_bits(at_w, dilation[2], taps[2], sizes[3], of_s, 1)
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
    copy: Any, x: Any, starts: Any, count: Any, begin: Any, end: Any, run: Any, offsets: Any,
    step: Any, pair: int,
) -> None:  # fmt: skip
    """Copies elements `[begin, end)` of some patches.

    Whole vectors are copied, and what they bring too much is overwritten by the next run or read by nobody.

    Args:
        copy: Flat lanes.
        x: The input, flat, with room for a vector behind it.
        starts: Where patches begin.
        count: How many.
        begin: The first element, a whole lane.
        end: After the last; a half lane is filled up with 0.
        run: Elements of a run of neighbours.
        offsets: Where runs begin in a patch: elements from a run to the next of its line, from line to line, from plane to plane, and
            how many runs a line and lines a plane have.
        step: Lanes of the copy from patch to patch.
        pair: Elements of a lane.
    """
    elements = copy.view(x.dtype) if pair == 2 else copy
    width = k.target().width(elements.dtype)
    for i in range(begin // k.max(run, 1), k.ceildiv(end, k.max(run, 1))):
        apart = i % offsets[3] * offsets[0] + i // offsets[3] % offsets[4] * offsets[1]
        apart += i // (offsets[3] * offsets[4]) * offsets[2]
        first = k.max(begin - i * run, 0)
        last = k.min(end - i * run, run)
        target = i * run + first - begin
        for n in range(count):
            source = starts[n] + apart + first
            for j in range(0, last - first, width):
                value = x.load(source + j, width=width)
                elements.store(n * step * pair + target + j, value=value)
    if pair == 2 and (end - begin) % 2 == 1:
        for n in range(count):
            elements[n * step * pair + end - begin] = k.cast(k.f32(0), elements.dtype)


@k.inline
def multiply_patches(
    c: Any, a: Any, starts: Any, step: Any, valid: Any, zeros: Any, offsets: Any, b: Any, first_run: Any,
    last_run: Any, begin: Any, length: Any, first: Any, ahead: Any, line: Any, height: int, t: Tiling,
) -> None:  # fmt: skip
    """Multiplies runs of `height` patches by rows of a strip: a register tile of sums.

    Args:
        c: The sums, `COLUMNS` a row; set where `first`, else added to.
        a: The input, flat lanes.
        starts: Lanes before each patch; None: they are `step` apart.
        step: Lanes from patch to patch.
        valid: The bits of the runs that are in the input; None: all are.
        zeros: What is read for others.
        offsets: Lanes from the beginning of a patch to each run.
        b: Rows of the strip, `COLUMNS` lanes each.
        first_run: The first run.
        last_run: After the last.
        begin: The first lane of each run.
        length: How many lanes of each run.
        first: Whether nothing was summed yet.
        ahead: Rows of a strip that come next, to be asked for meanwhile, a cache line a step; None: nothing.
        line: The first line of them.
        height: Positions.
        t: The tiling.
    """
    sums = k.tile(t.sums, (height, 2), width=t.width, fill=0)
    if not first:
        for i in k.static_range(height):
            for j in k.static_range(2):
                sums[i, j] = c.load(i * COLUMNS + j * t.width, width=t.width)
    for run in range(first_run, last_run):
        offset = offsets[run] + begin
        if starts is None:
            rows = [a[i * step + offset :] for i in k.static_range(height)]
        else:
            rows = [a[starts[i] + offset :] for i in k.static_range(height)]
        if valid is not None:
            rows = [
                k.select(valid[i] >> run & 1 == 1, rows[i], zeros) for i in k.static_range(height)
            ]
        done = (run - first_run) * length
        for n in range(length):
            low = b.load((done + n) * COLUMNS, width=t.width)
            high = b.load((done + n) * COLUMNS + t.width, width=t.width)
            if ahead is not None:
                ahead.prefetch((line + done + n) * LINE, locality=2)
            for i in k.static_range(height):
                left = k.splat(rows[i][n], t.width)
                sums[i, 0] = multiply_add(sums[i, 0], left, low)
                sums[i, 1] = multiply_add(sums[i, 1], left, high)
    for i in k.static_range(height):
        for j in k.static_range(2):
            c.store(i * COLUMNS + j * t.width, value=sums[i, j])
