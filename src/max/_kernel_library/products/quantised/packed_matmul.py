"""Products with packed quantised weights, in integers: rows of x are rounded to 8 bits with a scale for each 32 neighbours.

One kernel, which branches on the number of rows at run time:

- few rows: packed lines are unpacked in registers and multiplied at once, at the speed at which they are read;
- more: strips of 32 columns are unpacked to bytes in scratch that stays in the L1 cache, which all rows of a block are multiplied by.

The sums of a block of 32 are exact integers; f32 adds up the blocks, in the order of k whatever the number of workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from max import kernel as k
from max._kernel_library.lowering import KernelCall, Limit, Operand, Workspace, product, view
from max._kernel_library.products.dense import panels
from max._kernel_library.products.int8 import int8_panels
from max._kernel_library.products.matmul import identity
from max._kernel_library.products.quantised import amx_packed
from max._kernel_library.products.quantised.packed import BLOCK, FORMATS, LINE, ROWS, PackedFormat
from max._kernel_library.products.row_norms import (
    ALONE,
    ALONE_WORKERS,
    Norm,
    is_alone,
    norm_arguments,
    normalise,
)
from max._kernel_library.tiles.register_tiles import FIRST_4, LAST_4
from max._kernel_library.tiles.strips import Parts, further_results, store_strip, unchanged
from max.dtype import DType
from max.kernel import Target

COLUMNS = ROWS
"""Columns of a strip: a group of rows of the weight."""
FEW_ROWS = 64
"""Up to so many rows of x, where nothing was measured, no weight is unpacked to memory."""
FEW_AT_ONCE = (4, 2, 1)
"""Rows of x that are multiplied at once then."""
BLOCK_ROWS = 240
"""Most rows of a block, a multiple of each tile height."""
MAX_TILE_ROWS = 6
"""What rows are filled up to at most."""
PANEL = 24
"""Blocks of k that are unpacked at once, whole units: with their scales they fit in the L1 cache."""
ROUNDED = 8
"""Blocks of a tile of x that a worker rounds at once."""
ALONE_WORDS = ALONE // BLOCK * 12
"""Words of the workspace that a worker has who rounds a small x for itself, in whole cache lines."""


AHEAD = 4096
"""Bytes that lines are asked for ahead of their use for few rows."""
STREAMED, KEPT = 0, 3
"""Localities of prefetches: of weights that no cache holds until the next step, which then do not displace others, and of others."""


@k.inline
def signed_bytes(target: Target, form: PackedFormat) -> bool:
    """Whether elements of 8 bits are multiplied as signed numbers: where the products of bytes are of numbers up to 128 only."""
    return form.bits == 8 and not target.dot_i8_lanes(target.width(k.f32))


@k.inline
def round_block(
    q: Any, scale: Any, zero_sums: Any, height: Any, x: Any, form: PackedFormat, zero: int
) -> None:
    """Rounds 32 elements of a row to 8 bits: ``x = scale q``.

    Args:
        q: Where the elements go, four in a word.
        scale: Where the scale goes.
        zero_sums: Where -zero times the sum of each part goes; with offsets the sum of what the elements stand for.
        height: From the sum of one part to that of the next.
        x: The elements.
        form: The weight's format.
        zero: What is subtracted from the weight's elements.
    """
    v = k.cast(x.load(0, width=BLOCK), k.f32)
    # magnitudes are in the order of their bits, and what is no number comes last
    top = k.reduce_max(k.bitcast(k.abs(v), k.u32))
    d = k.bitcast(top, k.f32) / 127.0
    inverse = k.f32(0) if d == 0.0 else 1.0 / d
    rounded = k.cast_unchecked(k.cast_unchecked(k.round(v * inverse), k.i32), k.i8)
    q.store(0, value=k.bitcast(rounded, k.i32))
    scale[0] = d
    sums = k.dot_i8(k.splat(k.i32(0), 8), k.splat(k.u8(1), BLOCK), rounded, narrow=True)
    if form.affine:
        zero_sums[0] = d * k.f32(k.reduce_add(sums))
    elif form.parts == 1:
        zero_sums.view(k.i32)[0] = k.reduce_add(sums) * -zero
    else:
        for part in k.static_range(2):
            half = k.shuffle(sums, None, LAST_4 if part else FIRST_4)
            zero_sums.view(k.i32)[part * height] = k.reduce_add(half) * -zero


@k.inline
def unpacked(lines: Any, at: Any, j: int, form: PackedFormat, width: int) -> Any:
    """Elements 4 j … 4 j + 3 of `width` rows of a block.

    Args:
        lines: The packed bytes.
        at: The first of the block's that these rows have.
        j: Which elements.
        form: Their format.
        width: How many rows.
    """
    if form.bits == 8:
        return lines.load(at + j * LINE, width=4 * width)
    low = lines.load(at + j % 4 * LINE, width=4 * width)
    low = low >> 4 if j >= 4 else low & 15
    if form.bits == 5:
        return low | (lines.load(at + 4 * LINE, width=4 * width) >> j & 1) << 4
    if form.bits == 6:
        return (
            low | (lines.load(at + (4 + j // 4) * LINE, width=4 * width) >> (2 * (j % 4)) & 3) << 4
        )
    return low


@k.inline
def add_products(acc: Any, elements: Any, word: Any, signed: bool, width: int) -> Any:
    """Adds the products of four neighbours in k of `width` rows of the weight with four of a row of x, which are one word."""
    x = k.bitcast(k.splat(word, width), k.i8)
    if signed:
        elements = k.bitcast(elements ^ 128, k.i8)
    elif k.target().signed_bytes:
        # less than 128: the same number with a sign
        elements = k.bitcast(elements, k.i8)
    return k.dot_i8(acc, elements, x, narrow=True)


@k.inline
def scale_of(scales: Any, at: Any, form: PackedFormat, part: Any, index: int, width: int) -> Any:
    """Scales (`index` 0) or offsets (1) of `width` rows.

    Args:
        scales: The scales of a unit.
        at: The first row.
        form: The format.
        part: Which part of the unit.
        index: Scales or offsets.
        width: How many rows.
    """
    d = k.cast(scales.view(k.f16).load(index * ROWS + at, width=width), k.f32)
    if not form.two_levels:
        return d
    parts = form.span * form.parts
    levels = scales[form.halves + index * parts * ROWS :]
    here = levels.load(part * ROWS + at, width=width)
    if form.encoding == "Q6_K":
        return d * k.cast(k.bitcast(here, k.i8), k.f32)
    return d * k.cast(here, k.f32)


@k.inline
def few_rows(
    c: Any,
    q: Any,
    scales: Any,
    zero_sums: Any,
    height: Any,
    groups: Any,
    locality: int,
    blocks: Any,
    first: int,
    rows: int,
    vectors: int,
    signed: bool,
    form: PackedFormat,
    width: int,
) -> None:
    """A few rows of x by some vectors of columns, straight from the packed lines.

    Args:
        c: Where the sums go, `COLUMNS` a row.
        q: Rounded elements of x in words `[blocks, height, 8]`, from the first row on.
        scales: Scales of x `[blocks, height]`.
        zero_sums: `[blocks, parts, height]`, see `round_block`.
        height: Rows of x.
        groups: The packed groups from this strip's on `[…, bytes]`.
        locality: Of prefetches.
        blocks: Blocks of 32 along k.
        first: The first column, within the strip.
        rows: Rows of x at once.
        vectors: Vectors of columns.
        signed: See `signed_bytes`.
        form: The weight's format.
        width: Lanes of a vector of sums.
    """
    sums = k.tile(k.f32, (rows, vectors), width=width, fill=0.0)
    steps = 8 // form.parts
    # what is unpacked is used twice: of many narrow vectors registers hold the lines of two
    together = min(vectors, 2) if width == 4 else vectors
    packed = groups[0]
    end = packed.shape[0]
    for unit in range(blocks // form.span):
        for inside in range(form.span):
            b = unit * form.span + inside
            lines = unit * form.unit_bytes + form.scale_bytes + inside * (form.lines * LINE)
            if first == 0 and form.bits < 8:
                # more is computed with a line than the hardware expects; 8 bits are read fastest without.
                # A unit's scales are spread over its blocks: many prefetches at once stand in each other's way
                share = form.unit_bytes // form.span
                ahead = unit * form.unit_bytes + inside * share + AHEAD
                later = ahead >= end
                ahead = ahead - end if later else ahead
                group = k.i64(1) if later else k.i64(0)
                for i in k.static_range(0, share, 64):
                    groups.prefetch(group, ahead + i, locality=locality)
            scales_here = packed[unit * form.unit_bytes :]
            for v in k.static_range(0, vectors, together):
                for p in k.static_range(form.parts):
                    acc = k.tile(k.i32, (rows, together), width=width, fill=0)
                    if not form.affine and not signed:
                        for r in k.static_range(rows):
                            one = zero_sums.view(k.i32)[(b * form.parts + p) * height + r]
                            for i in k.static_range(together):
                                acc[r, i] = k.splat(one, width)
                    for j in k.static_range(p * steps, (p + 1) * steps):
                        for i in k.static_range(together):
                            at = lines + 4 * (first + (v + i) * width)
                            elements = unpacked(packed, at, j, form, width)
                            for r in k.static_range(rows):
                                word = q[(b * height + r) * 8 + j]
                                acc[r, i] = add_products(acc[r, i], elements, word, signed, width)
                    for i in k.static_range(together):
                        at = first + (v + i) * width
                        scale = scale_of(scales_here, at, form, inside * form.parts + p, 0, width)
                        for r in k.static_range(rows):
                            scaled = scale * scales[b * height + r]
                            sums[r, v + i] = k.fma(k.cast(acc[r, i], k.f32), scaled, sums[r, v + i])
                if form.affine:
                    for i in k.static_range(together):
                        at = first + (v + i) * width
                        offset = scale_of(scales_here, at, form, inside, 1, width)
                        for r in k.static_range(rows):
                            taken = k.splat(-zero_sums[b * height + r], width)
                            sums[r, v + i] = k.fma(offset, taken, sums[r, v + i])
    for r in k.static_range(rows):
        for v in k.static_range(vectors):
            c.store(r * COLUMNS + first + v * width, value=sums[r, v])


@k.inline
def unpack_strip(
    panel: Any,
    factors: Any,
    offsets: Any,
    packed: Any,
    begin: Any,
    count: Any,
    form: PackedFormat,
    zero: int,
    width: int,
) -> None:
    """Unpacks blocks of a strip, `count` from `begin` on, less `zero`: bytes `[block][8][COLUMNS][4]`, scales `[block][parts][COLUMNS]`, offsets `[block][COLUMNS]`."""
    for n in range(count):
        b = begin + n
        scales = packed[b // form.span * form.unit_bytes :]
        lines = scales[form.scale_bytes + b % form.span * (form.lines * LINE) :]
        for column in k.static_range(0, COLUMNS, width):
            for j in k.static_range(8):
                elements = unpacked(lines, 4 * column, j, form, width)
                panel.store((n * 8 + j) * LINE + 4 * column, value=elements - zero)
            for p in k.static_range(form.parts):
                scale = scale_of(scales, column, form, b % form.span * form.parts + p, 0, width)
                factors.store((n * form.parts + p) * COLUMNS + column, value=scale)
            if form.affine:
                offset = scale_of(scales, column, form, b % form.span, 1, width)
                offsets.store(n * COLUMNS + column, value=offset)


@k.inline
def multiply_strip(
    c: Any,
    q: Any,
    scales: Any,
    zero_sums: Any,
    panel: Any,
    factors: Any,
    offsets: Any,
    count: Any,
    first: int,
    rows: int,
    signed: bool,
    form: PackedFormat,
    width: int,
) -> None:
    """Adds a tile of rows of x by two vectors of columns of an unpacked strip, over some blocks.

    Args:
        c: The sums, `COLUMNS` a row.
        q: Rounded elements of x in words `[blocks, rows, 8]`, from the first of the blocks on.
        scales: Scales of x `[blocks, rows]`.
        zero_sums: `[blocks, parts, rows]`, see `round_block`.
        panel: See `unpack_strip`.
        factors: See `unpack_strip`.
        offsets: See `unpack_strip`.
        count: How many blocks.
        first: The first column, within the strip.
        rows: The tile's height.
        signed: See `signed_bytes`.
        form: The weight's format.
        width: Lanes of a vector of sums.
    """
    steps = 8 // form.parts
    total = k.tile(k.f32, (rows, 2), width=width)
    for r in k.static_range(rows):
        for v in k.static_range(2):
            total[r, v] = c.load(r * COLUMNS + first + v * width, width=width)
    for n in range(count):
        for p in k.static_range(form.parts):
            acc = k.tile(k.i32, (rows, 2), width=width, fill=0)
            if not form.affine and not signed:
                for r in k.static_range(rows):
                    one = zero_sums.view(k.i32)[(n * form.parts + p) * rows + r]
                    for v in k.static_range(2):
                        acc[r, v] = k.splat(one, width)
            # no unrolled loop: it would need more registers than there are
            for j in range(p * steps, (p + 1) * steps):
                at = (n * 8 + j) * LINE + 4 * first
                low = panel.load(at, width=4 * width)
                high = panel.load(at + 4 * width, width=4 * width)
                for r in k.static_range(rows):
                    word = q[(n * rows + r) * 8 + j]
                    acc[r, 0] = add_products(acc[r, 0], low, word, signed, width)
                    acc[r, 1] = add_products(acc[r, 1], high, word, signed, width)
            for v in k.static_range(2):
                column = first + v * width
                factor = factors.load((n * form.parts + p) * COLUMNS + column, width=width)
                for r in k.static_range(rows):
                    scaled = factor * scales[n * rows + r]
                    total[r, v] = k.fma(k.cast(acc[r, v], k.f32), scaled, total[r, v])
                if form.affine and p == 0:
                    offset = offsets.load(n * COLUMNS + column, width=width)
                    for r in k.static_range(rows):
                        taken = k.splat(-zero_sums[n * rows + r], width)
                        total[r, v] = k.fma(offset, taken, total[r, v])
    for r in k.static_range(rows):
        for v in k.static_range(2):
            c.store(r * COLUMNS + first + v * width, value=total[r, v])


@k.inline
def multiply(
    out: Any, x: Any, w: Any, workspace: Any, few: Any, extra: Any, ctx: Any, encoding: str, locality: int,
    parts: Parts, epilogue: Any,
) -> None:  # fmt: skip
    """The products of a launch; see `qmatmul_packed`."""
    form = FORMATS[encoding]
    width = ctx.target.width(k.f32)
    by_tiles = ctx.target.tile_products
    tile = MAX_TILE_ROWS if ctx.target.registers >= 32 else 2
    tile = amx_packed.TILE_ROWS if by_tiles else tile
    signed = signed_bytes(ctx.target, form)
    zero = 0 if signed else form.zero
    rows, strips, inner = x.shape[0], w.shape[0], x.shape[1]
    blocks = inner // BLOCK
    many = rows > k.min(few, BLOCK_ROWS)
    # x is rounded into tiles of rows: blocks of 32 one after the other, in each 8 words a row
    height = k.i64(tile) if many else rows
    tiles = k.ceildiv(rows, k.max(height, 1))
    size = blocks * height
    alone = not many and is_alone(rows * inner, ctx)
    mine = workspace[(ctx.worker * ALONE_WORDS if alone else k.i64(0)) :]
    q = mine.view(k.i32)
    scales = mine[tiles * size * 8 :]
    zero_sums = mine[tiles * size * 9 :]
    if alone:
        for b in range(blocks):
            for r in range(rows):
                to = b * rows + r
                sums = zero_sums[b * rows * form.parts + r :]
                round_block(q[to * 8 :], scales[to:], sums, rows, x[r, b * BLOCK :], form, zero)
    else:
        # rows of a tile lie side by side: one worker rounds all of them
        for i, chunk in ctx.parallel((tiles, k.ceildiv(blocks, ROUNDED))):
            for b in range(chunk * ROUNDED, k.min((chunk + 1) * ROUNDED, blocks)):
                to = i * size + b * height
                for r in range(k.min(height, rows - i * height)):
                    words, sums = q[(to + r) * 8 :], zero_sums[to * form.parts + r :]
                    source = x[i * height + r, b * BLOCK :]
                    round_block(words, scales[to + r :], sums, height, source, form, zero)
        ctx.barrier()

    c = ctx.scratch(k.f32, (BLOCK_ROWS * COLUMNS,))
    panel = ctx.scratch(k.u8, (PANEL * BLOCK * COLUMNS,))
    factors = ctx.scratch(k.f32, (PANEL * form.parts * COLUMNS,))
    offsets = ctx.scratch(k.f32, (PANEL * COLUMNS if form.affine else 1,))
    exact = (amx_packed.GROUP * form.parts * tile, COLUMNS) if by_tiles else (1, 1)
    exact_sums = ctx.scratch(k.i32, exact)
    matrix_tiles = k.matrix_tiles(amx_packed.tile_shapes(form))
    row_blocks = k.i64(1)
    if many:
        if by_tiles:
            matrix_tiles.configure()
        # enough blocks for every worker, unless that makes them less than four tiles high
        wanted = k.ceildiv(4 * ctx.num_workers, k.max(strips, 1))
        row_blocks = k.max(k.ceildiv(rows, BLOCK_ROWS), k.min(wanted, k.ceildiv(tiles, 4)))
    tiles_a_block = k.ceildiv(tiles, row_blocks)
    run = k.i64(1) if many else k.i64(0)
    for row_block, strip in ctx.parallel((row_blocks, strips), grain=run):
        groups = w[strip:]
        row = k.i64(0)
        count = rows
        if many:
            first_tile = row_block * tiles_a_block
            last_tile = k.min(first_tile + tiles_a_block, tiles)
            row = first_tile * tile
            count = k.min(last_tile * tile, rows) - row
            for i in range(0, (last_tile - first_tile) * tile * COLUMNS, width):
                c.store(i, value=k.splat(k.f32(0), width))
            for begin in range(0, blocks, PANEL):
                length = k.min(PANEL, blocks - begin)
                taken = form.zero if by_tiles else 0
                unpack_strip(panel, factors, offsets, groups[0], begin, length, form, taken, width)
                for i in range(first_tile, last_tile):
                    to = i * size + begin * tile
                    if by_tiles:
                        amx_packed.multiply_strip(
                            matrix_tiles, c[(i - first_tile) * tile * COLUMNS :], exact_sums,
                            q[to * 8 :], scales[to:], zero_sums[to * form.parts :], panel, factors,
                            offsets, length, form, width,
                        )  # fmt: skip
                    for first in k.static_range(0, 0 if by_tiles else COLUMNS, 2 * width):
                        multiply_strip(
                            c[(i - first_tile) * tile * COLUMNS :],
                            q[to * 8 :],
                            scales[to:],
                            zero_sums[to * form.parts :],
                            panel,
                            factors,
                            offsets,
                            length,
                            first,
                            tile,
                            signed,
                            form,
                            width,
                        )
        else:
            i = k.i64(0)
            for at_once in k.unroll(FEW_AT_ONCE):
                # narrow vectors: a single row takes whole lines
                vectors = COLUMNS // width if at_once == 1 else 2
                while i + at_once <= rows:
                    for first in k.static_range(0, COLUMNS, vectors * width):
                        few_rows(
                            c[i * COLUMNS :],
                            q[8 * i :],
                            scales[i:],
                            zero_sums[i:],
                            rows,
                            groups,
                            locality,
                            blocks,
                            first,
                            at_once,
                            vectors,
                            signed,
                            form,
                            width,
                        )
                    i += at_once
        store_strip(out, c, row, count, strip, extra, epilogue, parts, width)
    if by_tiles:
        if many:
            matrix_tiles.release()


@k.kernel
def qmatmul_packed(
    out: k.Output,
    x: k.Input,
    w: k.Input,
    workspace: k.InOut,
    few: k.i64,  # pyright: ignore
    *extra: k.InOut,
    ctx: k.Context,
    encoding: str,
    locality: int = KEPT,
    parts: Parts = (),
    epilogue: Any = identity,
) -> None:
    """`out` `[M, N]` = `epilogue(x wᵀ)` from `x` `[M, K]` and packed groups `w` `[groups, bytes]`.

    Up to `few` rows are multiplied by what is unpacked in registers. With `parts` there are several products; see `max._kernel_library.tiles.strips`.
    """
    multiply(out, x, w, workspace, few, extra, ctx, encoding, locality, parts, epilogue)


@k.kernel
def qmatmul_normalised(
    out: k.Output,
    x: k.Input,
    w: k.Input,
    workspace: k.InOut,
    gamma: k.Input,
    memory: k.InOut,
    few: k.i64,  # pyright: ignore
    *extra: k.InOut,
    ctx: k.Context,
    encoding: str,
    norm: Norm,
    locality: int = KEPT,
    parts: Parts = (),
    epilogue: Any = identity,
) -> None:
    """`qmatmul_packed` of `x`, normalised; see `max._kernel_library.products.row_norms`."""
    rows = normalise(x, gamma, memory, norm, ctx)
    multiply(out, rows, w, workspace, few, extra, ctx, encoding, locality, parts, epilogue)


def _lower_packed_matmul(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    if attributes["encoding"] in int8_panels.ENCODINGS:
        return int8_panels.lower_matmul(operands, results)
    if attributes["encoding"] not in FORMATS:
        return panels.lower_matmul(operands, results, attributes, target)
    parts: Parts = attributes.get("parts", ())
    locality = STREAMED if attributes["streamed"] else KEPT
    form = FORMATS[attributes["encoding"]]
    x, out = operands[0], results[0]
    last = len(x.shape) - 1
    inner = x.shape[last]
    words = inner // BLOCK * (8 + 1 + form.parts)
    rows = product(x.shape[:last]) + amx_packed.TILE_ROWS
    workspace = Workspace(DType.float32, (rows * words + ALONE_WORKERS * ALONE_WORDS,))
    norm_args, norm_params, memory = norm_arguments(operands, attributes, 1)
    args = (
        view("result", 0, out, (range(last), (last,)), static=False),
        view("operand", 0, x, (range(last), (last,)), static=False),
        view("operand", 1, operands[1], static=False),
        view("workspace", 0, workspace, static=False),
        *norm_args,
        Limit(
            f"{attributes['encoding']}, k {inner}", FEW_ROWS, BLOCK_ROWS, product(x.shape[:last])
        ),
        *further_results(results),
    )
    params = {"encoding": attributes["encoding"], "locality": locality, **norm_params}
    if parts:
        params |= {"parts": parts, "epilogue": unchanged}
    kernel = qmatmul_normalised if memory else qmatmul_packed
    return KernelCall(kernel, args, params, epilogue=True, workspaces=(workspace, *memory))


LOWERINGS = {"mok.packed_matmul": _lower_packed_matmul, "mok.packed_products": _lower_packed_matmul}
