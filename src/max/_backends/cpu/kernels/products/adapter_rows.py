"""The rows of a step, sorted by the slot of their adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from max import kernel as k
from max._backends.cpu.kernels.operand_checks import check_offsets, check_size
from max._backends.kernel_call import KernelCall, Operand, run_time_views


@k.kernel
def adapter_rows(
    order: k.Output,
    sorted_slots: k.Output,
    row_scales: k.Output,
    count: k.Output,
    slots: k.Input,
    scales: k.Input,
    input_row_offsets: k.Input,
    ctx: k.Context,
    *,
    max_slots: int,
) -> None:
    """Sorts the rows of sequences by the slot of their adapter; those without one (-1) come last.

    Row `order[p]` is at position `p`, and `sorted_slots[p]` is its slot. `row_scales[i]` is the scale of row `i`,
    `count` `[1]` the number of rows with an adapter. Sequence `b` has the rows `offsets[b]` to `offsets[b + 1]`.
    """
    places = ctx.scratch(k.i64, (max_slots + 1,))
    rows, batch = order.size, slots.size
    check_size("the sorted slots", sorted_slots.size, rows)
    check_size("the scales of rows", row_scales.size, rows)
    check_size("the count", count.size, 1)
    check_size("scales", scales.size, batch)
    check_size("offsets", input_row_offsets.size, batch + 1)
    check_offsets("offsets", input_row_offsets, rows, ctx.target.width(k.u32))
    for s in range(max_slots + 1):
        places[s] = 0
    for b in range(batch):
        slot = k.i64(slots[b])
        if slot < -1 or slot >= max_slots:
            raise IndexError("slots[{}] is {}; there are {}", b, slot, max_slots)
        size = k.i64(input_row_offsets[b + 1]) - k.i64(input_row_offsets[b])
        # rows without an adapter are in the last place
        places[max_slots if slot < 0 else slot] += size
    first = k.i64(0)
    for s in range(max_slots + 1):
        if s == max_slots:
            count[0] = first
        size = places[s]
        # from here on the next position of a row with this slot
        places[s] = first
        first += size
    for b in range(batch):
        slot = k.i64(slots[b])
        place = max_slots if slot < 0 else slot
        for row in range(k.i64(input_row_offsets[b]), k.i64(input_row_offsets[b + 1])):
            position = places[place]
            order[position] = row
            sorted_slots[position] = slot
            row_scales[row] = scales[b]
            places[place] = position + 1


def _lower_rows(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    """The call for `mo.lora.rows.ragged`."""
    args = run_time_views(results, operands)
    return KernelCall(adapter_rows, args, {"max_slots": attributes["max_slots"]}, serial=True)


LOWERINGS = {"mo.lora.rows.ragged": _lower_rows}
