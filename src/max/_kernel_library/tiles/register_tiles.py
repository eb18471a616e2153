"""Register-tile micro-kernels, shared by matmul and attention.

Operands are views that begin where the work begins, so that one piece of code serves weights, packed panels and pages of a
cache. Matrices of sums (`c`) and packed panels are flat. A panel is `[k / pair][rows][pair]`, for A with the rows of a register
tile, for B with its columns; `pair` is 2 where products are made by `dot_bf16` (two neighbours in k share a 32-bit lane), else 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from max import kernel as k
from max.kernel import Target


@dataclass(frozen=True)
class Tiling:
    """How products are made on a machine: known at compile time.

    Args:
        sums: Element type in which products are summed.
        lane: Element type of a lane of a packed panel (i32 holds two bf16).
        pair: Neighbours in k that share a lane.
        width: Lanes of a vector.
        height: Rows of the register tile: what leaves registers for two vectors of B and one of A.
        few: Rows of A that are multiplied at once where B is not packed.
    """

    sums: k.ScalarType
    lane: k.ScalarType
    pair: int
    width: int
    height: int
    few: int

    @property
    def step(self) -> int:
        """Neighbours in k that fill a vector."""
        return self.width * self.pair


def tiling(target: Target, a: k.ScalarType, b: k.ScalarType) -> Tiling:
    """The tiling for operands of two element types: sums in the wider one, f32 at least for floats.

    Args:
        target: The machine.
        a: Element type of the left operand.
        b: Element type of the right operand.
    """
    sums = a if a.bits >= b.bits else b
    if sums.is_float and sums.bits < 32:
        sums = k.f32
    pairs = a is k.bf16 and b is k.bf16 and bool(target.dot_bf16_lanes(target.width(k.f32)))
    height, few = (12, 4) if target.registers >= 32 else (6, 2)
    lane, pair = (k.i32, 2) if pairs else (sums, 1)
    return Tiling(sums, lane, pair, target.width(sums), height, few)


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
        if lane_dtype == k.i32 and v.dtype.bits == 16
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
def pack_block(panel: Any, stride: Any, source: Any, mask: Any, count: int, t: Tiling) -> None:
    """Transposes the first `width` lanes in k of `count` rows into a panel."""
    block = k.tile(t.lane, (t.width,), width=t.width)
    last = source.shape[0] - 1
    for r in k.static_range(t.width):
        if r < count:
            block[r] = lanes(source.load(k.min(r, last), 0, width=t.step, mask=mask), t.lane)
        else:
            block[r] = block[0]
    transpose(block, t.width)
    inside = None if count == t.width else k.iota(k.i32, t.width) < count
    for r in k.static_range(t.width):
        panel.store(r * stride, value=block[r], mask=inside)


@k.inline
def pack_rows(panel: Any, stride: Any, source: Any, count: int, t: Tiling) -> None:
    """Packs rows side by side: `panel[i * stride + r]` is lane `i` of row `r`.

    Where lanes have 32 bits, `i` goes on, with lanes of 0, to the next multiple of the width.

    Args:
        panel: Flat view of lanes.
        stride: Lanes from one k to the next.
        source: `[rows, k]`, contiguous along k; its last row stands in for those that it has not.
        count: Rows to pack, at most the width of a vector where lanes have 32 bits.
        t: The tiling.
    """
    size = source.shape[1]
    if t.lane.bits == 32 and t.width >= 4:
        if k.target().has("avx512bw"):
            # masked loads cost nothing here: one body for full and partial blocks
            for i in range(0, size, t.step):
                mask = k.iota(k.i32, t.step) < k.i32(size - i)
                pack_block(panel[i // t.pair * stride :], stride, source[:, i:], mask, count, t)
        else:
            for i, mask in k.vectors(size, t.step):
                pack_block(panel[i // t.pair * stride :], stride, source[:, i:], mask, count, t)
    else:
        for r in range(count):
            for i in range(size):
                element = source[k.min(r, source.shape[0] - 1), i]
                panel[i * stride + r] = k.cast(element, t.lane)


@k.inline
def pack_columns(panel: Any, source: Any, vectors: int, t: Tiling, step: int = 0) -> None:
    """Packs columns, which are contiguous already, into a panel of B; the panel's other columns are 0.

    Args:
        panel: Flat view of lanes.
        source: `[k, columns]`.
        vectors: Width of the panel in vectors.
        t: The tiling.
        step: Lanes from row to row, where they are more than the panel's width.
    """
    for i in range(0, source.shape[0], t.pair):
        for j in k.static_range(vectors):
            target = i // t.pair * (step or vectors * t.width) + j * t.width
            mask = k.iota(k.i64, t.width) + j * t.width < source.shape[1]
            here = source.load(i, j * t.width, width=t.width, mask=mask)
            if t.pair == 1:
                panel.store(target, value=k.cast(here, t.lane))
            else:
                there = k.splat(k.cast(k.f32(0), source.dtype), t.width)
                if i + 1 < source.shape[0]:
                    there = source.load(i + 1, j * t.width, width=t.width, mask=mask)
                panel.store(target, value=k.bitcast(k.interleave(here, there), t.lane))


@k.inline
def multiply_tile(
    c: Any,
    c_row: Any,
    a: Any,
    a_row: Any,
    a_step: Any,
    b: Any,
    size: Any,
    first: Any,
    t: Tiling,
    ahead: Any = None,
    b_step: Any = None,
) -> None:
    """Multiplies a panel of A by a packed panel of B of two vectors' width: a register tile of sums.

    Args:
        c: Flat view of sums; set where `first`, else added to.
        c_row: Elements from row to row.
        a: Flat view of lanes.
        a_row: Lanes from row to row of A (1 in a packed panel).
        a_step: Lanes from one k to the next (the tile's height in a packed panel).
        b: Flat view of lanes.
        size: Lanes in k.
        first: Whether nothing was summed yet.
        t: The tiling.
        ahead: Rows of two vectors' width of B that come next, or the panel that does, to be asked for meanwhile; None: nothing.
        b_step: Lanes of B from one k to the next; None: of two vectors.
    """
    step = 2 * t.width if b_step is None else b_step
    sums = k.tile(t.sums, (t.height, 2), width=t.width, fill=0)
    if not first:
        for i in k.static_range(t.height):
            for j in k.static_range(2):
                sums[i, j] = c.load(i * c_row + j * t.width, width=t.width)
    for n in range(size):
        low = b.load(n * step, width=t.width)
        high = b.load(n * step + t.width, width=t.width)
        if ahead is not None and ahead.rank == 1:
            for i in k.static_range(0, 4 * step, 64):
                ahead.prefetch(n * step + i // 4)
        elif ahead is not None:
            # a line of each row in turn: two vectors' width of rows have as many lines as twice the lanes in k
            for half in k.static_range(2):
                at = 2 * n + half
                ahead.prefetch(at % (2 * t.width), at // (2 * t.width) * t.step)
        for i in k.static_range(t.height):
            left = k.splat(a[n * a_step + i * a_row], t.width)
            sums[i, 0] = multiply_add(sums[i, 0], left, low)
            sums[i, 1] = multiply_add(sums[i, 1], left, high)
    for i in k.static_range(t.height):
        for j in k.static_range(2):
            c.store(i * c_row + j * t.width, value=sums[i, j])


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
def dot_step(sums: Any, a: Any, b: Any, mask: Any, rows: int, t: Tiling) -> None:
    """Multiplies one vector in k of a few rows of A and of four of B, lane by lane."""
    left = k.tile(t.lane, (rows,), width=t.width)
    for i in k.static_range(rows):
        left[i] = lanes(a.load(i, 0, width=t.step, mask=mask), t.lane)
    for j in k.static_range(4):
        row = k.min(j, b.shape[0] - 1)
        right = lanes(b.load(row, 0, width=t.step, mask=mask), t.lane)
        for i in k.static_range(rows):
            sums[i, j] = multiply_add(sums[i, j], left[i], right)


@k.inline
def dot_rows(
    c: Any, c_row: Any, a: Any, b: Any, rows: int, unroll: int, ahead: bool, t: Tiling
) -> None:
    """Dot products of a few rows of A with four of B, all contiguous along k: `c[i, j] = a[i] · b[j]`.

    Args:
        c: Flat view of sums.
        c_row: Elements from row to row.
        a: `[rows, k]`.
        b: `[rows, k]`; its last row stands in for those that it has not.
        rows: Rows of A at once.
        unroll: Steps in k at once, each with sums of its own: for few rows, 2 hide the latency.
        ahead: Whether the next four rows of B are asked for meanwhile.
        t: The tiling.
    """
    size = a.shape[1]
    sums = k.tile(t.sums, (rows, 4), width=t.width, fill=0)
    others = k.tile(t.sums, (rows, 4), width=t.width, fill=0)
    whole = size - size % (t.step * unroll)
    for n in range(0, whole, t.step * unroll):
        if ahead:
            for j in k.static_range(4, 8):
                b.prefetch(j, n)
        dot_step(sums, a[:, n:], b[:, n:], None, rows, t)
        if unroll == 2:
            dot_step(others, a[:, n + t.step :], b[:, n + t.step :], None, rows, t)
    for n, mask in k.vectors(whole, size, t.step):
        dot_step(sums, a[:, n:], b[:, n:], mask, rows, t)
    for i in k.static_range(rows):
        for j in k.static_range(4):
            if unroll == 2:
                sums[i, j] = sums[i, j] + others[i, j]
        if t.sums.bits == 32 and t.width >= 4:
            four = four_sums(sums[i, 0], sums[i, 1], sums[i, 2], sums[i, 3], t.width)
            c.store(i * c_row, value=four)
        else:
            for j in k.static_range(4):
                c[i * c_row + j] = k.reduce_add(sums[i, j])


@k.inline
def column_step(sums: Any, a: Any, b: Any, n: Any, masked: bool, rows: int, width: int) -> None:
    """Adds the products of column `n` of A with the vectors of row `n` of B."""
    for j in k.static_range(4):
        mask = k.iota(k.i64, width) + j * width < b.shape[1] if masked else None
        right = k.cast(b.load(n, j * width, width=width, mask=mask), sums.dtype)
        for i in k.static_range(rows):
            left = k.splat(k.cast(a[i, n], sums.dtype), width)
            sums[i, j] = multiply_add(sums[i, j], left, right)


@k.inline
def multiply_columns(c: Any, c_row: Any, a: Any, b: Any, add: bool, rows: int, width: int) -> None:
    """Multiplies a few rows of A by up to four vectors of columns of B, read where they are.

    Args:
        c: Flat view of sums, four vectors wide; set, or added to where `add`.
        c_row: Elements from row to row.
        a: `[rows, k]`.
        b: `[k, columns]`.
        add: Whether sums are added to.
        rows: Rows of A at once.
        width: Lanes of a vector.
    """
    sums = k.tile(c.dtype, (rows, 4), width=width, fill=0)
    if add:
        for i in k.static_range(rows):
            for j in k.static_range(4):
                sums[i, j] = c.load(i * c_row + j * width, width=width)
    if b.shape[1] >= 4 * width:
        for n in range(b.shape[0]):
            column_step(sums, a, b, n, False, rows, width)
    else:
        for n in range(b.shape[0]):
            column_step(sums, a, b, n, True, rows, width)
    for i in k.static_range(rows):
        for j in k.static_range(4):
            c.store(i * c_row + j * width, value=sums[i, j])
