"""Rows of the paged cache, latent attention of prompts, and counts of tokens, in NumPy."""

from __future__ import annotations

import numpy as np

from max._interpreter.cache_formats import decode_rows, encode_rows
from max._interpreter.core import Array, register
from max._interpreter.nn import check_batch, check_offsets, new_tokens, slot_of


def _load(
    offsets: Array,
    blocks: Array,
    starts: Array,
    lookup_table: Array,
    layer: Array,
    side: int,
    rows: int,
    head_dim: int,
) -> Array:
    check_offsets("offsets", offsets, len(starts), rows, exact=False)
    if int(offsets[0]) != 0:
        raise ValueError(f"offsets begin at {offsets[0]}, expected 0")
    if len(lookup_table) != len(starts):
        raise ValueError(f"lookup_table has size {len(lookup_table)}, expected {len(starts)}")
    if int(layer) >= blocks.shape[2]:
        raise IndexError(f"layer {layer}; the cache has {blocks.shape[2]} layers")
    head_dim = head_dim or blocks.shape[5]
    out = np.zeros((rows, blocks.shape[4] * head_dim), np.float32)
    for row, sequence, position in new_tokens(offsets, starts):
        page, place = slot_of(lookup_table, blocks, sequence, position)
        heads = blocks[page, side, int(layer), place]
        out[row] = decode_rows(heads, head_dim).reshape(-1)
    return out


@register("mo.kv_load.ragged.paged")
def _kv_load(
    offsets: Array,
    blocks: Array,
    starts: Array,
    lookup_table: Array,
    layer: Array,
    rows: Array,
    side: int,
    head_dim: int = 0,
) -> Array:
    return _load(offsets, blocks, starts, lookup_table, layer, side, int(rows), head_dim)


@register("mo.k_store.ragged.paged")
def _k_store(
    keys: Array,
    offsets: Array,
    blocks: Array,
    cache_lengths: Array,
    lookup_table: Array,
    layer: Array,
    side: int,
) -> None:
    check_batch(offsets, len(keys), blocks, cache_lengths, lookup_table, layer)
    for row, sequence, position in new_tokens(offsets, cache_lengths):
        page, place = slot_of(lookup_table, blocks, sequence, position)
        heads = keys[row].reshape(blocks.shape[4], -1)
        blocks[page, side, int(layer), place] = encode_rows(heads, blocks)


@register("mo.mla.prefill.ragged.paged")
def _latent_prefill(
    q: Array,
    keys: Array,
    values: Array,
    offsets: Array,
    buffer_offsets: Array,
    cache_offsets: Array,
    blocks: Array,
    cache_lengths: Array,
    lookup_table: Array,
    layer: Array,
    scale: Array,
    *previous: Array,
    causal: bool,
) -> tuple[Array, Array]:
    check_batch(offsets, len(q), blocks, cache_lengths, lookup_table, layer)
    check_offsets("buffer_row_offsets", buffer_offsets, len(cache_lengths), len(keys), exact=False)
    if len(cache_offsets) != len(cache_lengths) or len(values) != len(keys):
        raise ValueError(
            f"{len(cache_offsets)} cache_offsets of {len(cache_lengths)} sequences, "
            f"{len(values)} values for {len(keys)} keys"
        )
    rotated = q.shape[2] - keys.shape[2]
    out = np.zeros((*q.shape[:2], values.shape[2]))
    info = np.zeros((*q.shape[:2], 2))
    for result, part in zip((out, info), previous, strict=False):
        if part.shape != result.shape:
            raise ValueError(
                f"a result of earlier chunks has shape {part.shape}, expected {result.shape}"
            )
    for row, sequence, position in new_tokens(offsets, cache_lengths):
        first = int(cache_offsets[sequence])
        places = np.arange(int(buffer_offsets[sequence]), int(buffer_offsets[sequence + 1]))
        if causal:
            places = places[: max(position + 1 - first, 0)]
        slots = [slot_of(lookup_table, blocks, sequence, first + i) for i in range(len(places))]
        shared = np.array(
            [blocks[page, 0, int(layer), place, 0, -rotated:] for page, place in slots], np.float64
        ).reshape(len(places), rotated)
        for head in range(q.shape[1]):
            query = q[row, head].astype(np.float64)
            scores = (
                keys[places, head].astype(np.float64) @ query[:-rotated] + shared @ query[-rotated:]
            )
            scores = scores * float(scale)
            top, total, before = -np.inf, 0.0, np.zeros(values.shape[2])
            if previous:
                top, total = (float(x) for x in previous[1][row, head])
                before = previous[0][row, head].astype(np.float64) * total
            most = max(top, scores.max(initial=-np.inf))
            change = np.exp(top - most) if total else 0.0
            weights = np.exp(scores - most) if len(scores) else scores
            total = total * change + weights.sum()
            sums = before * change + weights @ values[places, head].astype(np.float64)
            out[row, head] = sums / total if total else 0
            info[row, head] = most, total
    return out, info


@register("mo.frequencies.update")
def _update_frequencies(data: Array, offsets: Array, tokens: Array) -> None:
    check_offsets("offsets", offsets, len(tokens), len(data), exact=False)
    for row, token in enumerate(tokens):
        pairs = data[int(offsets[row]) : int(offsets[row + 1])]
        used = (pairs[:, 0] >= 0) & (pairs[:, 1] > 0)
        (at,) = np.nonzero(used & (pairs[:, 0] == token))
        (free,) = np.nonzero(~used)
        if len(at):
            pairs[at[0], 1] += 1
        elif len(free):
            pairs[free[0]] = token, 1
        else:
            raise ValueError(f"row {row} has no free pair for token {token}")
