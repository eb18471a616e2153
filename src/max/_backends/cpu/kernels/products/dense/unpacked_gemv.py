"""The GEMV path of products with an unpacked B: few rows of A by all of B, read in place, and its pieces along k.

The sums of each piece begin at 0 and are then added to those of the earlier ones, so that the error does not grow with
K, but with the number of pieces::

    K    ├── piece 0 ──┼── piece 1 ──┼── piece 2 ─┤
    c  =    sums      +    sums      +    sums

Register budget: see `dot_rows`, `dot_rows_in_order` and `add_row_products` in
`kernels.tiles.micro_kernels`. Cache budget: the sums of a task and of a piece stay in the L2 cache.
"""

from __future__ import annotations

from typing import Any

from max import kernel as k
from max._backends.cpu.kernels.tiles.micro_kernels import (
    add_row_products,
    dot_rows,
    dot_rows_in_order,
)
from max._backends.cpu.kernels.tiles.tiling import Matrix, Tiling

STREAMS = 4
"""Rows of B `[K, N]` that the GEMV path adds at once; each is a stream for the prefetcher."""
DOT_PIECE, RUN_PIECE = 16384, 1024
"""The elements along k of a piece of dot products, which have at least 8 lanes, and of sums of rows of B: if K, or a
slice, is larger than `FOLDED_SIZE`, and a dot product than its piece, each piece has sums of its own."""
CACHED = 4096
"""The maximum number of elements of A that stay in the L1 cache while B streams through it."""


@k.inline
def multiply_rows_of_b(c: Matrix, a: k.View, b: k.View, columns: k.Integer, t: Tiling) -> None:
    """Multiplies all rows of A by a block of rows of B `[N, K]`, read in place.

    Args:
        c: The sums.
        a: `[rows, K]`.
        b: `[columns, K]`, starting at the block's first row.
        columns: The number of rows of the block.
        t: The tiling.
    """
    rows, height = a.shape[0], t.gemv_rows
    # where all rows of a pass of A stay in the L1 cache, they share the first read of B
    together = height <= rows and height * a.shape[1] <= CACHED
    for j in range(0, columns, 4):
        i = k.i64(0)
        # the first pass reads B from memory, later passes from the cache
        for first in k.static_range(1, height + 1, height - 1):
            if (first == height) == together:
                dot_rows_in_order(Matrix(c.elements[j:], c.row), a, b[j:], first, t)
                i += first
        while i + height <= rows:
            dot_rows(Matrix(c.elements[i * c.row + j :], c.row), a[i:], b[j:], height, t)
            i += height
        while i < rows:
            dot_rows(Matrix(c.elements[i * c.row + j :], c.row), a[i:], b[j:], 1, t, unroll=2)
            i += 1


@k.inline
def multiply_runs(c: Matrix, a: k.View, b: k.View, t: Tiling) -> None:
    """Multiplies all rows of A by a block of columns of B `[K, N]`, whose rows are long runs, read in place.

    Args:
        c: The sums; each row is padded to a whole vector.
        a: `[rows, K]`.
        b: `[K, columns]`.
        t: The tiling.
    """
    rows, size = a.shape[0], b.shape[0]
    zero = k.splat(k.cast(0, t.sums), t.width)
    for i in range(rows):
        for j in range(0, b.shape[1], t.width):
            c.elements.store(i * c.row + j, value=zero)
    # the streams are rows `n`, `n + gap`, `n + 2 gap` and `n + 3 gap` of B
    gap = size // STREAMS
    for n in range(gap):
        add_run(c, a[:, n:], b[n:], STREAMS, gap, t)
    # rows that are left if K is no multiple of the streams
    for n in range(gap * STREAMS, size):
        add_run(c, a[:, n:], b[n:], 1, gap, t)


@k.inline
def add_run(c: Matrix, a: k.View, b: k.View, depth: int, gap: k.Value, t: Tiling) -> None:
    """Adds the products of all rows of A with `depth` rows of B; see `add_row_products`."""
    rows, height = a.shape[0], t.gemv_rows
    i = k.i64(0)
    while i + height <= rows:
        sums = Matrix(c.elements[i * c.row :], c.row)
        add_row_products(sums, a[i:], b, height, depth, gap, t.width)
        i += height
    while i < rows:
        sums = Matrix(c.elements[i * c.row :], c.row)
        add_row_products(sums, a[i:], b, 1, depth, gap, t.width)
        i += 1


@k.inline
def add_to(c: Matrix, part: Matrix, rows: k.Integer, columns: k.Integer, t: Tiling) -> None:
    """Adds the sums of a piece to `c`; both have rows of whole vectors."""
    for i in range(rows):
        for j in range(0, columns, t.width):
            total = c.elements.load(i * c.row + j, width=t.width)
            piece = part.elements.load(i * part.row + j, width=t.width)
            c.elements.store(i * c.row + j, value=total + piece)


@k.outlined
def multiply_long_rows_of_b(
    c: Any, row: Any, a: k.View, b: k.View, columns: k.Integer, part: Any, t: Tiling
) -> None:
    """`multiply_rows_of_b` in pieces along k.

    Args:
        c: The elements of the sums.
        row: The distance between rows of sums.
        a: `[rows, K]`.
        b: `[columns, K]`, starting at the block's first row.
        columns: The number of rows of the block.
        part: Memory for the sums of a piece, in rows like those of `c`.
        t: The tiling.
    """
    rows, size = a.shape[0], a.shape[1]
    sums = Matrix(part, row)
    for n in range(k.ceildiv(size, DOT_PIECE)):
        begin = n * DOT_PIECE
        end = k.min(begin + DOT_PIECE, size)
        multiply_rows_of_b(sums, a[:, begin:end], b[:, begin:end], columns, t)
        if n == 0:
            copy_sums(Matrix(c, row), sums, rows, columns, t)
        else:
            add_to(Matrix(c, row), sums, rows, columns, t)


@k.outlined
def multiply_long_runs(
    c: k.View, row: Any, a: k.View, b: k.View, part: Any, room: k.Value, t: Tiling
) -> None:
    """`multiply_runs` in pieces along k.

    Args:
        c: The elements of the sums; each row is padded to a whole vector.
        row: The distance between rows of sums.
        a: `[rows, K]`.
        b: `[K, columns]`.
        part: Memory for the sums of a piece.
        room: The number of elements of this memory, at least a vector for each row.
        t: The tiling.
    """
    rows, size, columns = a.shape[0], b.shape[0], b.shape[1]
    # whole vectors; no row of a piece is larger than this
    width = k.max(room // k.max(rows, 1) // t.width * t.width, t.width)
    for n in range(k.ceildiv(size, RUN_PIECE)):
        begin = n * RUN_PIECE
        end = k.min(begin + RUN_PIECE, size)
        for number in range(k.ceildiv(columns, width)):
            column = number * width
            last = k.min(column + width, columns)
            sums = Matrix(part, width)
            multiply_runs(sums, a[:, begin:end], b[begin:end, column:last], t)
            if n == 0:
                copy_sums(Matrix(c[column:], row), sums, rows, last - column, t)
            else:
                add_to(Matrix(c[column:], row), sums, rows, last - column, t)


@k.inline
def copy_sums(c: Matrix, part: Matrix, rows: k.Integer, columns: k.Integer, t: Tiling) -> None:
    """Copies sums; both have rows of whole vectors."""
    for i in range(rows):
        for j in range(0, columns, t.width):
            piece = part.elements.load(i * part.row + j, width=t.width)
            c.elements.store(i * c.row + j, value=piece)
