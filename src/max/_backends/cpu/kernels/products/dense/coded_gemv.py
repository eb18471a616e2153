"""The GEMV path of coded dense weights (`kernels.products.dense.coded`): panels are decoded in registers.

The sums are added in the order of `kernels.products.dense.packed_matmul`, so that results are equal to the last bit.
The loop runs from escape to escape without tests; a unit with escapes is decoded to memory, where their upper bytes
are written.

Register budget with 32 registers: 8 × 2 accumulators, two vectors of bytes, two of pairs, the table and a broadcast
element of A.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from max import kernel as k
from max._backends.cpu.kernels.products.blocking import LANES_K, STEP, cut_depth
from max._backends.cpu.kernels.products.dense.coded import (
    UNIT_BYTES,
    UNIT_DEPTH,
    UNIT_PLACES,
    CodedPanel,
    decode_step,
    decode_units,
    escapes_of,
    first_escape,
)
from max._backends.cpu.kernels.products.dense.panels import (
    GemvRows,
    gemv_passes,
    widened_pairs,
)
from max._backends.cpu.kernels.products.streams import CODED, prefetch_stream
from max._backends.cpu.kernels.tiles.micro_kernels import add_sums, store_sums
from max._backends.cpu.kernels.tiles.strips import COLUMNS
from max._backends.cpu.kernels.tiles.tiling import Matrix, Tiling, multiply_add


class Sums(NamedTuple):
    """The accumulators of a pass.

    Args:
        tile: The accumulators, `[rows, vectors]`.
        rows: The number of rows.
        vectors: The number of vectors of columns.
        first: The first column.
    """

    tile: Any
    rows: int
    vectors: int
    first: Any


@k.inline
def add_coded_unit(
    s: Sums, a: GemvRows, begins: Any, panel: CodedPanel, unit_index: k.Value, t: Tiling
) -> None:
    """Adds the products of a unit without escapes."""
    unit = panel.bytes[unit_index * UNIT_BYTES :]
    # two bf16 of a row as one word: a single broadcast for both
    words = a.elements.view(k.i32) if t.pair == 2 else a.elements
    sums, rows, vectors, first = s
    prefetch_stream(unit, UNIT_BYTES, rows, CODED)
    for step in k.static_range(2):
        n = 2 * unit_index + step  # the word of the row
        for v in k.static_range(0, vectors, 2):
            column = first + v * t.width
            both = decode_step(unit, panel.table, step, column, t)
            for i in k.static_range(2):
                if t.pair == 2:
                    for r in k.static_range(rows):
                        left = k.splat(words[begins[r] + n], t.width)
                        sums[r, v + i] = multiply_add(sums[r, v + i], left, both[i])
                else:
                    wide = widened_pairs(both[i], k.bf16)
                    for r in k.static_range(rows):
                        for j in k.static_range(2):
                            # a broadcast load of f32
                            left = k.splat(k.f32(a.elements[begins[r] + 2 * n + j]), t.width)
                            sums[r, v + i] = k.fma(left, wide[j], sums[r, v + i])


@k.inline
def add_decoded(
    s: Sums, a: GemvRows, begins: Any, unit: k.View, unit_index: k.Value, t: Tiling
) -> None:
    """Adds the products of a decoded unit."""
    words = a.elements.view(k.i32) if t.pair == 2 else a.elements
    sums, rows, vectors, first = s
    lanes = UNIT_DEPTH // t.pair
    for n in range(lanes):
        for v in k.static_range(vectors):
            right = unit.load(n * COLUMNS + first + v * t.width, width=t.width)
            for r in k.static_range(rows):
                element = words[begins[r] + unit_index * lanes + n]
                left = k.splat(element if t.pair == 2 else k.f32(element), t.width)
                sums[r, v] = multiply_add(sums[r, v], left, right)


@k.inline
def add_coded_units(
    s: Sums,
    a: GemvRows,
    panel: CodedPanel,
    begin: k.Integer,
    end: k.Integer,
    memory: k.View,
    t: Tiling,
) -> None:
    """Adds the products of units `[begin, end)` of a panel; see `gemv_coded`."""
    begins = [k.min(k.i64(r), a.count - 1) * (a.size // t.pair) for r in k.static_range(s.rows)]
    escapes = escapes_of(panel)
    escape = k.i64(0)
    if panel.escapes > 0:
        escape = first_escape(escapes, panel.escapes, begin * UNIT_PLACES)
    number = begin
    while number < end:
        stop = end
        # up to the unit with the next escape no unit is tested
        if escape < panel.escapes:
            stop = k.min(end, k.i64(escapes[escape] >> 8) // UNIT_PLACES)
        for plain in range(number, stop):
            add_coded_unit(s, a, begins, panel, plain, t)
        number = stop
        if number < end:
            decode_units(memory, panel, number * UNIT_DEPTH, UNIT_DEPTH, t)
            add_decoded(s, a, begins, memory, number, t)
            number += 1
            # a unit may have several escapes
            while escape < panel.escapes and k.i64(escapes[escape] >> 8) < number * UNIT_PLACES:
                k.brief()
                escape += 1


@k.inline
def gemv_columns(
    c: Any, a: GemvRows, panel: CodedPanel, first: Any, rows: int, vectors: int,
    memory: k.View, t: Tiling,
) -> None:  # fmt: skip
    """Multiplies `rows` rows of A by some vectors of columns of a panel; see `packed_matmul.gemv_panel`."""
    target = Matrix(c, COLUMNS)
    # sums of each K block begin at 0, as on the GEMM path: see `Tiling.folds`
    if t.folds:
        cut = cut_depth(a.size, LANES_K * t.pair, STEP)
        for number in range(cut[0]):
            sums = k.tile(k.f32, (rows, vectors), width=t.width, fill=0.0)
            begin = number * cut[1] // UNIT_DEPTH
            end = k.min((number + 1) * cut[1], a.size) // UNIT_DEPTH
            s = Sums(sums, rows, vectors, first)
            add_coded_units(s, a, panel, begin, end, memory, t)
            if number > 0:
                add_sums(sums, target, rows, vectors, t.width)
            store_sums(target, sums, rows, vectors, t.width)
    else:
        sums = k.tile(k.f32, (rows, vectors), width=t.width, fill=0.0)
        s = Sums(sums, rows, vectors, first)
        add_coded_units(s, a, panel, k.i64(0), a.size // UNIT_DEPTH, memory, t)
        store_sums(target, sums, rows, vectors, t.width)


@k.outlined
def gemv_coded(c: k.View, a: k.View, panel: CodedPanel, memory: k.View, t: Tiling) -> None:
    """Multiplies all rows of `a` `[M, K]`, in passes, by a coded panel; `c` holds the sums, `COLUMNS` per row.

    Args:
        c: The sums.
        a: The rows.
        panel: The panel.
        memory: Memory of a decoded unit.
        t: The tiling.
    """
    rows, size = a.shape[0], a.shape[1]
    i = k.i64(0)
    flat = a.reshape(rows * size)
    while i < rows:
        remaining = rows - i
        done = k.i64(0)
        for count, fewer in k.unroll(gemv_passes(k.target())):
            if done == 0 and remaining > fewer:
                # more than two rows leave registers for the sums of two vectors each
                vectors = COLUMNS // t.width if count <= 2 else 2
                for first in range(0, COLUMNS, vectors * t.width):
                    pass_rows = GemvRows(flat[i * size :], size, remaining)
                    sums = c[i * COLUMNS + first :]
                    gemv_columns(sums, pass_rows, panel, first, count, vectors, memory, t)
                done = k.min(remaining, count)
        i += done
