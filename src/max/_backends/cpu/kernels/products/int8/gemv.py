"""GEMV with packed 8-bit integer weights, and the four-byte products that all paths without AMX share.

A panel is read once, line by line, for all rows of a pass; memory bandwidth limits the speed. If magnitudes are
multiplied (AVX2), -128 has no 8-bit magnitude: the pass uses -127 for it, and a second pass, which most inputs do not
need, adds the missing -1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from max import kernel as k
from max._backends.cpu.kernels.products.dense.panels import COPY_STRIDE
from max._backends.cpu.kernels.products.int8.panels import FOUR
from max._backends.cpu.kernels.products.streams import BYTES, prefetch_stream
from max._backends.cpu.kernels.tiles.micro_kernels import store_sums
from max._backends.cpu.kernels.tiles.strips import COLUMNS
from max._backends.cpu.kernels.tiles.tiling import Matrix, Tiling


class Int8Rows(NamedTuple):
    """Rows of A and the corrections of their sums.

    Args:
        elements: Lanes of four bytes, flat, from the first row and lane on.
        stride: The distance between rows in lanes.
        count: The number of rows; tiles beyond the end read the last row again (those results are discarded).
        zero_sums: -128 times the sum of each row; see `sum_rows`.
        has_lowest: 1 if an element is -128, which has no 8-bit magnitude; see `sum_rows`.
        magnitude: Whether magnitudes are multiplied; see `by_magnitude`.
    """

    elements: Any
    stride: Any
    count: Any
    zero_sums: Any
    has_lowest: Any
    magnitude: bool


@k.inline
def add_four_products(
    acc: k.SIMD, elements: k.Integer, word: k.Value, second: bool, magnitude: bool
) -> Any:
    """Adds four products per column.

    Args:
        acc: The sums of some columns.
        elements: Four elements of each column.
        word: Four elements of a row of A.
        second: With magnitudes, whether this is the second pass, which multiplies by -1 if x is -128, else by 0; the
            first pass uses -127.
        magnitude: Whether magnitudes are multiplied.
    """
    x = k.bitcast(k.splat(word, acc.width), k.i8)
    if magnitude:
        x = k.select(x == -128, k.i8(-1), k.i8(0)) if second else k.max(x, k.i8(-127))
        # `^ 128` subtracts the 128 that packing added
        return k.dot_i8(acc, k.bitcast(elements ^ 128, k.i8), x, narrow=True)
    if k.target().signed_bytes:
        return k.dot_i8(acc, k.bitcast(elements ^ 128, k.i8), x)
    # unsigned elements: 128 too large, which the zero sums correct
    return k.dot_i8(acc, elements, x)


@k.inline
def sum_rows(rows: Int8Rows, depth: k.Integer, width: int, copy: k.View | None = None) -> Any:
    """Writes the zero sums of rows: -128 times the sum of each, or 0 if signed bytes are multiplied.

    Args:
        rows: The rows; with magnitudes, their zero sums are not written.
        depth: The number of lanes in k.
        width: The vector width in lanes.
        copy: Receives a copy of the rows as lanes, `COPY_STRIDE` per row; None: no copy.

    Returns:
        With magnitudes, 1 if a row contains -128, else 0.
    """
    has_lowest = k.i64(0)
    for r in range(rows.count):
        total = k.splat(k.i32(0), width)
        for n, mask in k.vectors(depth, width):
            lanes = rows.elements.load(r * rows.stride + n, width=width, mask=mask)
            if copy is not None:
                copy.store(r * COPY_STRIDE + n, value=lanes, mask=mask)
            x = k.bitcast(lanes, k.i8)
            if rows.magnitude:
                if k.any(x == -128):
                    has_lowest = k.i64(1)
            elif not k.target().signed_bytes:
                # products with 1 add four bytes a lane
                total = k.dot_i8(total, k.splat(k.u8(1), FOUR * width), x)
        if not rows.magnitude:
            rows.zero_sums[r] = k.reduce_add(total) * -128
    return has_lowest


@k.inline
def gemv_int8(
    c: k.View,
    a: Int8Rows,
    panel: k.View,
    depth: k.Integer,
    first: k.Integer,
    rows: int,
    vectors: int,
    t: Tiling,
) -> None:
    """Multiplies `rows` rows by some vectors of columns of a panel.

    Register budget: rows × vectors accumulators (16 at most), a vector of elements and a broadcast word.

    Args:
        c: The sums, `COLUMNS` per row.
        a: The rows.
        panel: The panel's bytes.
        depth: The number of lanes in k.
        first: The first column.
        rows: The number of rows per pass.
        vectors: The number of vectors of columns.
        t: The tiling.
    """
    sums = k.tile(k.i32, (rows, vectors), width=t.width, fill=0)
    row_numbers = [k.min(k.i64(r), a.count - 1) for r in k.static_range(rows)]
    # sums begin with the correction, so that no pass over them follows
    if not a.magnitude:
        for i in k.static_range(rows):
            for j in k.static_range(vectors):
                sums[i, j] = k.splat(a.zero_sums[row_numbers[i]], t.width)
    for second in k.unroll((False, True) if a.magnitude else (False,)):
        # always in the first pass, in the second if an element is -128
        if a.has_lowest >= k.i64(second):
            for n in range(depth):
                line = panel[FOUR * (n * COLUMNS + first) :]
                prefetch_stream(line, FOUR * vectors * t.width, rows, BYTES)
                for v in k.static_range(vectors):
                    column = n * COLUMNS + first + v * t.width
                    elements = panel.load(FOUR * column, width=FOUR * t.width)
                    for r in k.static_range(rows):
                        word = a.elements[row_numbers[r] * a.stride + n]
                        sums[r, v] = add_four_products(
                            sums[r, v], elements, word, second, a.magnitude
                        )
    store_sums(Matrix(c[first:], COLUMNS), sums, rows, vectors, t.width)
