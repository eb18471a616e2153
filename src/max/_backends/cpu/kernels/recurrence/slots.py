"""Checks of ragged batches whose sequences have states in slots.

A state buffer is `[slots, layers, …]`. Sequence `b` owns slot `slots[b]`; its state is zero where `cache_lengths[b]` is
0, whatever the slot holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from max import kernel as k
from max._backends.cpu.kernels.operand_checks import check_offsets, check_size
from max._backends.kernel_call import Arg, Operand, view


class SlotBatch(NamedTuple):
    """The operands of a ragged batch whose sequences have states in slots.

    Args:
        input_row_offsets: First row of each sequence, and the number of rows, `[batch + 1]`.
        cache_lengths: Cached tokens of each sequence, `[batch]`.
        slots: The slot of each sequence, `[batch]`.
        states: The state buffer, `[slots, layers, …]`.
        layer_index: The layer, `[1]`.
    """

    input_row_offsets: k.Input
    cache_lengths: k.Input
    slots: k.Input
    states: k.InOut
    layer_index: k.Input


@k.inline
def check_slots(slots: k.View, states: k.View, ctx: k.Context) -> None:
    """Raises if two sequences share a slot or a slot is out of range. The comparisons are split over the workers."""
    for b in range(slots.size):
        if k.i64(slots[b]) >= states.shape[0]:
            raise IndexError(
                "slots[{}] is {}, expected less than {}, the number of states",
                b,
                slots[b],
                states.shape[0],
            )
        # each pair of sequences is compared by one worker
        if b % ctx.num_workers == ctx.worker:
            for other in range(b):
                if slots[other] == slots[b]:
                    raise ValueError(
                        "slots[{}] and slots[{}] are both {}, expected a state for each sequence",
                        other,
                        b,
                        slots[b],
                    )


@k.inline
def check_states(batch: SlotBatch, rows: k.Value, ctx: k.Context) -> None:
    """Raises where offsets, lengths, slots and layer do not describe one ragged batch over a state buffer.

    Args:
        batch: The operands of the batch.
        rows: The number of rows.
        ctx: The context.
    """
    input_row_offsets, cache_lengths, slots, states, layer_index = batch
    check_size("input_row_offsets", input_row_offsets.size, slots.size + 1)
    check_size("cache_lengths", cache_lengths.size, slots.size)
    check_offsets("input_row_offsets", input_row_offsets, rows, ctx.target.width(k.i64))
    if k.i64(layer_index[0]) >= states.shape[1]:
        raise IndexError("layer {}; the states have {} layers", layer_index[0], states.shape[1])
    check_slots(slots, states, ctx)


def state_views(operands: Sequence[Operand], first: int) -> tuple[Arg, ...]:
    """The views of offsets, cache lengths, slots, state buffer and layer, in this order.

    Args:
        operands: The operands of an op.
        first: The index of the offsets.
    """
    input_row_offsets, lengths, slots, state, layer = operands[first:]
    inner = (True,) * (len(state.shape) - 2)
    return (
        view("operand", first, input_row_offsets, static=False),
        view("operand", first + 1, lengths, static=False),
        view("operand", first + 2, slots, static=False),
        # all but slots are known when compiling
        view("operand", first + 3, state, static=(False, True, *inner)),
        view("operand", first + 4, layer, ((),)),
    )
