"""Micro-kernels: products whose accumulators stay in registers, shared by matrix products, attention and convolutions.

Operands are views that begin where the work begins, so that the same code reads weights, packed panels and pages of a
KV cache.

- `multiply_tile`: packed panels of A and B, a register tile of `height` rows by two vectors of columns;
- `dot_rows`: rows of A by four rows of B, both contiguous along k;
- `dot_rows_in_order`: the same, with B read once from its first element to its last;
- `multiply_columns`: rows of A by four vectors of columns of B;
- `add_row_products`: a row of A by long runs of rows of B.
"""

from __future__ import annotations

from max import kernel as k
from max._backends.cpu.kernels.tiles.strips import CACHE_LINE, L2
from max._backends.cpu.kernels.tiles.tiling import Matrix, Tiling, as_lanes, multiply_add
from max._backends.cpu.kernels.tiles.transpose import lane_sums


@k.inline
def load_sums(sums: k.View, c: Matrix, rows: int, vectors: int, width: int) -> None:
    """Loads accumulators from memory."""
    for i in k.static_range(rows):
        for j in k.static_range(vectors):
            sums[i, j] = c.elements.load(i * c.row + j * width, width=width)


@k.inline
def add_sums(sums: k.View, c: Matrix, rows: int, vectors: int, width: int) -> None:
    """Adds sums in memory to accumulators."""
    for i in k.static_range(rows):
        for j in k.static_range(vectors):
            sums[i, j] = c.elements.load(i * c.row + j * width, width=width) + sums[i, j]


@k.inline
def store_sums(c: Matrix, sums: k.View, rows: int, vectors: int, width: int) -> None:
    """Stores accumulators to memory."""
    for i in k.static_range(rows):
        for j in k.static_range(vectors):
            c.elements.store(i * c.row + j * width, value=sums[i, j])


@k.inline
def multiply_tile(
    c: Matrix, a: Matrix, b: Matrix, size: k.Integer, first: bool, t: Tiling, ahead: k.View | None = None,
    folds: bool = False,
) -> None:  # fmt: skip
    """Multiplies a panel of A by a packed panel of B two vectors wide: one register tile of accumulators.

    ::

                      b  size × 2 vectors
                         ┌──┬──┐
                         └──┴──┘
        a  height × size ┌──┬──┐ c  height × 2 vectors
           ┌──────┐      │  │  │
           └──────┘      └──┴──┘

    Register budget: `height` × 2 accumulators, two vectors of B, one broadcast element of A: 27 of 32 registers
    (AVX-512, NEON), 15 of 16 (AVX2). Cache budget: a panel of B of a K block fits the L1 cache (32 KB with `LANES_K`
    lanes of AVX-512), the panels of A the L2 cache.

    Args:
        c: The sums; set where `first`, else added to.
        a: Lanes, ``[height, size]``.
        b: Lanes, ``[size, 2 * width]``.
        size: Lanes in k.
        first: Whether this is the first K block.
        t: The tiling.
        ahead: The data to prefetch: 2 × width rows of B, or (of rank 1) its panel; None: nothing.
        folds: Whether accumulators begin at 0, and are added to the sums at the end.
    """
    sums = k.tile(t.sums, (t.height, 2), width=t.width, fill=0)
    if not (first or folds):
        load_sums(sums, c, t.height, 2, t.width)
    # rows that are not neighbors have an address each, which the loop keeps in a register
    apart = 0 if a.row == 1 else a.row
    rows = [a.elements[i * apart :] for i in k.static_range(t.height)]
    for n in range(size):
        low = b.elements.load(n * b.row, width=t.width)
        high = b.elements.load(n * b.row + t.width, width=t.width)
        if ahead is not None and ahead.rank == 1:
            # four bytes a lane, 64 a cache line
            for i in k.static_range(0, 4 * b.row, 64):
                ahead.prefetch(n * b.row + i // 4)
        elif ahead is not None:
            # two cache lines a step: row by row of a vector in k, then the next vector
            for half in k.static_range(2):
                line = 2 * n + half
                ahead.prefetch(line % (2 * t.width), line // (2 * t.width) * t.step)
        for i in k.static_range(t.height):
            left = k.splat(rows[i][n * a.column + (i if a.row == 1 else 0)], t.width)
            sums[i, 0] = multiply_add(sums[i, 0], left, low)
            sums[i, 1] = multiply_add(sums[i, 1], left, high)
    if folds and not first:
        add_sums(sums, c, t.height, 2, t.width)
    store_sums(c, sums, t.height, 2, t.width)


@k.inline
def dot_step(
    sums: k.View,
    a: k.View,
    b: k.View,
    mask: k.Mask | None,
    rows: int,
    t: Tiling,
    first: int = 0,
    count: int = 4,
) -> None:
    """Multiplies one vector in k of `rows` rows of A and of `count` rows of B from `first` on, lane by lane."""
    left = k.tile(t.lane, (rows,), width=t.width)
    for i in k.static_range(rows):
        left[i] = as_lanes(a.load(i, 0, width=t.step, mask=mask), t.lane)
    for j in k.static_range(first, first + count):
        row = k.min(j, b.shape[0] - 1)
        right = as_lanes(b.load(row, 0, width=t.step, mask=mask), t.lane)
        for i in k.static_range(rows):
            sums[i, j] = multiply_add(sums[i, j], left[i], right)


@k.inline
def dot_rows(
    c: Matrix, a: k.View, b: k.View, rows: int, t: Tiling, unroll: int = 1, rows_at_once: int = 4
) -> None:
    """Computes dot products of rows of A and four rows of B, contiguous along k: `c[i, j] = a[i] · b[j]`.

    Register budget: rows × `rows_at_once` accumulators (twice that with `unroll` 2), `rows` vectors of A and two of B.

    Args:
        c: The sums, four a row.
        a: `[rows, k]`.
        b: `[rows, k]`; rows past the last one read the last one.
        rows: Rows of A per pass.
        t: The tiling.
        unroll: Steps in k per iteration, each with accumulators of its own: 2 hides the latency of a single row.
        rows_at_once: Rows of B per loop over k.
    """
    size = a.shape[1]
    sums = k.tile(t.sums, (rows, 4), width=t.width, fill=0)
    # unused where `unroll` is 1
    second_sums = k.tile(t.sums, (rows, 4), width=t.width, fill=0)
    # the loop has no mask; the rest follows with one
    aligned_size = size - size % (t.step * unroll)
    for first in k.static_range(0, 4, rows_at_once):
        for n in range(0, aligned_size, t.step * unroll):
            dot_step(sums, a[:, n:], b[:, n:], None, rows, t, first, rows_at_once)
            if unroll == 2:
                second = n + t.step
                dot_step(
                    second_sums, a[:, second:], b[:, second:], None, rows, t, first, rows_at_once
                )
        for n, mask in k.vectors(aligned_size, size, t.step):
            dot_step(sums, a[:, n:], b[:, n:], mask, rows, t, first, rows_at_once)
    if unroll == 2:
        for i in k.static_range(rows):
            for j in k.static_range(4):
                sums[i, j] = sums[i, j] + second_sums[i, j]
    store_lane_sums(c, sums, rows, t)


@k.inline
def store_lane_sums(c: Matrix, sums: k.View, rows: int, t: Tiling) -> None:
    """Adds up the lanes of `rows` × 4 accumulators, and stores the sums, four a row."""
    for i in k.static_range(rows):
        # `lane_sums` shuffles lanes of 32 bits
        if t.sums.bits == 32 and t.width >= 4:
            four = lane_sums(sums[i, 0], sums[i, 1], sums[i, 2], sums[i, 3], t.width)
            c.elements.store(i * c.row, value=four)
        else:
            for j in k.static_range(4):
                c.elements[i * c.row + j] = k.reduce_add(sums[i, j])


@k.inline
def dot_rows_in_order(c: Matrix, a: k.View, b: k.View, rows: int, t: Tiling) -> None:
    """`dot_rows` for B in memory: rows of B are read one by one, as a single stream for the hardware prefetcher.

    Four rows at once are four streams within a few pages, which the prefetcher does not follow.

    Register budget: rows × 4 accumulators for one row of B, in steps of four vectors; then rows × 4 sums.

    Args:
        c: The sums, four a row.
        a: `[rows, k]`.
        b: `[rows, k]`; rows past the last one read the last one.
        rows: Rows of A per pass.
        t: The tiling.
    """
    size = a.shape[1]
    sums = k.tile(t.sums, (rows, 4), width=t.width, fill=0)
    aligned_size = size - size % (4 * t.step)
    for j in k.static_range(4):
        row = b[k.min(j, b.shape[0] - 1)]
        parts = k.tile(t.sums, (rows, 4), width=t.width, fill=0)
        for n in range(0, aligned_size, 4 * t.step):
            for part in k.static_range(4):
                right = as_lanes(row.load(n + part * t.step, width=t.step), t.lane)
                for i in k.static_range(rows):
                    left = as_lanes(a.load(i, n + part * t.step, width=t.step), t.lane)
                    parts[i, part] = multiply_add(parts[i, part], left, right)
        for n, mask in k.vectors(aligned_size, size, t.step):
            right = as_lanes(row.load(n, width=t.step, mask=mask), t.lane)
            for i in k.static_range(rows):
                left = as_lanes(a.load(i, n, width=t.step, mask=mask), t.lane)
                parts[i, 0] = multiply_add(parts[i, 0], left, right)
        for i in k.static_range(rows):
            sums[i, j] = (parts[i, 0] + parts[i, 1]) + (parts[i, 2] + parts[i, 3])
    store_lane_sums(c, sums, rows, t)


@k.inline
def column_step(
    sums: k.View,
    a: k.View,
    b: k.View,
    n: k.Integer,
    masked: bool,
    rows: int,
    width: int,
    vectors: int,
) -> None:
    """Adds the products of column `n` of A with the vectors of row `n` of B."""
    for j in k.static_range(vectors):
        # loads behind the last column are masked: the row may end there
        mask = k.iota(k.i64, width) + j * width < b.shape[1] if masked else None
        right = k.cast(b.load(n, j * width, width=width, mask=mask), sums.dtype)
        for i in k.static_range(rows):
            left = k.splat(k.cast(a[i, n], sums.dtype), width)
            sums[i, j] = multiply_add(sums[i, j], left, right)


@k.inline
def multiply_columns(
    c: Matrix, a: k.View, b: k.View, rows: int, width: int, accumulate: bool = False, ahead: k.View | None = None,
    vectors: int = 4,
) -> None:  # fmt: skip
    """Multiplies rows of A by up to four vectors of columns of B, read in place.

    Register budget: rows × `vectors` accumulators, `rows` broadcast elements of A and two vectors of B.

    Args:
        c: The sums, `vectors` vectors wide; set, or added to where `accumulate`.
        a: `[rows, k]`.
        b: `[k, columns]`; the sums of columns past the last one are 0.
        rows: Rows of A per pass.
        width: Lanes of a vector.
        accumulate: Whether sums are added to.
        ahead: Rows that are prefetched into the L2 cache, one for each row of B; None: none are.
        vectors: Vectors of columns.
    """
    sums = k.tile(c.elements.dtype, (rows, vectors), width=width, fill=0)
    if accumulate:
        load_sums(sums, c, rows, vectors, width)
    # whole strips have no masks in their loop
    if b.shape[1] >= vectors * width:
        for n in range(b.shape[0]):
            if ahead is not None:
                if n < ahead.shape[0]:
                    for column in k.static_range(0, ahead.shape[1], CACHE_LINE // ahead.dtype.size):
                        ahead.prefetch(n, column, locality=L2)
            column_step(sums, a, b, n, False, rows, width, vectors)
    else:
        for n in range(b.shape[0]):
            column_step(sums, a, b, n, True, rows, width, vectors)
    store_sums(c, sums, rows, vectors, width)


@k.inline
def add_row_products(
    c: Matrix, a: k.View, b: k.View, rows: int, depth: int, gap: k.Value, width: int
) -> None:
    """Adds the products of rows of A with `depth` rows of B, `gap` rows apart.

    The caller takes the rows in order, so that each of the `depth` rows is a stream for the hardware prefetcher. The
    sums stay in the L1 cache.

    Register budget: rows × `depth` broadcast elements of A, `rows` accumulators and one vector of B.

    Args:
        c: The sums, each row up to a whole vector.
        a: `[rows, k]`, from the first of the rows of B on.
        b: `[k, columns]`, from the first of the rows on.
        rows: Rows of A per pass.
        depth: Rows of B per pass over the sums.
        gap: Distance between these rows, in rows.
        width: Lanes of a vector.
    """
    sums_dtype = c.elements.dtype
    # broadcast once for the whole run
    left = k.tile(sums_dtype, (rows, depth), width=width)
    for i in k.static_range(rows):
        for n in k.static_range(depth):
            left[i, n] = k.splat(k.cast(a[i, n * gap], sums_dtype), width)
    for j, mask in k.vectors(b.shape[1], width):
        sums = k.tile(sums_dtype, (rows,), width=width)
        for i in k.static_range(rows):
            sums[i] = c.elements.load(i * c.row + j, width=width)
        for n in k.static_range(depth):
            right = k.cast(b.load(n * gap, j, width=width, mask=mask), sums_dtype)
            for i in k.static_range(rows):
                sums[i] = multiply_add(sums[i], left[i, n], right)
        for i in k.static_range(rows):
            c.elements.store(i * c.row + j, value=sums[i])
