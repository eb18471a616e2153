"""Convolutions of images with 3 × 3 taps by Winograd's F(4 × 4, 3 × 3): 36 products for 4 × 4 positions instead of 144.

A tile of 6 × 6 pixels gives 4 × 4 positions. Each channel of a tile, and each channel and column of the filter, is
transformed to 36 numbers; products of equal numbers are added up over the channels, as 36 matrix products; the sums are
transformed to positions::

    tiles × channels ── input ──> 36 × [tiles, channels] ┐
                                                         ├─ products ─> 36 × [tiles, 32] ── output ──> positions × 32
    filter ──────────── at load ─> 36 × [channels, 32]   ┘

The transforms are evaluations of polynomials and the interpolation of their product (Lavin and Gray, "Fast Algorithms
for Convolutional Neural Networks", 2016; Toom and Cook's algorithm) at 0, ±√½, ±√2 and ∞. With these points the error
is about twice that of a sum of products: at 0, ±1, ±2 and ∞ it would be ten times larger.

With a dilation of `d`, the positions whose numbers have the same remainder by `d` are an image of their own, of every
`d`-th pixel: a tile's lines and columns are then `d` apart. The first of these images may be a line longer than the
last, so each has as many tiles as it needs.

Cache budget: the transformed input of a task takes at most `INPUT_BYTES`, more than many L2 caches hold with 256
channels and more: it is read from the L3 cache once for a strip, as the filter is, which is larger than the input of 32
tiles. Larger tasks read the filter less often. Its sums take 36 × 48 × 128 bytes (216 KB) of the L2 cache. One of the
36 matrices of the input is `[tiles, channels]`, one of the filter `[channels, 32]`: 64 KB each with 512 channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from max import kernel as k
from max._backends.cpu.kernels.convolution.inputs import image_axes
from max._backends.cpu.kernels.products.blocking import choose_height, taller_from, tile_heights
from max._backends.cpu.kernels.tiles.micro_kernels import multiply_tile
from max._backends.cpu.kernels.tiles.strips import COLUMNS, Results, identity, store_tile
from max._backends.cpu.kernels.tiles.tiling import Matrix, Tiling, round_up, tiling
from max._backends.kernel_call import KernelCall, Operand, view

POINTS = 6
"""Points of evaluation along each axis."""
PRODUCTS = POINTS * POINTS
"""The number of products of a tile."""
STEP = 4
"""Positions of a tile along each axis."""
MAX_CHANNELS = 1024
"""The maximum number of channels: of more, `INPUT_BYTES` hold so few tiles that each of them waits for the filter."""
MAX_TILES = 48
"""The maximum number of tiles of a task."""
INPUT_BYTES = 5 << 19
"""The maximum number of bytes of a task's transformed input."""
GAP = 16
"""Elements between two tiles' channels, so that tiles use different sets of the L1 cache."""
FEW_TASKS = 4
"""Blocks of tiles per worker from which on tasks need not be as many for each worker."""
ROOT_HALF, ROOT_TWO = 0.5**0.5, 2.0**0.5
ROOM = 16
"""Rows that a register tile may have behind the last one."""
_ROWS = MAX_TILES + ROOM


class Axis(NamedTuple):
    """Where tiles lie along an axis of the result, as images of every `dilation`-th position.

    Args:
        size: Positions.
        dilation: From a position of a tile to the next.
        longer: The number of images that have a position more than the others.
        long: Tiles of such an image.
        short: Tiles of one of the others.
        padding: Before the axis of the input.
    """

    size: Any
    dilation: int
    longer: Any
    long: Any
    short: Any
    padding: int


@k.inline
def axis_of(size: k.Value, dilation: int, padding: int) -> Axis:
    """The tiles of an axis."""
    # the first `size % dilation` images have one position more than the others
    least = size // dilation
    long, short = k.ceildiv(least + 1, STEP), k.ceildiv(least, STEP)
    return Axis(size, dilation, size % dilation, long, short, padding)


@k.inline
def axis_tiles(axis: Axis) -> Any:
    """The number of tiles along an axis."""
    return axis.longer * axis.long + (axis.dilation - axis.longer) * axis.short


@k.inline
def axis_place(tile: k.Value, axis: Axis) -> Any:
    """The first position of a tile."""
    if axis.dilation == 1:
        return tile * STEP
    behind = tile - axis.longer * axis.long
    # not 0: the divisions below run for tiles of long images too
    short = k.max(axis.short, 1)
    # the tiles of the longer images come first
    image = k.select(behind < 0, tile // axis.long, axis.longer + behind // short)
    number = k.select(behind < 0, tile % axis.long, behind % short)
    return image + number * (STEP * axis.dilation)


class Image(NamedTuple):
    """Where the tiles of a convolution lie.

    Args:
        x: The input `[N, 1, H, W, C]`.
        lines: The tiles of a column.
        columns: The tiles of a line.
    """

    x: Any
    lines: Axis
    columns: Axis


class Place(NamedTuple):
    """The image of a tile, and the line and column of its first position."""

    image: Any
    line: Any
    column: Any


@k.inline
def tile_place(tile: k.Value, im: Image) -> Place:
    """The place of a tile."""
    down, along = axis_tiles(im.lines), axis_tiles(im.columns)
    line = axis_place(tile // along % down, im.lines)
    return Place(tile // (along * down), line, axis_place(tile % along, im.columns))


@k.inline
def interpolate_tile(d: Any) -> Any:
    """Six neighbors in the basis of the points: the transposed interpolation of a product of polynomials."""
    # at ± a point the even and the odd part are equal but for a sign: both points share them
    outer, inner = d[4] - 2.0 * d[2], ROOT_HALF * (d[3] - 2.0 * d[1])
    low, high = d[4] - 0.5 * d[2], ROOT_TWO * (d[3] - 0.5 * d[1])
    first = d[4] + (d[0] - 2.5 * d[2])
    last = d[5] + (d[1] - 2.5 * d[3])
    return [first, outer + inner, outer - inner, low + high, low - high, last]


@k.inline
def evaluated_filter(g: Any) -> Any:
    """Three taps at the points, over the products of the points' distances."""
    # the parts at ±√½, then those at ±√2
    even, odd = -2.0 / 3.0 * (g[0] + 0.5 * g[2]), -2.0 / 3.0 * ROOT_HALF * g[1]
    high, rest = (g[0] + 2.0 * g[2]) * (1.0 / 6.0), ROOT_TWO / 6.0 * g[1]
    return [g[0], even + odd, even - odd, high + rest, high - rest, g[2]]  # 0, ±√½, ±√2, ∞


@k.inline
def positions_of(m: Any) -> Any:
    """Four positions from the sums at the six points."""
    even, odd = m[1] + m[2], ROOT_HALF * (m[1] - m[2])
    high, rest = m[3] + m[4], ROOT_TWO * (m[3] - m[4])
    return [
        m[0] + (even + high),
        odd + rest,
        0.5 * even + 2.0 * high,
        m[5] + (0.5 * odd + 2.0 * rest),
    ]


class Square(NamedTuple):
    """A square of vectors in memory.

    Args:
        values: The elements, from those of the first vector on.
        size: Lines and columns.
        line: Elements from line to line.
        column: Elements from column to column.
    """

    values: Any
    size: int
    line: Any
    column: Any


@k.inline
def transform_square(
    transform: Any, source: Square, target: Square, width: int, mask: Any = None
) -> None:
    """Transforms the columns of a square, and then the lines of what they give.

    Args:
        transform: Computes the vectors of a line or column of the target from those of the source.
        source: The square.
        target: Where the results go.
        width: Lanes of a vector.
        mask: The lanes to load; those left out are 0.
    """
    half = k.tile(k.f32, (target.size, source.size), width=width)
    for j in k.static_range(source.size):
        given = [
            source.values.load(i * source.line + j * source.column, width=width, mask=mask)
            for i in k.static_range(source.size)
        ]
        column = transform(given)
        for i in k.static_range(target.size):
            half[i, j] = column[i]
    for i in k.static_range(target.size):
        line = transform([half[i, j] for j in k.static_range(source.size)])
        for j in k.static_range(target.size):
            target.values.store(i * target.line + j * target.column, value=line[j])


@k.inline
def transform_tile(
    v: k.View,
    source: k.View,
    line: k.Value,
    pixel: k.Value,
    channels: k.Integer,
    step: k.Value,
    width: int,
) -> None:
    """Transforms the channels of a tile.

    Args:
        v: The results, flat: number `p` of channel `c` is `v[p * step + c]`.
        source: The tile's pixels, flat, from the first one on.
        line: Elements from line to line.
        pixel: Elements from pixel to pixel.
        channels: The channels.
        step: Elements from number to number.
        width: Lanes of a vector.
    """
    for c, mask in k.vectors(channels, width):
        pixels = Square(source[c:], POINTS, line, pixel)
        # a vector past the last channel ends in the gap
        numbers = Square(v[c:], POINTS, POINTS * step, step)
        transform_square(interpolate_tile, pixels, numbers, width, mask)


@k.inline
def copy_tile(
    patch: k.View, im: Image, top: k.Value, left: k.Value, image: k.Integer, width: int
) -> None:
    """Copies the pixels of a tile; those outside of the image are 0."""
    x = im.x
    zero = k.splat(k.f32(0), width)
    for r in range(POINTS):
        for s in range(POINTS):
            h, w = top + r * im.lines.dilation, left + s * im.columns.dilation
            pixel = patch[(r * POINTS + s) * x.shape[4] :]
            if h >= 0 and h < x.shape[2] and w >= 0 and w < x.shape[3]:
                for c, mask in k.vectors(x.shape[4], width):
                    value = x.load(image, 0, h, w, c, width=width, mask=mask)
                    pixel.store(c, value=value, mask=mask)
            else:
                for c, mask in k.vectors(x.shape[4], width):
                    pixel.store(c, value=zero, mask=mask)


@k.inline
def transform_input(
    v: k.View,
    patch: k.View,
    im: Image,
    first: k.Value,
    count: k.Integer,
    stride: k.Value,
    width: int,
) -> None:
    """Transforms the tiles of a task to `v`, `[PRODUCTS, count, stride]`.

    Args:
        v: The transformed tiles, flat.
        patch: Memory for the pixels of a tile at the edge of an image.
        im: The image.
        first: The first tile.
        count: The number of tiles.
        stride: Elements from tile to tile.
        width: Lanes of a vector.
    """
    x = im.x
    channels, high, wide = x.shape[4], x.shape[2], x.shape[3]
    down, along = im.lines.dilation, im.columns.dilation
    flat = x.reshape(x.size)
    for i in range(count):
        at = tile_place(first + i, im)
        top, left = at.line - im.lines.padding, at.column - im.columns.padding
        last_line, last_column = top + (POINTS - 1) * down, left + (POINTS - 1) * along
        inside = (top >= 0) & (left >= 0) & (last_line < high) & (last_column < wide)
        target = v[i * stride :]
        # a tile inside the image is read in place, one at the edge from a copy with zeros
        if inside:
            source = flat[((at.image * high + top) * wide + left) * channels :]
            line, pixel = down * wide * channels, along * channels
            transform_tile(target, source, line, pixel, channels, count * stride, width)
        else:
            copy_tile(patch, im, top, left, at.image, width)
            line = POINTS * channels
            transform_tile(target, patch, line, channels, channels, count * stride, width)


@k.inline
def multiply_matrix(
    m: k.View, v: k.View, b: k.View, count: k.Value, stride: k.Value, size: k.Integer, t: Tiling
) -> None:
    """One of the matrix products: `m` `[count, COLUMNS]` from `v` `[count, stride]` and `b` `[size, COLUMNS]`, flat."""
    taller = taller_from(count, t)
    row = k.i64(0)
    while row < count:
        tile_height = choose_height(row, count, taller, t)
        for height in k.unroll(tile_heights(t)):
            if height == tile_height:
                tile = replace(t, height=height)
                # a register tile is two vectors wide
                for half in k.static_range(0, COLUMNS, 2 * t.width):
                    multiply_tile(
                        Matrix(m[row * COLUMNS + half :], COLUMNS), Matrix(v[row * stride :], stride),
                        Matrix(b[half:], COLUMNS), size, True, tile,
                    )  # fmt: skip
        row += tile_height


@k.inline
def store_tiles(
    results: Results,
    m: k.View,
    y: k.View,
    im: Image,
    first: k.Value,
    count: k.Integer,
    column: k.Value,
    width: int,
) -> None:
    """Transforms the sums of tiles `m` `[PRODUCTS, _ROWS, COLUMNS]` to positions, and stores their results."""
    high, wide = im.lines.size, im.columns.size
    down, along = im.lines.dilation, im.columns.dilation
    step = _ROWS * COLUMNS
    for tile in range(count):
        for col in range(0, COLUMNS, width):
            sums = Square(m[tile * COLUMNS + col :], POINTS, POINTS * step, step)
            positions = Square(y[col:], STEP, STEP * COLUMNS, COLUMNS)
            transform_square(positions_of, sums, positions, width)
        at = tile_place(first + tile, im)
        # positions past the edge of the image are not stored
        for i in range(k.min(STEP, k.ceildiv(high - at.line, down))):
            row = (at.image * high + at.line + i * down) * wide + at.column
            positions = y[i * STEP * COLUMNS :]
            count_along = k.min(STEP, k.ceildiv(wide - at.column, along))
            # without dilation the positions of a line are neighbors in memory
            if along == 1:
                store_tile(results, positions, row, count_along, column)
            else:
                for j in range(count_along):
                    store_tile(results, positions[j * COLUMNS :], row + j * along, k.i64(1), column)


@k.kernel
def conv_winograd(
    out: k.Output,
    x: k.Input,
    weight: k.Input,
    *extra: k.Input,
    ctx: k.Context,
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    epilogue: Any = identity,
) -> None:
    """`out` `[N, 1, H, W, F]` from `x` `[N, 1, H, W, C]` and a transformed filter `[strips, PRODUCTS * C * COLUMNS]`.

    `padding` is that before H, after H, before W and after W, `dilation` that along H and W.
    """
    t = tiling(ctx.target, k.f32, k.f32)
    width, channels = t.width, x.shape[4]
    high, wide = out.shape[2], out.shape[3]
    rows = out.reshape(out.shape[0] * high * wide, out.shape[4])
    results = Results(rows, extra, epilogue, width)
    lines = axis_of(high, dilation[0], padding[0])
    columns = axis_of(wide, dilation[1], padding[2])
    im = Image(x, lines, columns)
    tiles = out.shape[0] * axis_tiles(lines) * axis_tiles(columns)
    strips = k.ceildiv(out.shape[4], COLUMNS)
    stride = round_up(channels, 16) + GAP
    if channels > MAX_CHANNELS:
        raise ValueError("conv: {} channels, at most {}", channels, MAX_CHANNELS)
    # tasks of equal numbers of tiles
    most = k.min(INPUT_BYTES // (4 * PRODUCTS * stride), MAX_TILES)
    blocks = k.ceildiv(tiles, most)
    size = k.ceildiv(tiles, k.max(blocks, 1))
    # each task transforms its tiles: the fewest groups of strips with which workers have equal numbers of tasks
    groups = k.i64(1)
    if blocks < FEW_TASKS * ctx.num_workers:
        while blocks * groups % ctx.num_workers != 0:
            groups += 1
    task_strips = k.ceildiv(strips, k.max(k.min(groups, strips), 1))
    # rows past the last tile are multiplied too
    v = ctx.scratch(k.f32, (INPUT_BYTES // 4 + ROOM * (MAX_CHANNELS + GAP),))
    m = ctx.scratch(k.f32, (PRODUCTS * _ROWS * COLUMNS,))
    patch = ctx.scratch(k.f32, (PRODUCTS * MAX_CHANNELS,))
    y = ctx.scratch(k.f32, (STEP * STEP * COLUMNS,))
    for block, group in ctx.parallel((blocks, k.ceildiv(strips, task_strips)), grain=1):
        first = block * size
        count = k.min(size, tiles - first)
        transform_input(v, patch, im, first, count, stride, width)
        for strip in range(group * task_strips, k.min((group + 1) * task_strips, strips)):
            for p in range(PRODUCTS):
                b = weight[strip, p * channels * COLUMNS :]
                sums = m[p * _ROWS * COLUMNS :]
                multiply_matrix(sums, v[p * count * stride :], b, count, stride, channels, t)
            store_tiles(results, m, y, im, first, count, strip * COLUMNS, width)


@k.kernel
def winograd_filter(out: k.Output, weight: k.Input, ctx: k.Context) -> None:
    """`out` `[strips, PRODUCTS * C * COLUMNS]` from `weight` `[1, 3, 3, C, F]`; columns past the last one are 0."""
    width = ctx.target.width(k.f32)
    channels, columns = weight.shape[3], weight.shape[4]
    flat, step = weight.reshape(weight.size), channels * columns
    for strip, c in ctx.parallel((out.shape[0], channels)):
        # [strip][product][channel][column]
        target = out[strip, c * COLUMNS :]
        for col in range(0, COLUMNS, width):
            column = strip * COLUMNS + col
            mask = k.iota(k.i64, width) + column < columns
            taps = Square(flat[c * columns + column :], 3, 3 * step, step)
            numbers = Square(target[col:], POINTS, POINTS * channels * COLUMNS, channels * COLUMNS)
            transform_square(evaluated_filter, taps, numbers, width, mask)


def _lower_filter(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    """The call for `mok.winograd_filter`."""
    args = (
        view("result", 0, results[0], static=False),
        view("operand", 0, operands[0], [(), (0,), (1,), (2,), (3,)], static=False),
    )
    return KernelCall(winograd_filter, args)


def _lower_conv(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    """The call for `mok.winograd_conv`."""
    args = (
        view("result", 0, results[0], image_axes(4), static=False),
        view("operand", 0, operands[0], image_axes(4), static=False),
        view("operand", 1, operands[1], static=False),
    )
    params = {name: tuple(int(n) for n in attributes[name]) for name in ("padding", "dilation")}
    return KernelCall(conv_winograd, args, params, epilogue=True)


LOWERINGS = {"mok.winograd_filter": _lower_filter, "mok.winograd_conv": _lower_conv}
