"""Causal depthwise convolutions over ragged sequences; the state holds the last inputs of a sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from max import kernel as k
from max._backends.cpu.kernels.operand_checks import check_size
from max._backends.cpu.kernels.recurrence.slots import SlotBatch, check_states, state_views
from max._backends.kernel_call import KernelCall, Operand, view

VECTORS = 4
"""Vectors of channels of a task."""


@k.kernel
def causal_conv(
    out: k.Output,
    x: k.Input,
    weight: k.Input,
    bias: k.Input,
    batch: SlotBatch,
    ctx: k.Context,
    *,
    silu: bool,
) -> None:
    """`out[t] = bias + sum over j of weight[j] * x[t - taps + 1 + j]`, then SiLU where `silu`; `x` is `[total,
    channels]`, `weight` `[taps, channels]`.

    Rows before a sequence's first one are those of its state `[taps - 1, channels]`, which then holds its last inputs.
    """
    width = ctx.target.width(k.f32)
    taps, channels = weight.shape[0], x.shape[1]
    input_row_offsets, cache_lengths, slots, states, layer_index = batch
    check_states(batch, x.shape[0], ctx)
    check_size("the result", out.shape[0], x.shape[0])
    block = VECTORS * width
    layer = k.i64(layer_index[0])
    for b, part in ctx.parallel((slots.shape[0], (channels + block - 1) // block)):
        begin, end = k.i64(input_row_offsets[b]), k.i64(input_row_offsets[b + 1])
        rows = states[k.i64(slots[b]), layer]
        for c, mask in k.vectors(part * block, k.min(channels, (part + 1) * block), width):
            factors = [
                k.cast(weight.load(j, c, width=width, mask=mask), k.f32)
                for j in k.static_range(taps)
            ]
            start = k.cast(bias.load(c, width=width, mask=mask), k.f32)
            # the previous inputs stay in registers
            past = k.tile(k.f32, (taps - 1,), width=width, fill=0.0)
            # the slot of a new sequence may hold another one's inputs
            if cache_lengths[b] > 0:
                for i in k.static_range(taps - 1):
                    past[i] = k.cast(rows.load(i, c, width=width, mask=mask), k.f32)
            for t in range(begin, end):
                current = k.cast(x.load(t, c, width=width, mask=mask), k.f32)
                # the current input has the last weight
                total = k.fma(current, factors[taps - 1], start)
                for j in k.static_range(taps - 1):
                    total = k.fma(past[j], factors[j], total)
                # shifts the window in registers
                for m in k.static_range(taps - 2):
                    past[m] = past[m + 1]
                past[taps - 2] = current
                out.store(t, c, value=k.silu(total) if silu else total, mask=mask)
            # a sequence shorter than the taps keeps inputs of the previous state
            for last in k.static_range(taps - 1):
                rows.store(last, c, value=past[last], mask=mask)


def _lower_causal_conv(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    """The call for `mo.causal_conv.ragged`; channels and taps must be static."""
    x, weight, bias = operands[:3]
    args = (
        view("result", 0, results[0], static=(False, True)),
        view("operand", 0, x, static=(False, True)),
        view("operand", 1, weight),
        view("operand", 2, bias),
        *state_views(operands, 3),
    )
    return KernelCall(causal_conv, args, {"silu": attributes.get("activation") == "silu"})


LOWERINGS = {"mo.causal_conv.ragged": _lower_causal_conv}
