"""Weights of 8-bit integers in panels, and exact products with them in 32 bits.

A panel has 32 columns of the right operand B `[K, N]`, four neighbours in k of each side by side, ``[K / 4][32][4]``, as an instruction for
products of bytes takes them. Elements are unsigned: 128 is added to each, and 128 times the sum of a row of A is taken from the row's sums.
Where there are instructions for signed bytes only, 128 is taken off again before. Where there are only the instructions of AVX2, whose sums of two products must fit in 16 bits, magnitudes are multiplied, with the signs moved to A.

One kernel, which branches on the number of rows at run time, as `max._kernel_library.products.dense.panels` does. Sums wrap, as all integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from max import kernel as k
from max._kernel_library.lowering import KernelCall, Operand, Workspace, product, view
from max._kernel_library.products.int8 import amx_int8
from max._kernel_library.products.matmul import LANES_K, identity, round_up
from max._kernel_library.products.panel_blocks import BLOCK_SUMS, plan, tile_heights
from max._kernel_library.tiles.register_tiles import Tiling
from max._kernel_library.tiles.strips import COLUMNS, ask_for_strip, store_strip
from max.dtype import DType
from max.kernel import Target

ENCODINGS = {"int8 rows": True, "int8 columns": False}
"""How a weight is packed, and whether it is `[N, K]`."""
FOUR = 4
"""Neighbours in k that share a lane."""
CHUNK = 512
"""Elements along k of a panel that a worker packs at once."""
FEW_ROWS = 8
"""Up to so many rows all of them are multiplied by a panel at once."""
FEW_AT_ONCE = (8, 4, 2, 1)
"""Rows that are multiplied at once then, at most the half of them where there are few registers."""
LANES_AT_ONCE = 16
"""Bytes of a row that are packed at once."""


def int8_tiling(target: Target) -> Tiling:
    """How products are made on a machine.

    Args:
        target: The machine.
    """
    height = 12 if target.registers >= 32 else 6
    return Tiling(k.i32, k.i32, FOUR, target.width(k.i32), height, 0)


def by_magnitude(target: Target) -> bool:
    """Whether magnitudes are multiplied.

    Args:
        target: The machine.
    """
    width = target.width(k.i32)
    return not target.dot_i8_lanes(width) and bool(target.narrow_dot_i8_lanes(width))


@k.kernel
def pack_int8(out: k.Output, w: k.Input, ctx: k.Context, *, by_rows: bool) -> None:
    """`out` `[panels, bytes]` from `w` `[N, K]` where `by_rows`, else `[K, N]`."""
    inner = w.shape[1] if by_rows else w.shape[0]
    columns = w.shape[0] if by_rows else w.shape[1]
    for panel, chunk in ctx.parallel((out.shape[0], k.ceildiv(inner, CHUNK))):
        begin = chunk * CHUNK
        length = k.min(CHUNK, inner - begin)
        target = out[panel, begin * COLUMNS :]
        if by_rows:
            words = target.view(k.i32)
            for column in range(COLUMNS):
                # the last column stands in for those that are not there
                row = w[k.min(panel * COLUMNS + column, columns - 1), begin : begin + length]
                for i, mask in k.vectors(length, LANES_AT_ONCE):
                    elements = k.bitcast(row.load(i, width=LANES_AT_ONCE, mask=mask), k.u8) ^ 128
                    four = k.bitcast(elements, k.i32)
                    for j in k.static_range(LANES_AT_ONCE // FOUR):
                        words[(i // FOUR + j) * COLUMNS + column] = four[j]
        else:
            first = panel * COLUMNS
            mask = k.iota(k.i64, COLUMNS) + first < columns
            for i in range(0, length, FOUR):
                # rows of A are filled up with 0: what is multiplied by it does not matter
                rows = [
                    w.load(k.min(begin + i + j, inner - 1), first, width=COLUMNS, mask=mask)
                    for j in k.static_range(FOUR)
                ]
                even, odd = k.interleave(rows[0], rows[2]), k.interleave(rows[1], rows[3])
                elements = k.bitcast(k.interleave(even, odd), k.u8) ^ 128
                target.store(i * COLUMNS, value=elements)


@k.inline
def multiply_add(acc: Any, elements: Any, word: Any, rest: bool, magnitude: bool) -> Any:
    """Adds four products a column.

    Args:
        acc: The sums of some columns.
        elements: Four elements of each.
        word: Four elements of a row of A.
        rest: Where magnitudes are multiplied: -1 in place of -128, else 0, which is what the first turn leaves; -128 has no magnitude.
        magnitude: See `by_magnitude`.
    """
    x = k.bitcast(k.splat(word, acc.width), k.i8)
    if magnitude:
        x = k.select(x == -128, k.i8(-1), k.i8(0)) if rest else k.max(x, k.i8(-127))
        value = k.bitcast(elements ^ 128, k.i8)
        x = k.select(value < 0, 0 - x, x)
        return k.dot_i8(acc, k.bitcast(k.abs(value), k.u8), x, narrow=True)
    if k.target().signed_bytes:
        return k.dot_i8(acc, k.bitcast(elements ^ 128, k.i8), x)
    return k.dot_i8(acc, elements, x)


@k.inline
def note_rows(
    zeros: Any, a: Any, stride: Any, count: Any, depth: Any, magnitude: bool, width: int
) -> Any:
    """Writes -128 times the sum of each row, or 0 where signed bytes are multiplied; where magnitudes are, says instead whether a row has a -128.

    Args:
        zeros: Where the sums go.
        a: Flat lanes of A.
        stride: Of them from row to row.
        count: Rows.
        depth: Lanes in k.
        magnitude: See `by_magnitude`.
        width: Lanes of a vector.
    """
    lowest = k.i64(0)
    for r in range(count):
        total = k.splat(k.i32(0), width)
        for n, mask in k.vectors(depth, width):
            x = k.bitcast(a.load(r * stride + n, width=width, mask=mask), k.i8)
            if magnitude:
                if k.any(x == -128):
                    lowest = k.i64(1)
            elif not k.target().signed_bytes:
                total = k.dot_i8(total, k.splat(k.u8(1), FOUR * width), x)
        if not magnitude:
            zeros[r] = k.reduce_add(total) * -128
    return lowest


@k.inline
def few_rows(
    c: Any, a: Any, stride: Any, count: Any, zeros: Any, lowest: Any, panel: Any, depth: Any,
    first: int, rows: int, vectors: int, magnitude: bool, t: Tiling,
) -> None:  # fmt: skip
    """A few rows of A by some vectors of columns of a panel.

    Args:
        c: Where the sums go, `COLUMNS` a row.
        a: Flat lanes of A, from the first row on.
        stride: Of them from row to row.
        count: How many rows there are; the last stands in for those that are not there.
        zeros: See `note_rows`.
        lowest: See `note_rows`.
        panel: The panel.
        depth: Lanes in k.
        first: The first column, within the panel.
        rows: Rows at once.
        vectors: Vectors of columns.
        magnitude: See `by_magnitude`.
        t: The tiling.
    """
    sums = k.tile(k.i32, (rows, vectors), width=t.width, fill=0)
    at = [k.min(k.i64(r), count - 1) for r in k.static_range(rows)]
    if not magnitude:
        for i in k.static_range(rows):
            for j in k.static_range(vectors):
                sums[i, j] = k.splat(zeros[at[i]], t.width)
    for rest in k.unroll((False, True) if magnitude else (False,)):
        if lowest >= k.i64(rest):
            for n in range(depth):
                for v in k.static_range(vectors):
                    column = n * COLUMNS + first + v * t.width
                    elements = panel.load(FOUR * column, width=FOUR * t.width)
                    for r in k.static_range(rows):
                        word = a[at[r] * stride + n]
                        sums[r, v] = multiply_add(sums[r, v], elements, word, rest, magnitude)
    for r in k.static_range(rows):
        for v in k.static_range(vectors):
            c.store(r * COLUMNS + first + v * t.width, value=sums[r, v])


@k.inline
def multiply_step(
    sums: Any, a: Any, at: Any, b: Any, n: Any, height: int, rest: bool, magnitude: bool, t: Tiling
) -> None:
    """Adds the products of lane `n` of some rows with two vectors of columns."""
    low = b.load(FOUR * n * COLUMNS, width=FOUR * t.width)
    high = b.load(FOUR * (n * COLUMNS + t.width), width=FOUR * t.width)
    for i in k.static_range(height):
        word = a[at[i] + n]
        sums[i, 0] = multiply_add(sums[i, 0], low, word, rest, magnitude)
        sums[i, 1] = multiply_add(sums[i, 1], high, word, rest, magnitude)


@k.inline
def multiply_rows(
    c: Any, a: Any, stride: Any, row: Any, last: Any, zeros: Any, lowest: Any, b: Any, depth: Any,
    first: Any, height: int, next_panel: Any, next_rows: bool, magnitude: bool, t: Tiling,
) -> None:  # fmt: skip
    """Multiplies rows of A by two vectors of columns of a panel, over a K block: a register tile of sums.

    Args:
        c: The sums, `COLUMNS` a row; set where `first`, else added to.
        a: Flat lanes of A.
        stride: Of them from row to row.
        row: The first row.
        last: The last there is, which stands in for those behind it.
        zeros: Of this K block, see `note_rows`.
        lowest: See `note_rows`.
        b: The panel's bytes.
        depth: Lanes in k.
        first: Whether nothing was summed yet.
        height: Rows.
        next_panel: The bytes that come next, to be asked for meanwhile; None: nothing.
        next_rows: Whether the rows that come next are asked for.
        magnitude: See `by_magnitude`.
        t: The tiling.
    """
    sums = k.tile(k.i32, (height, 2), width=t.width, fill=0)
    if not first:
        for i in k.static_range(height):
            for j in k.static_range(2):
                sums[i, j] = c.load(i * COLUMNS + j * t.width, width=t.width)
    rows = [k.min(row + i, last) for i in k.static_range(height)]
    at = [one * stride for one in rows]
    if not magnitude:
        for i in k.static_range(height):
            for j in k.static_range(2):
                sums[i, j] = sums[i, j] + zeros[rows[i]]
    for rest in k.unroll((False, True) if magnitude else (False,)):
        if rest:
            if lowest == 1:
                for n in range(depth):
                    multiply_step(sums, a, at, b, n, height, rest, magnitude, t)
        elif next_rows:
            # a part of the steps for each of the rows that come next
            steps = k.ceildiv(depth, height)
            for part in range(height):
                ahead = a[(row + height + part) * stride :]
                for n in range(part * steps, k.min(part * steps + steps, depth)):
                    ahead.prefetch((n - part * steps) * height)
                    multiply_step(sums, a, at, b, n, height, rest, magnitude, t)
        else:
            for n in range(depth):
                if next_panel is not None:
                    for line in k.static_range(0, FOUR * COLUMNS, 64):
                        next_panel.prefetch(FOUR * n * COLUMNS + line)
                multiply_step(sums, a, at, b, n, height, rest, magnitude, t)
    for i in k.static_range(height):
        for j in k.static_range(2):
            c.store(i * COLUMNS + j * t.width, value=sums[i, j])


@k.inline
def many_rows(
    out: Any, a: Any, stride: Any, panels: Any, extra: Any, magnitude: bool, epilogue: Any,
    t: Tiling, ctx: Any,
) -> None:  # fmt: skip
    """The product of all rows: each worker takes blocks of rows by groups of panels, K block by K block.

    Args:
        out: `[M, N]`.
        a: Flat lanes of A.
        stride: Of them from row to row.
        panels: `[panels, bytes]`.
        extra: The epilogue's views.
        magnitude: See `by_magnitude`.
        epilogue: The epilogue.
        t: The tiling.
        ctx: The context.
    """
    rows, columns = out.shape[0], out.shape[1]
    c = ctx.scratch(k.i32, (BLOCK_SUMS + t.height * COLUMNS,))
    zeros = ctx.scratch(k.i32, (BLOCK_SUMS // COLUMNS,))
    # K is cut into equal blocks; there is one at least, which sets the sums to 0 where K is 0
    blocks = k.max(k.ceildiv(stride, LANES_K), 1)
    block = k.max(round_up(k.ceildiv(stride, blocks), t.width), t.width)
    blocks = k.max(k.ceildiv(stride, block), 1)
    strips = k.ceildiv(columns, COLUMNS)
    low = tile_heights(t)[1]
    high, wanted = plan(rows, columns, ctx.num_workers, t)
    for row_block, group in ctx.parallel(
        (k.ceildiv(rows, high * t.height), k.ceildiv(strips, wanted)), grain=1
    ):
        first_row = row_block * high * t.height
        count = k.min(high * t.height, rows - first_row)
        first_strip = group * wanted
        here = k.min(wanted, strips - first_strip)
        lowest = k.i64(0)
        for turn in range(blocks * here):
            n, strip = turn // here, turn % here
            depth = k.min(block, stride - n * block)
            left = a[first_row * stride + n * block :]
            if strip == 0:
                lowest = note_rows(zeros, left, stride, count, depth, magnitude, t.width)
            b = panels[first_strip + strip, FOUR * n * block * COLUMNS :]
            # what comes next is asked for while the first tile is multiplied
            after = k.min(turn + 1, blocks * here - 1)
            ahead = panels[first_strip + after % here, FOUR * (after // here) * block * COLUMNS :]
            row = k.i64(0)
            while row < count:
                rest = count - row
                # two lower tiles take less time than a high one and a remainder
                lower = rest <= low or (rest > t.height and rest <= 2 * low)
                # sums that nothing is added to later are no longer needed once they are stored
                place = row + strip * high * t.height if blocks > 1 else k.i64(0)
                sums = c[place * COLUMNS :]
                this = first_strip + strip
                if n == blocks - 1:
                    ask_for_strip(out, extra, first_row + row, this, t.height, ())
                for height in k.unroll((t.height, low)):
                    if lower == (height == low):
                        for half in k.static_range(0, COLUMNS, 2 * t.width):
                            if half == 0 and (row == 0 or height == low):
                                multiply_rows(
                                    sums, left, stride, row, count - 1, zeros, lowest, b, depth,
                                    n == 0, height, ahead, False, magnitude, t,
                                )  # fmt: skip
                            elif half == 0 and strip == 0:
                                multiply_rows(
                                    sums, left, stride, row, count - 1, zeros, lowest, b, depth,
                                    n == 0, height, None, True, magnitude, t,
                                )  # fmt: skip
                            else:
                                multiply_rows(
                                    sums[half:], left, stride, row, count - 1, zeros, lowest,
                                    b[FOUR * half :], depth, n == 0, height, None, False,
                                    magnitude, t,
                                )  # fmt: skip
                done = k.min(rest, k.i64(low) if lower else k.i64(t.height))
                if n == blocks - 1:
                    store_strip(
                        out, sums, first_row + row, done, this, extra, epilogue, (), t.width
                    )
                row += done


@k.kernel
def matmul_int8(
    out: k.Output,
    a: k.Input,
    panels: k.Input,
    workspace: k.InOut,
    *extra: k.Input,
    ctx: k.Context,
    in_place: bool,
    epilogue: Any = identity,
) -> None:
    """`out` `[M, N]` = `epilogue(a @ b)` from `a` `[M, K]` and the panels `[panels, bytes]` of b.

    Where not `in_place`, rows are no whole lanes: they are copied to the workspace first, filled up with 0.
    """
    t = int8_tiling(ctx.target)
    magnitude = by_magnitude(ctx.target)
    rows, size, columns = a.shape[0], a.shape[1], out.shape[1]
    stride = k.ceildiv(size, FOUR)
    if not in_place:
        for row in ctx.parallel(rows):
            copy = workspace[row * stride * FOUR :]
            for i in range(size - size % FOUR, stride * FOUR):
                copy[i] = k.i8(0)
            for i, mask in k.vectors(size, FOUR * t.width):
                copy.store(i, value=a.load(row, i, width=FOUR * t.width, mask=mask), mask=mask)
        ctx.barrier()
    copies = workspace[: rows * stride * FOUR]
    words = a.reshape(rows * size).view(k.i32) if in_place else copies.view(k.i32)
    if rows > FEW_ROWS:
        if ctx.target.tile_products:
            amx_int8.many_rows(out, words, stride, panels, extra, epilogue, t, ctx)
        else:
            many_rows(out, words, stride, panels, extra, magnitude, epilogue, t, ctx)
        return
    c = ctx.scratch(k.i32, (FEW_ROWS * COLUMNS,))
    zeros = ctx.scratch(k.i32, (FEW_ROWS,))
    lowest = note_rows(zeros, words, stride, rows, stride, magnitude, t.width)
    strips = k.ceildiv(columns, COLUMNS)
    for strip in ctx.parallel(strips):
        i = k.i64(0)
        while i < rows:
            left = rows - i
            done = k.i64(0)
            for at_once in k.unroll(FEW_AT_ONCE[ctx.target.registers < 32 :]):
                if done == 0 and left > at_once // 2:
                    # narrow vectors: one row or two take whole lines
                    vectors = COLUMNS // t.width if at_once <= 2 else 2
                    for part in k.static_range(0, COLUMNS, vectors * t.width):
                        few_rows(
                            c[i * COLUMNS :], words[i * stride :], stride, left, zeros[i:], lowest,
                            panels[strip], stride, part, at_once, vectors, magnitude, t,
                        )  # fmt: skip
                    done = k.min(left, at_once)
            i += done
        store_strip(out, c, k.i64(0), rows, strip, extra, epilogue, (), t.width)


def lower_pack(
    operands: Sequence[Operand], results: Sequence[Operand], encoding: str
) -> KernelCall:
    """The packing of a weight."""
    args = (
        view("result", 0, results[0], static=False),
        view("operand", 0, operands[0], static=False),
    )
    return KernelCall(pack_int8, args, {"by_rows": ENCODINGS[encoding]})


def lower_matmul(operands: Sequence[Operand], results: Sequence[Operand]) -> KernelCall:
    """The product of x `[…, K]` and panels."""
    x, out = operands[0], results[0]
    last = len(x.shape) - 1
    inner = x.shape[last]
    in_place = isinstance(inner, int) and inner % FOUR == 0
    elements = (product(x.shape[:last]), inner + FOUR) if not in_place else (1, 1)
    workspace = Workspace(DType.int8, elements)
    args = (
        view("result", 0, out, (range(last), (last,)), static=False),
        view("operand", 0, x, (range(last), (last,)), static=False),
        view("operand", 1, operands[1], static=False),
        view("workspace", 0, workspace, ((0, 1),), static=False),
    )
    return KernelCall(
        matmul_int8, args, {"in_place": in_place}, epilogue=True, workspaces=(workspace,)
    )
