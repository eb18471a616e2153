"""Codes packed dense weights when a model is loaded; `kernels.products.dense.coded` has the layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from max import kernel as k
from max._backends.cpu.kernels.products.dense.coded import (
    CODED,
    ENCODINGS,
    ENTRY,
    ESCAPE_STEPS,
    PLAIN,
    STEP_BYTES,
    TABLE,
    UNIT_BYTES,
    UNIT_DEPTH,
    panel_size,
    separate_lanes,
)
from max._backends.cpu.kernels.products.dense.panels import storage
from max._backends.cpu.kernels.tiles.strips import CACHE_LINE, COLUMNS
from max._backends.cpu.kernels.tiles.tiling import Tiling, round_up
from max._backends.kernel_call import KernelCall, Operand, view


@k.inline
def upper_pairs(panel: k.View, n: k.Value, column: k.Value, width: int) -> Any:
    """A vector of pairs of a step of a plain panel: the upper halves."""
    if panel.dtype == k.f32:
        words = panel.view(k.u32)
        # f32 panels are [k][COLUMNS]: the two of a pair are in neighboring rows
        even = words.load(2 * n * COLUMNS + column, width=width)
        odd = words.load((2 * n + 1) * COLUMNS + column, width=width)
        return even >> 16 | (odd & 0xFFFF0000)
    else:
        return panel.view(k.u32).load(n * COLUMNS + column, width=width)


@k.inline
def count_bytes(counts: k.View, panel: k.View) -> None:
    """Counts the upper bytes of a panel."""
    size = panel.dtype.size
    for i in range(256):
        counts[i] = k.i64(0)
    octets = panel.view(k.u8)
    for i in range(panel.shape[0]):
        # little-endian: the upper byte is the last
        counts[k.i64(octets[i * size + size - 1])] += 1


@k.inline
def has_lower_halves(panel: k.View, width: int) -> Any:
    """Whether a lower half of f32 is not zero."""
    lows = k.splat(k.u32(0), width)
    if panel.dtype == k.f32:
        words = panel.view(k.u32)
        for i in range(0, panel.shape[0], width):
            lows = lows | (words.load(i, width=width) & 0xFFFF)
    return k.reduce_max(lows) > 0


@k.inline
def choose_table(table: k.View, counts: k.View) -> Any:
    """Writes the most frequent bytes to a table; returns how many bytes are not in it, and changes the counts."""
    for i in range(TABLE):
        best = k.i64(0)
        for byte in range(256):
            if counts[byte] > counts[best]:
                best = k.i64(byte)
        table[i] = k.u8(best)
        # neither chosen again nor counted below
        counts[best] = k.i64(-1)
    escapes = k.i64(0)
    for byte in range(256):
        escapes += k.max(counts[byte], 0)
    return escapes


@k.inline
def code_vectors(
    unit: k.View, panel: k.View, n: k.Value, first: int, step: int, table: Any, t: Tiling
) -> Any:
    """Codes two vectors of pairs; returns their indices, and whether all upper bytes are in the table."""
    octets = 4 * t.width
    a = k.bitcast(upper_pairs(panel, n, first, t.width), k.u8)
    b = k.bitcast(upper_pairs(panel, n, first + t.width, t.width), k.u8)
    unit.store(step * STEP_BYTES + 2 * first, value=k.shuffle(a, b, separate_lanes(0, octets)))
    upper = k.shuffle(a, b, separate_lanes(1, octets))
    index = k.splat(k.u8(0), octets)
    for i in k.static_range(1, TABLE):
        index = k.select(upper == table[i], k.splat(k.u8(i), octets), index)
    # a byte that is not in the table has index 0, which stands for another byte
    return index, k.all(k.lookup(table, index) == upper)


@k.inline
def code_panel(target: k.View, panel: k.View, table: k.View, t: Tiling) -> None:
    """Codes a plain panel with a table."""
    units = panel.shape[0] // (UNIT_DEPTH * COLUMNS)
    escapes = target[units * UNIT_BYTES :].view(k.u32)
    vector = k.bitcast(table.view(k.i64).load(0, width=2), k.u8)
    count = k.i64(0)
    for number in range(units):
        unit = target[number * UNIT_BYTES :]
        complete = k.bool(True)
        for first in k.static_range(0, COLUMNS, 2 * t.width):
            indices = k.splat(k.u8(0), 4 * t.width)
            for step in k.static_range(2):
                index, found = code_vectors(unit, panel, 2 * number + step, first, step, vector, t)
                indices = indices | index << (4 * step)
                complete = complete and found
            unit.store(2 * STEP_BYTES + 2 * first, value=indices)
        # a second look at each place of the few units with escapes
        if not complete:
            for place in range(number * 2 * STEP_BYTES, (number + 1) * 2 * STEP_BYTES):
                byte = upper_of(panel, place)
                if not in_table(table, byte):
                    escapes[count] = k.u32(place) << 8 | k.u32(byte)
                    count += 1


@k.inline
def halve_panel(target: k.View, panel: k.View, t: Tiling) -> None:
    """Stores the upper halves of a panel of f32."""
    pairs = target.view(k.u32)
    for n in range(panel.shape[0] // (2 * COLUMNS)):
        for column in k.static_range(0, COLUMNS, t.width):
            pairs.store(n * COLUMNS + column, value=upper_pairs(panel, n, column, t.width))


@k.inline
def upper_of(panel: k.View, place: k.Value) -> Any:
    """The upper byte of the weight at a place of a plain panel."""
    octets = panel.view(k.u8)
    if panel.dtype == k.f32:
        step, column, odd = place // STEP_BYTES, place % STEP_BYTES // 2, place % 2
        return octets[4 * ((2 * step + odd) * COLUMNS + column) + 3]
    else:
        return octets[2 * place + 1]


@k.inline
def in_table(table: Any, byte: k.Value) -> Any:
    """Whether a byte is in a table."""
    found = k.bool(False)
    for i in range(TABLE):
        found = found or table[i] == byte
    return found


@k.inline
def plan_panel(
    memory: k.View, strip: k.Value, panel: k.View, counts: k.View, form: int, width: int
) -> None:
    """Writes the form, the escapes and the table of a panel to its entry in the directory."""
    depth = panel.shape[0] // COLUMNS
    escapes, plain = k.i64(0), k.i64(0)
    if has_lower_halves(panel, width):
        plain = k.i64(1)
    elif form == CODED:
        count_bytes(counts, panel)
        escapes = choose_table(memory[8 * (ENTRY * strip + 2) :], counts)
        # a step has two rows of k
        if escapes * (2 * ESCAPE_STEPS) > depth or panel_size(
            k.i64(form), escapes, depth, panel.dtype, form
        ) >= panel_size(k.i64(PLAIN), escapes, depth, panel.dtype, form):
            plain = k.i64(1)
    entry = memory.view(k.i64)[ENTRY * strip :]
    entry[1] = k.i64(PLAIN) if plain > 0 else form + 4 * escapes


@k.kernel
def code_panels(out: k.Output, panels: k.Input, ctx: k.Context, *, form: int) -> None:
    """Codes the panels `[strips, elements]` into `out`, bytes; see `ENCODINGS` for the form."""
    t = storage(ctx.target, k.bf16)
    dtype = panels.dtype
    strips, depth = panels.shape[0], panels.shape[1] // COLUMNS
    memory = out.reshape(out.size)
    directory = memory.view(k.i64)
    counts = ctx.scratch(k.i64, (256,))
    for strip in ctx.parallel(strips):
        plan_panel(memory, strip, panels[strip], counts, form, t.width)
    ctx.barrier()
    # a place depends on the sizes of all panels before it
    if ctx.worker == 0:
        place = round_up(8 * ENTRY * strips, CACHE_LINE)
        for strip in range(strips):
            directory[ENTRY * strip] = place
            word = directory[ENTRY * strip + 1]
            place += panel_size(word % 4, word // 4, depth, dtype, form)
    ctx.barrier()
    for strip in ctx.parallel(strips):
        entry = directory[ENTRY * strip :]
        target = memory[entry[0] :]
        if entry[1] % 4 == PLAIN:
            copy = target.view(dtype)
            for i in range(0, panels.shape[1], t.width):
                copy.store(i, value=panels.load(strip, i, width=t.width))
        elif form == CODED:
            code_panel(target, panels[strip], memory[8 * (ENTRY * strip + 2) :], t)
        else:
            halve_panel(target, panels[strip], t)


def _lower_code(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    """The launch that codes packed panels."""
    args = (
        view("result", 0, results[0], static=False),
        view("operand", 0, operands[0], static=False),
    )
    return KernelCall(code_panels, args, {"form": ENCODINGS[attributes["encoding"]].form})


LOWERINGS = {"mok.code": _lower_code}
