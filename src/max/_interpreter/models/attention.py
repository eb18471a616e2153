"""Attention over a paged KV cache, RoPE, and what all ops of ragged batches check, in NumPy.

Shapes and semantics are in the tables of ``docs/dialect.md``. References compute in float64 or float32, round once,
and resolve positions, pages and masks token by token.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from max._interpreter.core import Array, register
from max._interpreter.models.cache_rows import decode_rows, encode_rows

__all__ = ["check_batch", "check_offsets", "new_tokens", "slot_of"]


def check_offsets(name: str, offsets: Array, batch: int, rows: int, exact: bool = True) -> None:
    """Checks the row offsets of a ragged batch.

    Args:
        name: The name of the offsets.
        offsets: ``[batch + 1]``: non-decreasing, at most `rows`.
        batch: The number of sequences.
        rows: The number of rows.
        exact: Whether every row must belong to a sequence: the first offset is 0 and the last one `rows`.

    Raises:
        ValueError: The size, the order or an end of the offsets is wrong.
    """
    bounds = [int(n) for n in offsets]
    if len(bounds) != batch + 1 or not bounds:
        raise ValueError(f"{name} has size {len(bounds)}, expected {batch + 1}")
    if exact and (bounds[0] != 0 or bounds[-1] != rows):
        raise ValueError(f"{name} are {bounds}, expected to begin at 0 and to end at {rows}")
    if bounds != sorted(bounds) or bounds[-1] > rows:
        raise ValueError(f"{name} are {bounds}, expected to rise, up to {rows}")


def check_batch(
    input_row_offsets: Array,
    rows: int,
    blocks: Array,
    cache_lengths: Array,
    lookup_table: Array,
    layer: Array,
) -> None:
    """Checks that offsets, lengths, page table and layer describe a ragged batch over a KV cache.

    Raises:
        ValueError: The offsets do not fit the batch, or a size differs.
        IndexError: The layer is out of range.
    """
    batch = len(cache_lengths)
    if len(lookup_table) != batch:
        raise ValueError(f"lookup_table has size {len(lookup_table)}, expected {batch}")
    check_offsets("input_row_offsets", input_row_offsets, batch, rows)
    if layer >= blocks.shape[2]:
        raise IndexError(f"layer {layer}; the cache has {blocks.shape[2]} layers")


def new_tokens(input_row_offsets: Array, cache_lengths: Array) -> Iterator[tuple[int, int, int]]:
    """Yields row, sequence and position of each new token."""
    for sequence, cached in enumerate(cache_lengths):
        begin, end = int(input_row_offsets[sequence]), int(input_row_offsets[sequence + 1])
        for row in range(begin, end):
            yield row, sequence, int(cached) + row - begin


def tree_positions(ancestors: Array, input_row_offsets: Array, cache_lengths: Array) -> list[int]:
    """The position of each row in its text: after the cached tokens and its ancestors.

    Args:
        ancestors: Empty, or for each row the bits of the new rows of its sequence that it sees; 0: all before it.
        input_row_offsets: The first row of each sequence, checked.
        cache_lengths: The number of cached tokens of each sequence.

    Raises:
        ValueError: A row's highest bit is not its own, or there are more or fewer rows.
    """
    places: list[int] = []
    rows = int(input_row_offsets[-1])
    if len(ancestors) not in (0, rows):
        raise ValueError(f"ancestors has size {len(ancestors)}, expected {rows}")
    for row, sequence, position in new_tokens(input_row_offsets, cache_lengths):
        bits = int(ancestors[row]) if len(ancestors) else 0
        own = row - int(input_row_offsets[sequence])
        if bits and bits.bit_length() != own + 1:
            raise ValueError(
                f"ancestors of row {own} of sequence {sequence} are {bits}; expected its own bit as the highest"
            )
        places.append(position - own + bits.bit_count() - 1 if bits else position)
    return places


def slot_of(lookup_table: Array, blocks: Array, sequence: int, position: int) -> tuple[int, int]:
    """The page of a position, and its index in the page.

    Raises:
        IndexError: The page table has no entry for the position, or the page is out of range.
    """
    # blocks: [pages, 2, layers, page_size, heads, row size]
    page_size = blocks.shape[3]
    index = position // page_size
    if index >= lookup_table.shape[1]:
        raise IndexError(
            f"position {position} of sequence {sequence} needs page {index}, the lookup table has "
            f"{lookup_table.shape[1]}"
        )
    page = int(lookup_table[sequence, index])
    if page >= blocks.shape[0]:
        raise IndexError(f"page {page} of sequence {sequence}; the cache has {blocks.shape[0]}")
    return page, position % page_size


@register("mo.kv_store.ragged.paged")
def _kv_store(
    k: Array,
    v: Array,
    input_row_offsets: Array,
    blocks: Array,
    cache_lengths: Array,
    lookup_table: Array,
    max_lengths: Array,
    layer: Array,
) -> None:
    check_batch(input_row_offsets, len(k), blocks, cache_lengths, lookup_table, layer)
    if len(v) != len(k):
        raise ValueError(f"values have size {len(v)}, expected {len(k)}")
    heads = blocks.shape[4]
    for row, sequence, position in new_tokens(input_row_offsets, cache_lengths):
        page, slot = slot_of(lookup_table, blocks, sequence, position)
        blocks[page, 0, int(layer), slot] = encode_rows(k[row].reshape(heads, -1), blocks)
        blocks[page, 1, int(layer), slot] = encode_rows(v[row].reshape(heads, -1), blocks)


def _rotate(x: Array, angles: Array, interleaved: bool) -> Array:
    """Rotates the first elements of heads ``[heads, head_dim]`` by a row of interleaved cosines and sines.

    Pairs are neighbors if `interleaved`, else the two halves of the rotated elements.
    """
    rope_dim = angles.shape[0]
    # angles: [rope_dim], cosine and sine of each pair in turn
    cos, sin = angles[0::2].astype(np.float32), angles[1::2].astype(np.float32)
    wide = x.astype(np.float32)
    half = rope_dim // 2
    parts = (slice(0, rope_dim, 2), slice(1, rope_dim, 2)) if interleaved else (
        slice(0, half), slice(half, rope_dim))  # fmt: skip
    # copies: the first assignment below would change what the second one reads
    first, second = wide[:, parts[0]].copy(), wide[:, parts[1]].copy()
    wide[:, parts[0]] = first * cos - second * sin
    wide[:, parts[1]] = first * sin + second * cos
    return wide.astype(x.dtype)


@register("mo.rope.ragged.paged")
def _rope(
    q: Array,
    input_row_offsets: Array,
    freqs_cis: Array,
    blocks: Array,
    cache_lengths: Array,
    lookup_table: Array,
    max_lengths: Array,
    layer: Array,
    ancestors: Array | None = None,
    interleaved: bool = True,
    rotates_cache: bool = True,
    trees: bool = False,
) -> Array:
    check_batch(input_row_offsets, len(q), blocks, cache_lengths, lookup_table, layer)
    out = np.empty_like(q)
    own = np.zeros(0, np.uint64) if ancestors is None else ancestors
    positions = tree_positions(own, input_row_offsets, cache_lengths)
    for row, sequence, place in new_tokens(input_row_offsets, cache_lengths):
        position = positions[row]
        if position >= freqs_cis.shape[0]:
            raise IndexError(
                f"position {position} of sequence {sequence}; freqs_cis has "
                f"{freqs_cis.shape[0]} rows"
            )
        page, slot = slot_of(lookup_table, blocks, sequence, place)
        angles = freqs_cis[position]
        out[row] = _rotate(q[row], angles, interleaved)
        if rotates_cache:
            # the key was stored by mo.kv_store without rotation: it is rotated in its place
            key = decode_rows(blocks[page, 0, int(layer), slot], q.shape[2]).astype(np.float32)
            rotated = _rotate(key, angles, interleaved)
            blocks[page, 0, int(layer), slot] = encode_rows(rotated, blocks)
    return out


def _visible(mask: str, window: int, position: int, length: int) -> Array:
    """The mask ``[length]`` of the keys that a query at a position attends to."""
    keys = np.arange(length)
    match mask:
        case "causal" | "causal_alibi":
            return keys <= position
        case "null":
            return np.ones(length, bool)
        case "sliding_window":
            return (keys <= position) & (keys > position - window)
        case "chunked_causal":
            return (keys <= position) & (keys // window == position // window)
        case "symmetric_window":
            return abs(keys - position) < window
        case _:
            raise ValueError(f"the mask {mask!r} is unknown")


def _first_key(mask: str, window: int, position: int) -> int:
    """The first key that queries at a position or later attend to."""
    match mask:
        case "sliding_window":
            return max(position - window + 1, 0)
        case "chunked_causal":
            return position // window * window
        case _:
            return 0


@register("mo.attention.ragged.paged")
def _attention(
    q: Array,
    input_row_offsets: Array,
    blocks: Array,
    cache_lengths: Array,
    lookup_table: Array,
    max_lengths: Array,
    layer: Array,
    scale: Array,
    *more: Array,
    mask: str = "causal",
    local_window_size: int = -1,
    softcap: float = 0.0,
    sinks: bool = False,
    cross: bool = False,
    value_size: int = 0,
    trees: bool = False,
) -> Array:
    more, ancestors = (more[:-1], more[-1]) if trees else (more, np.zeros(0, np.uint64))
    by_head, key_offsets = (more[:-1], more[-1]) if cross else (more, input_row_offsets)
    if cross:
        check_offsets("kv_input_row_offsets", key_offsets, len(cache_lengths), int(key_offsets[-1]))
    check_batch(input_row_offsets, len(q), blocks, cache_lengths, lookup_table, layer)
    tree_positions(ancestors, input_row_offsets, cache_lengths)
    heads, head_dim = q.shape[1:]
    # operands with a number per head come in this order; each is optional
    for name, numbers in zip(("sinks", "alibi_slopes")[not sinks :], by_head, strict=False):
        if len(numbers) != heads:
            raise ValueError(f"{name} has size {len(numbers)}, expected {heads}")
    kv_heads = blocks.shape[4]
    group = heads // kv_heads
    # rounded to the result's dtype by the interpreter
    out = np.zeros((*q.shape[:2], value_size or head_dim), np.float32)
    for sequence, cached in enumerate(cache_lengths):
        begin, end = int(input_row_offsets[sequence]), int(input_row_offsets[sequence + 1])
        length = int(cached) + int(key_offsets[sequence + 1]) - int(key_offsets[sequence])
        if mask != "null":
            # keys after the last query need no pages
            length = min(length, int(cached) + end - begin)
        if begin == end or not length:
            continue
        # pages before the first visible key may be missing from the page table
        first = _first_key(mask, local_window_size, int(cached))
        slots = [slot_of(lookup_table, blocks, sequence, p) for p in range(first, length)]
        pages, rows = (np.array(side) for side in zip(*slots, strict=True))
        # [keys, kv_heads, head_dim]
        keys = decode_rows(blocks[pages, 0, int(layer), rows], head_dim).astype(np.float64)
        # a cache of latents has no side of values: they are the first elements of the keys
        values = keys[..., :value_size]
        if not value_size:
            values = decode_rows(blocks[pages, 1, int(layer), rows], head_dim).astype(np.float64)
        visible = np.stack(
            [_visible(mask, local_window_size, int(cached) + i, length) for i in range(end - begin)]
        )[:, first:]
        for i, bits in enumerate(ancestors[begin:end].tolist()):
            # a mask that is causal begins at key 0
            for other in range(end - begin if bits else 0):
                visible[i, int(cached) + other] = bits >> other & 1
        # query heads of one KV head are neighbors: [tokens, kv_heads, group, head_dim]
        queries = q[begin:end].astype(np.float64).reshape(-1, kv_heads, group, head_dim)
        # [kv_heads, group, tokens, keys]
        scores = np.einsum("tkgd,skd->kgts", queries, keys) * np.float64(scale)
        if softcap:
            scores = np.tanh(scores / softcap) * softcap
        if mask == "causal_alibi":
            slopes = by_head[-1].astype(np.float64).reshape(kv_heads, group, 1, 1)
            positions = int(cached) + np.arange(end - begin)
            scores = scores + slopes * (np.arange(first, length) - positions[:, None])
        scores = np.where(visible[None, None], scores, -np.inf)
        if sinks:
            # a key without value
            sink = by_head[0].astype(np.float64).reshape(kv_heads, group, 1, 1)
            scores = np.concatenate(
                [scores, np.broadcast_to(sink, (*scores.shape[:3], 1))], axis=-1
            )
        scores -= scores.max(axis=-1, keepdims=True)
        weights = np.exp(scores)
        weights /= weights.sum(axis=-1, keepdims=True)
        # the sink's weight only enlarges the denominator
        weights = weights[..., : length - first]
        context = np.einsum("kgts,skd->tkgd", weights, values)
        out[begin:end] = context.reshape(end - begin, heads, -1)
    return out


@register("mo.attention.ragged")
def _attention_ragged(
    q: Array,
    keys: Array,
    values: Array,
    input_row_offsets: Array,
    scale: Array,
    bias: Array | None = None,
    *,
    mask: str = "null",
    local_window_size: int = -1,
) -> Array:
    check_offsets(
        "input_row_offsets", input_row_offsets, max(len(input_row_offsets) - 1, 0), len(q)
    )
    for what, rows in (("keys", keys), ("values", values)):
        if len(rows) != len(q):
            raise ValueError(f"{what} has size {len(rows)}, expected {len(q)}")
    group = q.shape[1] // keys.shape[1]
    out = np.zeros(q.shape, np.float32)
    # no cache: every text attends to its own rows
    for begin, end in itertools.pairwise(int(offset) for offset in input_row_offsets):
        length = end - begin
        if bias is not None and length > bias.shape[1] // 2 + 1:
            raise ValueError(f"a text has {length} rows; the bias is for {bias.shape[1] // 2 + 1}")
        visible = [_visible(mask, local_window_size, i, length) for i in range(length)]
        for head in range(q.shape[1] if length else 0):
            text = slice(begin, end)
            scores = (
                q[text, head].astype(np.float64) @ keys[text, head // group].astype(np.float64).T
            )
            scores *= float(scale)
            if bias is not None:
                # bias: [heads, distances], with distance 0 in the middle
                places = np.arange(length) - np.arange(length)[:, None] + bias.shape[1] // 2
                scores += bias[head][places]
            scores = np.where(np.stack(visible), scores, -np.inf)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            out[text, head] = weights @ values[text, head // group].astype(np.float64)
    return out


@register("mo.check.counts")
def _counts(counts: Array, what: str) -> Array:
    numbers = [int(n) for n in counts]
    if min(numbers, default=0) < 0:
        raise ValueError(f"{what} are {numbers}, expected 0 or more")
    # offsets made of the counts must not overflow int64
    if sum(numbers) > 2**62:
        raise ValueError(f"{what} add up to {sum(numbers)}, more than 2**62")
    return counts


@register("mo.check.offsets")
def _row_offsets(offsets: Array, rows: Array, what: str) -> Array:
    check_offsets(what, offsets, len(offsets) - 1, int(rows))
    return offsets
