"""Attention over latents: the plan of a batch, prompts, selection of cached tokens by index keys, in NumPy."""

from __future__ import annotations

import numpy as np

from max._interpreter.core import Array, register
from max._interpreter.models.attention import check_batch, check_offsets, new_tokens, slot_of


def _rows(blocks: Array, lookup_table: Array, sequence: int, tokens: Array, layer: Array) -> Array:
    """The cached rows of some tokens of a sequence, float64 ``[tokens, size]``."""
    slots = [slot_of(lookup_table, blocks, sequence, int(token)) for token in tokens]
    rows = [blocks[page, 0, int(layer), place, 0] for page, place in slots]
    return np.array(rows).astype(np.float64).reshape(len(tokens), blocks.shape[5])


@register("mo.latents.plan.ragged")
def _plan_latents(
    input_row_offsets: Array,
    cache_lengths: Array,
    least_rows: int,
    most_cached: int,
    saved: int,
    spent: int,
    count: int,
) -> Array:
    check_offsets(
        "input_row_offsets", input_row_offsets, len(cache_lengths), int(input_row_offsets[-1])
    )
    rows, cached = int(input_row_offsets[-1]), cache_lengths.astype(np.int64)
    new = np.diff(input_row_offsets.astype(np.int64))
    # twice the number of pairs, in the order and the dtype of the kernel
    pairs = sum((new.astype(np.float64) * (2 * cached + new).astype(np.float64)).tolist(), 0.0)
    expands = 0 < least_rows <= rows and cached.sum() <= rows * most_cached
    expands = expands and pairs * float(saved) >= 2.0 * float(cached.sum()) * float(spent)
    longest = (cached + new).max(initial=0)
    return np.array([expands, 0 < count < longest], np.int32)


@register("mo.tokens.select.ragged.paged")
def _select_tokens(
    q: Array,
    weights: Array,
    input_row_offsets: Array,
    blocks: Array,
    cache_lengths: Array,
    lookup_table: Array,
    layer: Array,
    count: int,
) -> Array:
    check_batch(input_row_offsets, len(q), blocks, cache_lengths, lookup_table, layer)
    if len(weights) != len(q):
        raise ValueError(f"weights of {len(weights)} rows, expected {len(q)}")
    out = np.full((len(q), count), -1, np.int32)
    for row, sequence, position in new_tokens(input_row_offsets, cache_lengths):
        tokens = np.arange(position + 1)
        if len(tokens) > count:
            keys = _rows(blocks, lookup_table, sequence, tokens, layer)
            products = q[row].astype(np.float64) @ keys.T
            # [heads, tokens] through ReLU, then a weighted sum over heads: [tokens]
            scores = weights[row].astype(np.float64) @ np.where(products > 0, products, 0.0)
            scores = np.where(np.isnan(scores), -np.inf, scores)
            # of equal scores the earlier token
            tokens = np.sort(np.argsort(-scores, kind="stable")[:count])
        out[row, : len(tokens)] = tokens
    return out


@register("mo.attention.selected.paged")
def _attention_selected(
    q: Array,
    selected: Array,
    input_row_offsets: Array,
    blocks: Array,
    cache_lengths: Array,
    lookup_table: Array,
    layer: Array,
    scale: Array,
    value_size: int,
) -> Array:
    check_batch(input_row_offsets, len(q), blocks, cache_lengths, lookup_table, layer)
    if len(selected) != len(q):
        raise ValueError(f"selected tokens of {len(selected)} rows, expected {len(q)}")
    out = np.zeros((*q.shape[:2], value_size), np.float32)
    for row, sequence, position in new_tokens(input_row_offsets, cache_lengths):
        tokens = selected[row][selected[row] >= 0]
        # padding of negative numbers is allowed at the end only
        if (selected[row, : len(tokens)] != tokens).any() or (np.diff(tokens) <= 0).any():
            raise ValueError(
                f"row {row}: selected tokens {selected[row]}, expected rising ones, then negative numbers"
            )
        if (tokens > position).any():
            raise IndexError(
                f"row {row}: selected tokens {tokens}; it sees the tokens up to {position}"
            )
        if not len(tokens):
            continue
        latents = _rows(blocks, lookup_table, sequence, tokens, layer)
        scores = q[row].astype(np.float64) @ latents.T * float(scale)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        out[row] = weights @ latents[:, :value_size]
    return out


@register("mo.mla.prefill.ragged.paged")
def _latent_prefill(
    q: Array,
    keys: Array,
    values: Array,
    input_row_offsets: Array,
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
    check_batch(input_row_offsets, len(q), blocks, cache_lengths, lookup_table, layer)
    check_offsets("buffer_row_offsets", buffer_offsets, len(cache_lengths), len(keys), exact=False)
    if len(cache_offsets) != len(cache_lengths) or len(values) != len(keys):
        raise ValueError(
            f"{len(cache_offsets)} cache_offsets of {len(cache_lengths)} sequences, "
            f"{len(values)} values for {len(keys)} keys"
        )
    # keys lack the rotated elements, which all heads share: these are the last of the cached row
    rotated = q.shape[2] - keys.shape[2]
    out = np.zeros((*q.shape[:2], values.shape[2]))
    info = np.zeros((*q.shape[:2], 2))
    for result, part in zip((out, info), previous, strict=False):
        if part.shape != result.shape:
            raise ValueError(
                f"a result of earlier chunks has shape {part.shape}, expected {result.shape}"
            )
    for row, sequence, position in new_tokens(input_row_offsets, cache_lengths):
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
                # results of earlier chunks are normalized: undo it before adding to them
                before = previous[0][row, head].astype(np.float64) * total
            most = max(top, scores.max(initial=-np.inf))
            # sums are relative to their maximum: move the earlier ones to the common maximum
            change = np.exp(top - most) if total else 0.0
            weights = np.exp(scores - most) if len(scores) else scores
            total = total * change + weights.sum()
            sums = before * change + weights @ values[places, head].astype(np.float64)
            out[row, head] = sums / total if total else 0
            info[row, head] = most, total
    return out, info
