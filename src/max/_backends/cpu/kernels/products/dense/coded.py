"""Lossless coding of packed dense weights: a bf16, or an f32 whose lower half is zero, in 12 bits.

The upper byte of a bf16 (its sign and seven bits of its exponent) has few different values: sixteen of them cover more
than 99.9 % of the weights of a trained model. A coded panel has a table of its sixteen most frequent upper bytes, the
lower bytes as they are, an index into the table for each weight, and a list of the weights whose upper byte is not in
the table, in ascending order of their place::

    panel   │ unit 0 │ unit 1 │ … │ escapes, 4 bytes each │
    unit    │ step 0: 64 lower bytes │ step 1: 64 lower bytes │ 64 indices │
    escape  │ upper byte: 8 bits │ place in the panel: 24 bits │

A step is two rows of k by 32 columns, the pairs of `kernels.products.dense.panels`; a unit is two steps. A byte of
indices has that of step 0 in its lower and that of step 1 in its upper half. Lower bytes and indices are in the order
in which interleaving the bytes of a vector within its 128-bit parts, one instruction for each half, gives vectors of
pairs.

An f32 is coded if the lower halves of its panel are all zero, as in checkpoints that were bf16 once; its upper half is
a bf16. Targets whose lookups take too long store the upper halves instead, a panel of bf16 ("halved"). A panel that
coding would not make smaller, or with too many escapes, is stored as it is.

The buffer begins with a directory: for each panel its place in bytes, its form with the number of its escapes, and its
table. Panels follow each other without gaps, so that memory behind the last one is never touched.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from max import kernel as k
from max._backends.cpu.kernels.products.blocking import STEP
from max._backends.cpu.kernels.products.dense.panels import widened_pairs
from max._backends.cpu.kernels.tiles.strips import CACHE_LINE, COLUMNS
from max._backends.cpu.kernels.tiles.tiling import Tiling, round_up
from max.dtype import DType

PLAIN, CODED, HALVED = 0, 1, 2
"""The forms of panels: as they are, coded, and upper halves of f32."""


class Coding(NamedTuple):
    """What kernels know of coded weights at compile time.

    Args:
        dtype: The element type of the weights.
        form: The form of the panels that are not plain, `CODED` or `HALVED`.
    """

    dtype: k.ScalarType
    form: int


ENCODINGS: Mapping[str, Coding] = {
    "coded bfloat16": Coding(k.bf16, CODED),
    "coded float32": Coding(k.f32, CODED),
    "halved float32": Coding(k.f32, HALVED),
}
"""The encodings of coded weights."""
UNIT_DEPTH = 4
"""Rows of k in a unit."""
STEP_BYTES = 2 * COLUMNS
"""The lower bytes of a step."""
UNIT_BYTES = 3 * STEP_BYTES
"""The bytes of a unit."""
UNIT_PLACES = 2 * STEP_BYTES
"""The weights of a unit."""
TABLE = 16
"""The number of upper bytes in a table."""
ENTRY = 4
"""The 64-bit words of a panel in the directory: its place, form and escapes, and its table."""
ESCAPE_STEPS = 8
"""A panel is coded if it has at most one escape for this many steps, as a unit with escapes takes longer."""
MAX_INNER = (1 << 24) // COLUMNS - UNIT_DEPTH
"""The greatest K: the place of an escape has 24 bits."""


def can_code(inner: int) -> bool:
    """Whether panels of K rows can be coded: without padding along k, and with places of 24 bits."""
    return inner % STEP == 0 and inner <= MAX_INNER


def coded_bytes(elements: int, dtype: DType) -> int:
    """The most bytes of a panel of some elements and of its entry in the directory."""
    return elements * dtype.size_in_bytes + CACHE_LINE


class CodedPanels(NamedTuple):
    """Coded panels.

    Args:
        memory: The buffer, flat bytes.
        first: The index of the first panel.
        count: The number of panels.
        dtype: The element type of the weights.
        coding: The coding of panels that are not plain.
    """

    memory: Any
    first: Any
    count: Any
    dtype: Any
    coding: int


class CodedPanel(NamedTuple):
    """One panel.

    Args:
        form: `PLAIN`, `CODED` or `HALVED`.
        table: The table.
        bytes: The bytes of the units, or of the weights of a plain panel.
        escapes: The number of escapes.
        depth: The number of rows of k.
        dtype: The element type of the weights.
        coding: The form of panels that are not plain.
    """

    form: Any
    table: Any
    bytes: Any
    escapes: Any
    depth: Any
    dtype: Any
    coding: int


@k.inline
def coded_panel(panels: CodedPanels, strip: k.Value, depth: Any) -> CodedPanel:
    """The panel of a strip."""
    # place, form + 4 * escapes, and 16 bytes of table
    entry = panels.memory.view(k.i64)[ENTRY * (panels.first + strip) :]
    memory = panels.memory[entry[0] :]
    form, escapes = entry[1] % 4, entry[1] // 4
    return CodedPanel(form, table_of(entry), memory, escapes, depth, panels.dtype, panels.coding)


@k.inline
def panel_weights(panel: CodedPanel, halved: bool) -> Any:
    """The weights of a plain panel, or the upper halves of a halved one, flat."""
    dtype = k.bf16 if halved else panel.dtype
    return panel.bytes[: panel.depth * COLUMNS * dtype.size].view(dtype)


@k.inline
def bytes_from(panel: CodedPanel, row: k.Value) -> Any:
    """The bytes of a panel from a row of k on."""
    size = k.i64(UNIT_DEPTH * COLUMNS * panel.dtype.size)
    if panel.form != PLAIN:
        size = k.i64(UNIT_BYTES if panel.coding == CODED else UNIT_DEPTH * COLUMNS * 2)
    return panel.bytes[row // UNIT_DEPTH * size :]


@k.inline
def escapes_of(panel: CodedPanel) -> Any:
    """The list of escapes, 32-bit words."""
    return panel.bytes[panel.depth // UNIT_DEPTH * UNIT_BYTES :].view(k.u32)


@k.inline
def table_of(entry: k.View) -> Any:
    """The table of an entry of the directory, as a vector of bytes."""
    return k.bitcast(entry.load(2, width=2), k.u8)


def _interleave_lanes(high: bool, size: int) -> tuple[int, ...]:
    """The lanes that interleave the lower or higher halves of each 16 bytes of two vectors of `size` bytes."""
    starts = range(8 if high else 0, size, 16)
    return tuple(lane for s in starts for i in range(8) for lane in (s + i, size + s + i))


def separate_lanes(odd: int, size: int) -> tuple[int, ...]:
    """The inverse: the even or odd bytes of two vectors, by 8 of each in turn."""
    return tuple(
        lane
        for s in range(0, size, 16)
        for v in (0, size)
        for lane in range(v + s + odd, v + s + 16, 2)
    )


@k.inline
def decode_step(unit: k.View, table: k.Value, step: int, first: int, t: Tiling) -> Any:
    """Two vectors of pairs of a step, from column `first` on: the upper halves."""
    size = 4 * t.width
    low = unit.load(step * STEP_BYTES + 2 * first, width=size)
    # both steps of a unit share these bytes, half a byte each
    index = unit.load(2 * STEP_BYTES + 2 * first, width=size)
    if step == 1:
        # a lookup takes four bits, so that bits of neighbors do no harm
        index = k.bitcast(k.bitcast(index, k.u16) >> 4, k.u8)
    high = k.lookup(table, index)
    return (
        k.bitcast(k.shuffle(low, high, _interleave_lanes(False, size)), k.i32),
        k.bitcast(k.shuffle(low, high, _interleave_lanes(True, size)), k.i32),
    )


@k.inline
def first_escape(escapes: Any, count: Any, place: k.Value) -> Any:
    """The index of the first escape at a place or behind it."""
    low, high = k.i64(0), count
    while low < high:
        k.brief()
        middle = (low + high) // 2
        if k.i64(escapes[middle] >> 8) < place:
            low = middle + 1
        else:
            high = middle
    return low


@k.inline
def decode_rows(
    block: k.View, panel: CodedPanel, begin: k.Value, length: k.Value, t: Tiling
) -> None:
    """Decodes rows of k of a panel to the layout of the GEMM path.

    Args:
        block: The result: lanes of the tiling, `COLUMNS` for each lane in k.
        panel: The panel.
        begin: The first row, a multiple of `UNIT_DEPTH`.
        length: The number of rows, a multiple of `UNIT_DEPTH`.
        t: The tiling.
    """
    if panel.form == PLAIN:
        copy_block(block, panel, begin, length, False, t)
    elif panel.coding == HALVED:
        copy_block(block, panel, begin, length, True, t)
    else:
        decode_units(block, panel, begin, length, t)


@k.inline
def copy_block(
    block: k.View, panel: CodedPanel, begin: k.Value, length: k.Value, halved: bool, t: Tiling
) -> None:
    """`decode_rows` for a plain or a halved panel."""
    elements = panel_weights(panel, halved)
    if elements.dtype == k.f32:
        for i in range(0, length * COLUMNS, t.width):
            block.store(i, value=elements.load(begin * COLUMNS + i, width=t.width))
    else:
        # a word has two rows of k of a column
        pairs = elements.view(k.i32)[begin // 2 * COLUMNS :]
        for n in range(length // 2):
            for column in k.static_range(0, COLUMNS, t.width):
                store_pairs(block, n, column, pairs.load(n * COLUMNS + column, width=t.width), t)


@k.inline
def store_pairs(block: k.View, n: k.Value, column: int, pairs: k.Value, t: Tiling) -> None:
    """Stores a vector of pairs of bf16 of step `n`, widened if the target does not multiply pairs."""
    if t.pair == 2:
        block.store(n * COLUMNS + column, value=pairs)
    else:
        even, odd = widened_pairs(pairs, k.bf16)
        block.store(2 * n * COLUMNS + column, value=even)
        block.store((2 * n + 1) * COLUMNS + column, value=odd)


@k.inline
def decode_units(
    block: k.View, panel: CodedPanel, begin: k.Value, length: k.Value, t: Tiling
) -> None:
    """`decode_rows` for a coded panel."""
    units = panel.bytes[begin // UNIT_DEPTH * UNIT_BYTES :]
    for number in range(length // UNIT_DEPTH):
        unit = units[number * UNIT_BYTES :]
        for step in k.static_range(2):
            for first in k.static_range(0, COLUMNS, 2 * t.width):
                vectors = decode_step(unit, panel.table, step, first, t)
                for v in k.static_range(2):
                    store_pairs(block, 2 * number + step, first + v * t.width, vectors[v], t)
    patch(block, panel, begin, length, t)


@k.inline
def patch(block: k.View, panel: CodedPanel, begin: k.Value, length: k.Value, t: Tiling) -> None:
    """Writes the upper bytes of escapes to decoded rows of k."""
    if panel.escapes > 0:
        escapes = escapes_of(panel)
        i = first_escape(escapes, panel.escapes, begin * COLUMNS)
        end = (begin + length) * COLUMNS
        octets = block.view(k.u8)
        while i < panel.escapes and k.i64(escapes[i] >> 8) < end:
            k.brief()
            place = k.i64(escapes[i] >> 8) - begin * COLUMNS
            octets[upper_byte(place, t)] = k.u8(escapes[i] & 255)
            i += 1


@k.inline
def upper_byte(place: k.Value, t: Tiling) -> Any:
    """The byte of the decoded rows that holds the upper byte of the weight at a place in the panel."""
    if t.pair == 2:
        return 2 * place + 1  # the last byte of a bf16
    else:
        # [steps][2 * COLUMNS]: a column's pair; decoded, [steps][2][COLUMNS] of f32
        step, column, odd = place // STEP_BYTES, place % STEP_BYTES // 2, place % 2
        return 4 * ((2 * step + odd) * COLUMNS + column) + 3


@k.inline
def panel_size(form: k.Value, escapes: k.Value, depth: k.Value, dtype: k.View, coding: int) -> Any:
    """The bytes of a panel of a form, whole cache lines."""
    size = depth * COLUMNS * dtype.size
    if form != PLAIN:
        size = depth * COLUMNS * 2  # bf16
        if coding == CODED:
            size = round_up(depth // UNIT_DEPTH * UNIT_BYTES + 4 * escapes, CACHE_LINE)
    return size
