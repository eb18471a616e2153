"""Recurrent layers over ragged batches (convolutions, scans, the gated delta rule), with states in slots, in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from max._interpreter.core import Array, register
from max._interpreter.models.attention import check_offsets

_NORM_EPSILON = 1e-6
"""What L2 norms of the gated delta rule add to the sum of squares."""


def _rows_and_states(
    rows: int,
    input_row_offsets: Array,
    cache_lengths: Array,
    slots: Array,
    state: Array,
    layer: Array,
) -> Iterator[tuple[range, int, Array]]:
    """The rows of each sequence, its slot, and its state before them in float64."""
    if len(cache_lengths) != len(slots):
        raise ValueError(f"{len(cache_lengths)} cache_lengths for {len(slots)} slots")
    check_offsets("input_row_offsets", input_row_offsets, len(slots), rows)
    if int(layer) >= state.shape[1]:
        raise IndexError(f"layer {layer}; the states have {state.shape[1]} layers")
    if len({*slots.tolist()}) < len(slots):
        raise ValueError(f"slots are {slots.tolist()}, expected a state for each sequence")
    for sequence, slot in enumerate(slots):
        if slot >= len(state):
            raise IndexError(f"sequence {sequence}: slot {slot}; there are {len(state)} slots")
    for sequence, slot in enumerate(slots.tolist()):
        held = state[slot, int(layer)].astype(np.float64)
        # the slot of a new sequence still holds the state of an earlier owner
        held = held if cache_lengths[sequence] else np.zeros_like(held)
        yield (
            range(int(input_row_offsets[sequence]), int(input_row_offsets[sequence + 1])),
            slot,
            held,
        )


def _check_rows(x: Array, *others: Array) -> None:
    for other in others:
        if len(other) != len(x):
            raise ValueError(f"an operand has {len(other)} rows, expected {len(x)}")


@register("mo.causal_conv.ragged")
def _causal_conv(
    x: Array,
    weight: Array,
    bias: Array,
    input_row_offsets: Array,
    cache_lengths: Array,
    slots: Array,
    state: Array,
    layer: Array,
    activation: str,
) -> Array:
    out = np.zeros(x.shape)
    wide, factors = x.astype(np.float64), weight.astype(np.float64)
    for rows, slot, held in _rows_and_states(
        len(x), input_row_offsets, cache_lengths, slots, state, layer
    ):
        # [taps - 1 + rows, channels]
        inputs = np.concatenate([held, wide[rows.start : rows.stop]])
        for at, row in enumerate(rows):
            out[row] = bias + (inputs[at : at + len(factors)] * factors).sum(0)
        state[slot, int(layer)] = inputs[len(rows) :]
    return out / (1 + np.exp(-out)) if activation == "silu" else out


class _Row(NamedTuple):
    """What a scan reads of a row: float64, the step clamped."""

    x: Array
    step: Array
    b: Array
    c: Array


def _scan(
    advance: Callable[[Array, _Row, Array], tuple[Array, Array]],
    x: Array,
    dt: Array,
    a: Array,
    b: Array,
    c: Array,
    d: Array,
    dt_bias: Array,
    input_row_offsets: Array,
    cache_lengths: Array,
    slots: Array,
    state: Array,
    layer: Array,
    low: float,
    high: float,
) -> Array:
    """Scans the rows of each sequence; ``advance(state, row, a)`` returns the new state and its product with c."""
    x, dt, a, b, c, d, dt_bias = (v.astype(np.float64) for v in (x, dt, a, b, c, d, dt_bias))
    _check_rows(x, dt, b, c)
    # [heads, 1] where channels are divided into heads
    d = d.reshape(*d.shape, *[1] * (x.ndim - 1 - d.ndim))
    out = np.zeros(x.shape)
    for rows, slot, held in _rows_and_states(
        len(x), input_row_offsets, cache_lengths, slots, state, layer
    ):
        for row in rows:
            # softplus, without overflow
            step = np.clip(np.logaddexp(0, dt[row] + dt_bias), low, high)
            held, product = advance(held, _Row(x[row], step, b[row], c[row]), a)
            out[row] = product + d * x[row]
        state[slot, int(layer)] = held
    return out


def _advance_heads(state: Array, row: _Row, a: Array) -> tuple[Array, Array]:
    """Mamba 2: the state is ``[heads, state size, head_dim]``."""
    # a group of b and c serves neighboring heads
    b, c = (np.repeat(v, len(row.x) // len(v), axis=0)[:, :, None] for v in (row.b, row.c))
    step = row.step[:, None, None]
    state = state * np.exp(step * a[:, None, None]) + step * b * row.x[:, None]
    return state, (state * c).sum(1)


def _advance_channels(state: Array, row: _Row, a: Array) -> tuple[Array, Array]:
    """Mamba: the state is ``[state size, channels]``."""
    state = state * np.exp(row.step * a) + row.step * row.x * row.b[:, None]
    return state, (state * row.c[:, None]).sum(0)


register("mo.ssd.ragged")(partial(_scan, _advance_heads))
register("mo.selective_scan.ragged")(partial(_scan, _advance_channels))


def _unit(x: Array) -> Array:
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + _NORM_EPSILON)


@register("mo.gated_delta.ragged")
def _gated_delta(
    q: Array,
    keys: Array,
    values: Array,
    gates: Array,
    rates: Array,
    input_row_offsets: Array,
    cache_lengths: Array,
    slots: Array,
    states: Array,
    layer: Array,
    scale: float,
    normalized: bool,
) -> Array:
    total, heads, _ = values.shape
    check_offsets("input_row_offsets", input_row_offsets, len(slots), total)
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
        begin, end = int(input_row_offsets[sequence]), int(input_row_offsets[sequence + 1])
        if begin == end:
            continue
        state = np.asarray(states[slot, int(layer)], np.float64)
        if cache_lengths[sequence] == 0:
            state = np.zeros_like(state)
        for row in range(begin, end):
            # state: [heads, key_dim, value_dim]
            state = state * decays[row][:, None, None]
            stored = np.einsum("hkv,hk->hv", state, keys[row])
            # the delta rule: replace what the key reads now, at a rate, instead of adding to it
            update = (values[row] - stored) * rates[row][:, None]
            state = state + keys[row][:, :, None] * update[:, None, :]
            out[row] = np.einsum("hkv,hk->hv", state, q[row]) * scale
        states[slot, int(layer)] = state
    return out
