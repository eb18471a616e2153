"""Checks and look-ups of ragged batches over a paged KV cache.

The cache is `[pages, 2, layers, page_size, kv_heads, head_dim]` (keys at 0, values at 1 of the second axis). Token `t` of sequence
`b` is in slot `t % page_size` of page `lookup_table[b, t // page_size]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from max import kernel as k
from max._kernel_library.lowering import Operand
from max.dtype import DType

UNSIGNED = (DType.uint8, DType.uint16, DType.uint32)
"""Dtypes of offsets, lengths, pages and layers: no element is negative, and all fit 64 bits with their sums."""


def unsigned(op: str, operands: Sequence[Operand]) -> None:
    """Checks the dtypes of counts and numbers.

    Args:
        op: The op.
        operands: The operands.

    Raises:
        NotImplementedError: The dtype of one is not in `UNSIGNED`.
    """
    for operand in operands:
        if operand.dtype not in UNSIGNED:
            raise NotImplementedError(
                f"{op}: offsets, lengths, pages and layers of {operand.dtype.name}; uint32 would fit"
            )


@k.inline
def check_size(what: str, size: Any, expected: Any) -> None:
    """Raises where a size is not that of the other operands.

    Args:
        what: What it is the size of (compile time).
        size: The size.
        expected: The size that fits.
    """
    if size != expected:
        raise ValueError("{} has size {}, expected {}", what, size, expected)


@k.inline
def check_rising(what: str, offsets: Any, width: int) -> None:
    """Raises where an offset is less than the one before it.

    Args:
        what: Their name (compile time).
        offsets: `[batch + 1]`.
        width: Offsets per vector.
    """
    for j, mask in k.vectors(offsets.shape[0] - 1, width):
        current = offsets.load(j, width=width, mask=mask)
        falls = current > offsets.load(j + 1, width=width, mask=mask)
        if mask is not None:
            falls = falls & mask
        if k.any(falls):
            at = k.i64(j)
            while offsets[at] <= offsets[at + 1]:
                at += 1
            raise ValueError(
                "{}[{}] is {}, expected {} or more, the one before",
                what,
                at + 1,
                offsets[at + 1],
                offsets[at],
            )


@k.inline
def check_offsets(what: str, offsets: Any, rows: Any, width: int) -> None:
    """Raises unless the offsets begin at 0, never fall, and end at the number of rows: each row then belongs to one sequence.

    Args:
        what: Their name (compile time).
        offsets: `[batch + 1]`.
        rows: The number of rows.
        width: Offsets per vector.
    """
    last = offsets.shape[0] - 1
    if last < 0:
        raise ValueError("{} is empty, expected the first row of each sequence and {}", what, rows)
    if k.i64(offsets[0]) != 0:
        raise ValueError("{}[0] is {}, expected 0", what, offsets[0])
    if k.i64(offsets[last]) != rows:
        raise ValueError(
            "{}[{}] is {}, expected {}, the number of rows", what, last, offsets[last], rows
        )
    check_rising(what, offsets, width)


@k.inline
def check_batch(
    offsets: Any, rows: Any, blocks: Any, cache_lengths: Any, lookup_table: Any, width: int,
    kinds: int = 2,
) -> None:  # fmt: skip
    """Raises where offsets, lengths and page table do not describe one ragged batch over a cache.

    After it `sequence_of` finds the sequence of each row, and positions are not negative. Each worker calls it before it reads the batch.

    Args:
        offsets: First row of each sequence, and the number of rows.
        rows: The number of rows.
        blocks: The cache.
        cache_lengths: Cached tokens of each sequence.
        lookup_table: Pages of each sequence.
        width: Offsets per vector.
        kinds: Kinds of pages that the caller reads or writes: keys, or keys and values.
    """
    check_size("input_row_offsets", offsets.shape[0], cache_lengths.shape[0] + 1)
    check_size("lookup_table", lookup_table.shape[0], cache_lengths.shape[0])
    check_offsets("input_row_offsets", offsets, rows, width)
    if blocks.shape[1] < kinds or blocks.shape[3] == 0:
        raise ValueError(
            "the cache has {} kinds of pages of {} tokens, expected {} (keys, values) of 1 or more",
            blocks.shape[1],
            blocks.shape[3],
            kinds,
        )


@k.inline
def sequence_of(offsets: Any, batch: Any, token: Any) -> Any:
    """The sequence that holds a row of the ragged batch.

    Args:
        offsets: First row of each sequence, and the number of rows, `[batch + 1]`, checked by `check_batch`.
        batch: Number of sequences.
        token: The row.
    """
    low = k.i64(0)
    high = k.i64(batch - 1)
    while low < high:
        middle = (low + high) // 2
        if k.i64(offsets[middle + 1]) > token:
            high = middle
        else:
            low = middle + 1
    return low


@k.inline
def page_of(blocks: Any, lookup_table: Any, sequence: Any, position: Any) -> Any:
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
def layer_of(blocks: Any, layer_index: Any) -> Any:
    """The layer that `layer_index` `[1]` names; raises where the cache has no such layer.

    Args:
        blocks: The cache.
        layer_index: The layer.
    """
    layer = k.i64(layer_index[0])
    if layer >= blocks.shape[2]:
        raise IndexError("layer {}; the cache has {} layers", layer, blocks.shape[2])
    return layer
