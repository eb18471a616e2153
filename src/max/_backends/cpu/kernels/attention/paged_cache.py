"""Operands, checks and look-ups of ragged batches over a paged KV cache.

::

    blocks             [pages, 2, layers, page_size, kv_heads, head_dim]    keys at 0, values at 1 of the second axis
    lookup_table       [batch, max_pages]  token t of b: slot t % page_size of page lookup_table[b, t // page_size]
    input_row_offsets  [batch + 1]         row r: token cache_lengths[b] + r - input_row_offsets[b] of its sequence b
"""

from __future__ import annotations

from typing import Any, NamedTuple

from max import kernel as k
from max._backends.cpu.kernels.operand_checks import check_offsets, check_size

CACHE_DIMS = (False, True, False, True, True, True)
"""The dims of a cache that are compile-time constants: all but the numbers of pages and of layers."""
TREE_ROWS = 64
"""The maximum number of new rows of a sequence that are a tree: the bits of a row's ancestors."""


class PagedCache(NamedTuple):
    """The operands of a cache, with the sequences of a batch.

    Args:
        blocks: The cache.
        cache_lengths: Cached tokens of each sequence, `[batch]`.
        lookup_table: Pages of each sequence, `[batch, max_pages]`.
    """

    blocks: k.InOut
    cache_lengths: k.Input
    lookup_table: k.Input


class BatchRows(NamedTuple):
    """The operands that say what the rows of a batch are.

    Args:
        input_row_offsets: First row of each sequence, and the number of rows, `[batch + 1]`.
        ancestors: As in `check_ancestors`; not read where the call has no trees.
    """

    input_row_offsets: k.Input
    ancestors: k.Input


@k.inline
def check_batch(
    input_row_offsets: k.View, rows: k.Value, cache: PagedCache, width: int, kinds: int = 2
) -> None:
    """Raises where offsets, lengths and page table do not describe one ragged batch over a cache.

    Afterwards `place_of` is defined for each row, and positions are not negative. Each worker calls it before it reads
    the batch.

    Args:
        input_row_offsets: First row of each sequence, and the number of rows.
        rows: The number of rows.
        cache: The cache and its sequences.
        width: Offsets per vector.
        kinds: Kinds of pages that the caller reads or writes: keys, or keys and values.
    """
    # offsets and lengths are data: nothing is read by them before they are checked
    blocks, cache_lengths, lookup_table = cache
    check_size("input_row_offsets", input_row_offsets.size, cache_lengths.size + 1)
    check_size("lookup_table", lookup_table.shape[0], cache_lengths.size)
    check_offsets("input_row_offsets", input_row_offsets, rows, width)
    if blocks.shape[1] < kinds or blocks.shape[3] == 0:
        raise ValueError(
            "the cache has {} kinds of pages of {} tokens, expected {} (keys, values) of 1 or more",
            blocks.shape[1],
            blocks.shape[3],
            kinds,
        )


@k.inline
def sequence_of(input_row_offsets: k.View, batch: k.Value, token: k.Value) -> Any:
    """The sequence that holds a row of the ragged batch.

    Args:
        input_row_offsets: First row of each sequence, and the number of rows, `[batch + 1]`, checked by `check_batch`.
        batch: Number of sequences.
        token: The row.
    """
    low = k.i64(0)
    high = k.i64(batch - 1)
    # the first sequence whose end is past the row; empty sequences are skipped
    while low < high:
        middle = (low + high) // 2
        if k.i64(input_row_offsets[middle + 1]) > token:
            high = middle
        else:
            low = middle + 1
    return low


@k.inline
def place_of(input_row_offsets: k.View, cache: PagedCache, row: k.Value) -> Any:
    """The sequence of a row of the ragged batch, and the row's position in it; `check_batch` has checked the batch."""
    sequence = sequence_of(input_row_offsets, cache.cache_lengths.size, row)
    return sequence, k.i64(cache.cache_lengths[sequence]) + row - k.i64(input_row_offsets[sequence])


@k.inline
def check_ancestors(ancestors: k.View, input_row_offsets: k.View, rows: k.Value) -> None:
    """Raises where the ancestors of rows are none: each row of a tree sees itself, and no later row of its sequence.

    Args:
        ancestors: For each row a bit for each new row of its sequence that it sees, or 0 for a row that sees all rows
            before it; empty where no sequence has a tree.
        input_row_offsets: First row of each sequence, and the number of rows, checked by `check_batch`.
        rows: The number of rows.
    """
    if ancestors.shape[0] > 0:
        check_size("ancestors", ancestors.shape[0], rows)
        for b in range(input_row_offsets.size - 1):
            first = k.i64(input_row_offsets[b])
            for own in range(k.i64(input_row_offsets[b + 1]) - first):
                mask = ancestors[first + own]
                if mask != 0:
                    # bits past the last one would be lost in a shift
                    if own >= TREE_ROWS or mask >> k.u64(k.min(own, TREE_ROWS - 1)) != 1:
                        raise ValueError(
                            "ancestors of row {} of sequence {} are {}; expected its own bit as the highest of {}",
                            own,
                            b,
                            mask,
                            TREE_ROWS,
                        )


@k.inline
def tree_position(ancestors: k.View, row: k.Value, position: k.Value, first: k.Value) -> Any:
    """The position of a row in its text: the number of its ancestors after the cached tokens.

    Args:
        ancestors: As in `check_ancestors`, which has checked them.
        row: The row of the ragged batch.
        position: The place of its key in the sequence.
        first: The first row of the sequence.
    """
    place = k.i64(position)
    if ancestors.shape[0] > 0:
        mask = ancestors[row]
        if mask != 0:
            # the position counts all new rows before this one; its text has only the ancestors
            place = place - (row - first) + k.i64(k.popcount(mask)) - 1
    return place


@k.inline
def page_of(blocks: k.View, lookup_table: k.View, sequence: k.Integer, position: k.Value) -> Any:
    """The page of a token; raises where the sequence or the cache does not have it.

    Args:
        blocks: The cache.
        lookup_table: Pages of each sequence, `[batch, max_pages]`.
        sequence: The sequence.
        position: The token's position in it.
    """
    slot = position // blocks.shape[3]
    if slot >= lookup_table.shape[1]:
        raise IndexError(
            "sequence {}: position {} lies beyond its {} pages",
            sequence,
            position,
            lookup_table.shape[1],
        )
    page = k.i64(lookup_table[sequence, slot])
    # the table is data: it may name any page
    if page >= blocks.shape[0]:
        raise IndexError(
            "sequence {}: page {} at position {}; the cache has {} pages",
            sequence,
            page,
            position,
            blocks.shape[0],
        )
    return page


@k.inline
def layer_of(blocks: k.View, layer_index: k.View) -> Any:
    """The layer that `layer_index` `[1]` names; raises where the cache has no such layer.

    Args:
        blocks: The cache.
        layer_index: The layer.
    """
    layer = k.i64(layer_index[0])
    if layer >= blocks.shape[2]:
        raise IndexError("layer {}; the cache has {} layers", layer, blocks.shape[2])
    return layer
