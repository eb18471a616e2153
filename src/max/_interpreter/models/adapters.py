"""Low-rank adapters in NumPy: rows sorted by adapter, and the terms that adapters add to products."""

from __future__ import annotations

import numpy as np

from max._interpreter.core import Array, Frame, implements
from max.mlir import MoOp
from max.mlir.ops.models.adapters import LORA_PANEL, lora_place_starts


@implements("lora.rows.ragged")
def _rows(frame: Frame, op: MoOp, operands: list[Array]) -> tuple[Array, ...]:
    slots, scales, offsets = operands
    count = int(op.attr("max_slots"))
    (rows,) = frame.shape(op.results[0].type)
    bounds = offsets.astype(np.int64)
    if len(bounds) != len(slots) + 1 or len(scales) != len(slots):
        raise ValueError(
            f"lora.rows: {len(slots)} slots, {len(scales)} scales and {len(bounds)} offsets"
        )
    if bounds[0] != 0 or (np.diff(bounds) < 0).any() or bounds[-1] != rows:
        raise ValueError(f"lora.rows: the offsets are {bounds.tolist()}, of {rows} rows")
    wrong = (slots < -1) | (slots >= count)
    if wrong.any():
        raise IndexError(f"lora.rows: slot {slots[wrong][0]}; there are {count}")
    lengths = np.diff(bounds)
    of_row = np.repeat(slots, lengths)
    # rows without an adapter come last
    order = np.argsort(np.where(of_row < 0, count, of_row), kind="stable").astype(np.int32)
    used = np.array([(of_row >= 0).sum()], np.int32)
    return order, of_row[order].astype(np.int32), np.repeat(scales, lengths), used


@implements("lora.add")
def _add(frame: Frame, op: MoOp, operands: list[Array]) -> Array:
    y, x, memory, forms, order, slots, scales, count, place = operands
    max_rank, inputs = int(op.attr("max_rank")), int(op.attr("inputs"))
    rows, columns = y.shape
    if (len(order), len(slots), len(scales), len(x)) != (rows, rows, rows, rows):
        raise ValueError(
            f"lora.add: {len(order)}, {len(slots)}, {len(scales)}, {len(x)} rows, expected {rows}"
        )
    if len(forms) != len(memory):
        raise ValueError(f"lora.add: {len(forms)} forms of {len(memory)} slots")
    begin, site = int(place[0]) + int(op.attr("offset")), int(place[1]) + int(op.attr("site"))
    at_b, at_gain, at_shift, end = lora_place_starts(max_rank, inputs, columns)
    if int(place[0]) < 0 or begin + end > memory.shape[1]:
        raise IndexError(f"lora.add: the site ends at {begin + end} of {memory.shape[1]} elements")
    if int(place[1]) < 0 or site >= forms.shape[1]:
        raise IndexError(f"lora.add: site {site}; there are {forms.shape[1]}")
    used = int(count[0])
    if not 0 <= used <= rows:
        raise ValueError(f"lora.add: count is {used}, of {rows} rows")
    panels = -(-columns // LORA_PANEL)
    out = y.astype(np.float32)
    for position in range(rows):
        row = int(order[position])
        if not 0 <= row < rows:
            raise IndexError(f"lora.add: row {row} of {rows}")
        if position >= used:
            continue
        slot = int(slots[position])
        if not 0 <= slot < len(memory):
            raise IndexError(f"lora.add: slot {slot}; there are {len(memory)}")
        rank, has_vectors = map(int, forms[slot, site])
        if not 0 <= rank <= max_rank:
            raise ValueError(f"lora.add: the rank is {rank}, expected 0 to {max_rank}")
        elements = memory[slot, begin : begin + end].astype(np.float32)
        if x.dtype == np.int64:
            token = int(x[row, 0])
            if not 0 <= token < inputs:
                raise IndexError(f"lora.add: token {token}; there are {inputs}")
            # an embedding: its table has a row of `rank` numbers for each token
            narrow = elements[: inputs * rank].reshape(inputs, rank)[token]
        else:
            narrow = elements[: rank * inputs].reshape(rank, inputs) @ x[row].astype(np.float32)
        # [panels, rank, columns of a panel]
        b = elements[at_b : at_b + panels * rank * LORA_PANEL].reshape(panels, rank, LORA_PANEL)
        wide = np.einsum("r,prc->pc", narrow, b).reshape(-1)[:columns]
        if has_vectors:
            wide = wide + out[row] * elements[at_gain:][:columns] + elements[at_shift:][:columns]
        out[row] += scales[row] * wide
    return out.astype(y.dtype)
