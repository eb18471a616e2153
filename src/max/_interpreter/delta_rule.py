"""The gated delta rule in NumPy, token by token."""

from __future__ import annotations

import numpy as np

from max._interpreter.core import Array, register
from max._interpreter.nn import check_offsets

_NORM_EPSILON = 1e-6


def _unit(x: Array) -> Array:
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + _NORM_EPSILON)


@register("mo.gated_delta.ragged")
def _gated_delta(
    q: Array,
    keys: Array,
    values: Array,
    gates: Array,
    rates: Array,
    offsets: Array,
    cache_lengths: Array,
    slots: Array,
    states: Array,
    layer: Array,
    scale: float,
    normalized: bool,
) -> Array:
    total, heads, _ = values.shape
    check_offsets("input_row_offsets", offsets, len(slots), total)
    if (
        len(cache_lengths) != len(slots)
        or not len(q) == len(keys) == len(gates) == len(rates) == total
    ):
        raise ValueError("queries, keys, values, decays, rates or cache_lengths differ in number")
    if len({*slots.tolist()}) != len(slots):
        raise ValueError(f"slots are {slots.tolist()}, expected a state for each sequence")
    if any(slot >= len(states) for slot in slots):
        raise IndexError(f"slots are {slots.tolist()}; there are {len(states)} states")
    if layer >= states.shape[1]:
        raise IndexError(f"layer {layer}; the states have {states.shape[1]} layers")
    q, keys, values, decays, rates = (
        np.asarray(x, np.float64) for x in (q, keys, values, np.exp(gates, dtype=np.float64), rates)
    )
    if normalized:
        q, keys = _unit(q), _unit(keys)
    # a key head serves neighboring heads
    q, keys = (np.repeat(x, heads // x.shape[1], axis=1) for x in (q, keys))
    out = np.zeros(values.shape)
    for sequence, slot in enumerate(slots):
        begin, end = int(offsets[sequence]), int(offsets[sequence + 1])
        if begin == end:
            continue
        state = np.asarray(states[slot, int(layer)], np.float64)
        if cache_lengths[sequence] == 0:
            state = np.zeros_like(state)
        for row in range(begin, end):
            state = state * decays[row][:, None, None]
            stored = np.einsum("hkv,hk->hv", state, keys[row])
            update = (values[row] - stored) * rates[row][:, None]
            state = state + keys[row][:, :, None] * update[:, None, :]
            out[row] = np.einsum("hkv,hk->hv", state, q[row]) * scale
        states[slot, int(layer)] = state
    return out
