"""Register-tile micro-kernels, shared by matmul and attention.

Operands are views; where the layout is packed they are flat, so that one piece of code serves weights, packed panels and
pages of a cache. Packed layouts:

- a panel of A: `[k / pair][rows][pair]`, `rows` = the height of the register tile;
- a panel of B: `[k / pair][columns][pair]`, `columns` = its width.

`pair` is 2 where products are made by `dot_bf16` (two neighbours in k share a 32-bit lane), else 1.
"""

from __future__ import annotations

from typing import Any

from max import kernel as k
from max.kernel import Target


def tile_rows(target: Target) -> int:
    """Rows of the register tile: what leaves registers for two vectors of B and one of A.

    Args:
        target: The machine.
    """
    return 12 if target.registers >= 32 else 6


def pair_size(target: Target, a: k.ScalarType, b: k.ScalarType) -> int:
    """Neighbours in k that share a lane of a packed panel.

    Args:
        target: The machine.
        a: Element type of the left operand.
        b: Element type of the right operand.
    """
    return 2 if a is k.bf16 and b is k.bf16 and target.has("avx512bf16") else 1


def accumulator_dtype(a: k.ScalarType, b: k.ScalarType) -> k.ScalarType:
    """Element type in which products are summed: the wider operand's, f32 at least for floats.

    Args:
        a: Element type of the left operand.
        b: Element type of the right operand.
    """
    wide = a if a.bits >= b.bits else b
    return k.f32 if wide.is_float and wide.bits < 32 else wide


def _unpack(width: int, group: int, high: int) -> tuple[int, ...]:
    """Indices that interleave groups of lanes of the low or high half of each 128-bit lane of two vectors."""
    indices: list[int] = []
    for lane in range(0, width, 4):
        for position in range(2 // group):
            start = lane + 2 * high + position * group
            indices += [*range(start, start + group), *range(width + start, width + start + group)]
    return tuple(indices)


def _every_other(width: int, odd: int) -> tuple[int, ...]:
    """Indices of the even or odd 128-bit lanes of two vectors."""
    return tuple(lane + i for lane in range(4 * odd, 2 * width, 8) for i in range(4))


# shuffle patterns of `transpose` by vector width: low and high halves of 32- and 64-bit groups, even and odd 128-bit lanes
LOW_1 = {width: _unpack(width, 1, 0) for width in (4, 8, 16)}
HIGH_1 = {width: _unpack(width, 1, 1) for width in (4, 8, 16)}
LOW_2 = {width: _unpack(width, 2, 0) for width in (4, 8, 16)}
HIGH_2 = {width: _unpack(width, 2, 1) for width in (4, 8, 16)}
EVEN = {width: _every_other(width, 0) for width in (8, 16)}
ODD = {width: _every_other(width, 1) for width in (8, 16)}
# halves of vectors of 16 and of 8 lanes
FIRST_8, LAST_8 = tuple(range(8)), tuple(range(8, 16))
FIRST_4, LAST_4 = tuple(range(4)), tuple(range(4, 8))


@k.inline
def transpose(rows: Any, width: int) -> None:
    """Transposes in place a tile of `width` (4, 8 or 16) vectors of `width` 32-bit lanes."""
    half = k.tile(rows.dtype, (width,), width=width)
    for i in k.static_range(0, width, 2):
        half[i] = k.shuffle(rows[i], rows[i + 1], LOW_1[width])
        half[i + 1] = k.shuffle(rows[i], rows[i + 1], HIGH_1[width])
    # afterwards lane j of rows[4 * g + c] holds column 4 * j + c of rows 4 * g … 4 * g + 3
    for i in k.static_range(0, width, 4):
        for j in k.static_range(2):
            rows[i + 2 * j] = k.shuffle(half[i + j], half[i + 2 + j], LOW_2[width])
            rows[i + 2 * j + 1] = k.shuffle(half[i + j], half[i + 2 + j], HIGH_2[width])
    if width == 8:
        for c in k.static_range(4):
            half[c] = k.shuffle(rows[c], rows[4 + c], EVEN[width])
            half[4 + c] = k.shuffle(rows[c], rows[4 + c], ODD[width])
        for i in k.static_range(8):
            rows[i] = half[i]
    if width == 16:
        for c in k.static_range(4):
            even_low = k.shuffle(rows[c], rows[4 + c], EVEN[width])
            even_high = k.shuffle(rows[8 + c], rows[12 + c], EVEN[width])
            odd_low = k.shuffle(rows[c], rows[4 + c], ODD[width])
            odd_high = k.shuffle(rows[8 + c], rows[12 + c], ODD[width])
            half[c] = k.shuffle(even_low, even_high, EVEN[width])
            half[8 + c] = k.shuffle(even_low, even_high, ODD[width])
            half[4 + c] = k.shuffle(odd_low, odd_high, EVEN[width])
            half[12 + c] = k.shuffle(odd_low, odd_high, ODD[width])
        for i in k.static_range(16):
            rows[i] = half[i]


@k.inline
def lanes(v: Any, lane_dtype: Any) -> Any:
    """Loaded elements as lanes of a packed panel: converted, or bits of neighbours side by side."""
    return (
        k.bitcast(v, lane_dtype)
        if lane_dtype == k.i32 and v.dtype == k.bf16
        else k.cast(v, lane_dtype)
    )


@k.inline
def multiply_add(acc: Any, x: Any, y: Any) -> Any:
    """`acc + x * y`; 32-bit integer lanes over an f32 accumulator are pairs of bf16."""
    if acc.dtype == k.f32 and x.dtype == k.i32:
        return k.dot_bf16(acc, k.bitcast(x, k.bf16), k.bitcast(y, k.bf16))
    elif acc.dtype.is_float:
        return k.fma(x, y, acc)
    else:
        return acc + x * y


@k.inline
def pack_block(
    panel: Any,
    first: Any,
    stride: Any,
    source: Any,
    row: Any,
    last_row: Any,
    column: Any,
    mask: Any,
    count: Any,
    pair: int,
    width: int,
) -> None:
    """Transposes `width` lanes in k of `count` rows into a panel."""
    block = k.tile(panel.dtype, (width,), width=width)
    for r in k.static_range(width):
        if r < count:
            elements = source.load(k.min(row + r, last_row), column, width=width * pair, mask=mask)
            block[r] = lanes(elements, panel.dtype)
        else:
            block[r] = block[0]
    transpose(block, width)
    for r in k.static_range(width):
        inside = None if count == width else k.iota(k.i32, width) < count
        panel.store(first + r * stride, value=block[r], mask=inside)


@k.inline
def pack_rows(
    panel: Any,
    start: Any,
    stride: Any,
    source: Any,
    row: Any,
    last_row: Any,
    column: Any,
    size: Any,
    count: Any,
    pair: int,
    width: int,
) -> None:
    """Packs rows of `source` `[rows, k]` side by side: `panel[start + i * stride + r]` is lane `i` of row `row + r`.

    Where lanes have 32 bits, `i` goes on, with lanes of 0, to the next multiple of `width`.

    Args:
        panel: Flat view of lanes.
        start: Where the panel begins.
        stride: Lanes from one k to the next.
        source: The rows, contiguous along k.
        row: First row; rows after `last_row` are packed as copies of it.
        last_row: Last row there is.
        column: First k.
        size: How many k.
        count: Rows to pack, at most `width` where lanes have 32 bits.
        pair: Neighbours in k that share a lane.
        width: Lanes of a vector.
    """
    step = width * pair
    if panel.dtype.bits == 32 and width >= 4:
        if k.target().has("avx512bw"):
            # masked loads cost nothing here: one body for full and partial blocks
            for i in range(0, size, step):
                mask = k.iota(k.i32, step) < k.i32(size - i)
                pack_block(
                    panel,
                    start + i // pair * stride,
                    stride,
                    source,
                    row,
                    last_row,
                    column + i,
                    mask,
                    count,
                    pair,
                    width,
                )
        else:
            for i, mask in k.vectors(size, step):
                pack_block(
                    panel,
                    start + i // pair * stride,
                    stride,
                    source,
                    row,
                    last_row,
                    column + i,
                    mask,
                    count,
                    pair,
                    width,
                )
    else:
        for r in range(count):
            for i in range(size):
                panel[start + i * stride + r] = k.cast(
                    source[k.min(row + r, last_row), column + i], panel.dtype
                )


@k.inline
def pack_columns(
    panel: Any,
    start: Any,
    source: Any,
    row: Any,
    size: Any,
    column: Any,
    columns: Any,
    vectors: int,
    pair: int,
    width: int,
) -> None:
    """Packs columns of `source` `[k, columns]`, which are contiguous already, into a panel of B.

    Args:
        panel: Flat view of lanes.
        start: Where the panel begins.
        source: The matrix.
        row: First k.
        size: How many k.
        column: First column.
        columns: How many columns there are from there; the panel's others are 0.
        vectors: Width of the panel in vectors.
        pair: Neighbours in k that share a lane.
        width: Lanes of a vector.
    """
    for i in range(0, size, pair):
        for j in k.static_range(vectors):
            target = start + (i // pair * vectors + j) * width
            mask = k.iota(k.i64, width) + j * width < columns
            here = source.load(row + i, column + j * width, width=width, mask=mask)
            if pair == 1:
                panel.store(target, value=k.cast(here, panel.dtype))
            else:
                there = k.splat(k.bf16(0), width)
                if i + 1 < size:
                    there = source.load(row + i + 1, column + j * width, width=width, mask=mask)
                panel.store(target, value=k.bitcast(k.interleave(here, there), panel.dtype))


@k.inline
def multiply_tile(
    c: Any,
    c_start: Any,
    c_stride: Any,
    a: Any,
    a_start: Any,
    a_row: Any,
    a_step: Any,
    b: Any,
    b_start: Any,
    size: Any,
    first: Any,
    rows: Any,
    vectors: int,
    width: int,
) -> None:
    """Multiplies a panel of A by a packed panel of B: `rows × vectors·width` sums in registers.

    Args:
        c: Flat view of sums; set where `first`, else added to.
        c_start: Where the tile begins.
        c_stride: Elements from row to row.
        a: Flat view of lanes.
        a_start: Where the panel of A begins.
        a_row: Lanes from row to row of A (1 in a packed panel).
        a_step: Lanes from one k to the next (`rows` in a packed panel).
        b: Flat view of lanes.
        b_start: Where the panel of B begins.
        size: Lanes in k.
        first: Whether nothing was summed yet.
        rows: Height of the tile.
        vectors: Its width in vectors.
        width: Lanes of a vector.
    """
    sums = k.tile(c.dtype, (rows, vectors), width=width, fill=0)
    if not first:
        for i in k.static_range(rows):
            for j in k.static_range(vectors):
                sums[i, j] = c.load(c_start + i * c_stride + j * width, width=width)
    for n in range(size):
        right = k.tile(b.dtype, (vectors,), width=width)
        for j in k.static_range(vectors):
            right[j] = b.load(b_start + n * (vectors * width) + j * width, width=width)
        for i in k.static_range(rows):
            left = k.splat(a[a_start + n * a_step + i * a_row], width)
            for j in k.static_range(vectors):
                sums[i, j] = multiply_add(sums[i, j], left, right[j])
    for i in k.static_range(rows):
        for j in k.static_range(vectors):
            c.store(c_start + i * c_stride + j * width, value=sums[i, j])


@k.inline
def four_sums(a: Any, b: Any, c: Any, d: Any, width: int) -> Any:
    """The sums over the lanes of four vectors, side by side."""
    ab = k.shuffle(a, b, LOW_1[width]) + k.shuffle(a, b, HIGH_1[width])
    cd = k.shuffle(c, d, LOW_1[width]) + k.shuffle(c, d, HIGH_1[width])
    total = k.shuffle(ab, cd, LOW_2[width]) + k.shuffle(ab, cd, HIGH_2[width])
    if width == 16:
        total = k.shuffle(total, None, FIRST_8) + k.shuffle(total, None, LAST_8)
    if width >= 8:
        total = k.shuffle(total, None, FIRST_4) + k.shuffle(total, None, LAST_4)
    return total


@k.inline
def dot_rows(
    c: Any,
    c_start: Any,
    c_stride: Any,
    a: Any,
    a_row: Any,
    b: Any,
    b_row: Any,
    b_last: Any,
    rows_a: int,
    lane_dtype: Any,
    pair: int,
    width: int,
    unroll: int,
) -> None:
    """Dot products of a few rows of A with four of B, all contiguous along k: `c[i, j] = a[a_row + i] · b[b_row + j]`.

    Args:
        c: Flat view of sums.
        c_start: Where the block begins.
        c_stride: Elements from row to row.
        a: `[rows, k]`.
        a_row: First row of A.
        b: `[rows, k]`.
        b_row: First row of B.
        b_last: Last row of B; it stands in for those after it.
        rows_a: Rows of A at once.
        lane_dtype: Lanes to multiply in.
        pair: Neighbours in k that share a lane.
        width: Lanes of a vector.
        unroll: Steps in flight.
    """
    step = width * pair
    size = a.shape[1]
    rows_b = 4
    sums = k.tile(c.dtype, (unroll, rows_a, rows_b), width=width, fill=0)
    whole = size - size % (step * unroll)
    for n in range(0, whole, step * unroll):
        for u in k.static_range(unroll):
            left = k.tile(lane_dtype, (rows_a,), width=width)
            for i in k.static_range(rows_a):
                left[i] = lanes(a.load(a_row + i, n + u * step, width=step), lane_dtype)
            for j in k.static_range(rows_b):
                right = lanes(
                    b.load(k.min(b_row + j, b_last), n + u * step, width=step), lane_dtype
                )
                for i in k.static_range(rows_a):
                    sums[u, i, j] = multiply_add(sums[u, i, j], left[i], right)
    for n, mask in k.vectors(size - whole, step):
        left = k.tile(lane_dtype, (rows_a,), width=width)
        for i in k.static_range(rows_a):
            left[i] = lanes(a.load(a_row + i, whole + n, width=step, mask=mask), lane_dtype)
        for j in k.static_range(rows_b):
            right = lanes(
                b.load(k.min(b_row + j, b_last), whole + n, width=step, mask=mask), lane_dtype
            )
            for i in k.static_range(rows_a):
                sums[0, i, j] = multiply_add(sums[0, i, j], left[i], right)
    for i in k.static_range(rows_a):
        for j in k.static_range(rows_b):
            for u in k.static_range(1, unroll):
                sums[0, i, j] = sums[0, i, j] + sums[u, i, j]
        if c.dtype.bits == 32 and width >= 4:
            c.store(
                c_start + i * c_stride,
                value=four_sums(sums[0, i, 0], sums[0, i, 1], sums[0, i, 2], sums[0, i, 3], width),
            )
        else:
            for j in k.static_range(4):
                c[c_start + i * c_stride + j] = k.reduce_add(sums[0, i, j])


@k.inline
def multiply_columns(
    c: Any,
    c_start: Any,
    c_stride: Any,
    a: Any,
    a_row: Any,
    size: Any,
    b: Any,
    b_row: Any,
    column: Any,
    columns: Any,
    add: Any,
    rows: Any,
    vectors: int,
    width: int,
) -> None:
    """Multiplies a few rows of A by columns of B `[k, columns]`, read where they are.

    Args:
        c: Flat view of sums; set, or added to where `add`.
        c_start: Where the block begins.
        c_stride: Elements from row to row.
        a: `[rows, k]`.
        a_row: First row of A.
        size: How many k.
        b: `[k, columns]`.
        b_row: Row of B that goes with the first k.
        column: First column.
        columns: How many columns there are from there; the block may be wider.
        add: Whether sums are added to (compile time).
        rows: Rows of A at once.
        vectors: Columns at once, in vectors.
        width: Lanes of a vector.
    """
    sums = k.tile(c.dtype, (rows, vectors), width=width, fill=0)
    if add:
        for i in k.static_range(rows):
            for j in k.static_range(vectors):
                sums[i, j] = c.load(c_start + i * c_stride + j * width, width=width)
    if columns >= vectors * width:
        for n in range(size):
            for j in k.static_range(vectors):
                right = k.cast(b.load(b_row + n, column + j * width, width=width), c.dtype)
                for i in k.static_range(rows):
                    left = k.splat(k.cast(a[a_row + i, n], c.dtype), width)
                    sums[i, j] = multiply_add(sums[i, j], left, right)
    else:
        for n in range(size):
            for j in k.static_range(vectors):
                mask = k.iota(k.i64, width) + j * width < columns
                right = k.cast(
                    b.load(b_row + n, column + j * width, width=width, mask=mask), c.dtype
                )
                for i in k.static_range(rows):
                    left = k.splat(k.cast(a[a_row + i, n], c.dtype), width)
                    sums[i, j] = multiply_add(sums[i, j], left, right)
    for i in k.static_range(rows):
        for j in k.static_range(vectors):
            c.store(c_start + i * c_stride + j * width, value=sums[i, j])
