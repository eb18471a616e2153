"""Loads and stores of rows of the paged cache, in NumPy."""

from __future__ import annotations

import numpy as np

from max._interpreter.core import Array, register
from max._interpreter.models.attention import check_batch, check_offsets, new_tokens, slot_of
from max._interpreter.models.cache_rows import decode_rows, encode_rows


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
    # rows of codes are longer than a head: the op then states the head's size
    head_dim = head_dim or blocks.shape[5]
    # rows after the last offset stay 0
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
    input_row_offsets: Array,
    blocks: Array,
    cache_lengths: Array,
    lookup_table: Array,
    layer: Array,
    side: int,
) -> None:
    check_batch(input_row_offsets, len(keys), blocks, cache_lengths, lookup_table, layer)
    for row, sequence, position in new_tokens(input_row_offsets, cache_lengths):
        page, place = slot_of(lookup_table, blocks, sequence, position)
        heads = keys[row].reshape(blocks.shape[4], -1)
        blocks[page, side, int(layer), place] = encode_rows(heads, blocks)
