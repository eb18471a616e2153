"""Copies between the paged cache and plain tensors: loads keys or values of some tokens, stores new keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from max import kernel as k
from max._backends.cpu.kernels.attention.cache_formats import (
    check_heads,
    load_head,
    store_heads,
)
from max._backends.cpu.kernels.attention.paged_cache import (
    CACHE_DIMS,
    PagedCache,
    check_batch,
    layer_of,
    page_of,
    place_of,
    sequence_of,
)
from max._backends.cpu.kernels.operand_checks import check_rising, check_size
from max._backends.kernel_call import KernelCall, Operand, view


@k.kernel
def cache_load(
    out: k.Output,
    offsets: k.Input,
    blocks: k.InOut,
    starts: k.Input,
    lookup_table: k.Input,
    layer_index: k.Input,
    count: k.Input,
    ctx: k.Context,
    *,
    side: int,
) -> None:
    """Row `offsets[b] + i` of `out` `[rows, kv_heads * head_dim]` is the key (`side` 0) or value (1) of token
    `starts[b] + i` of sequence `b`.

    Rows past the last offset are 0. `count` is the number of rows.
    """
    width = ctx.target.width(k.f32)
    layer = layer_of(blocks, layer_index)
    batch = starts.size
    size = out.shape[1]
    if k.i64(count[0]) != out.shape[0]:
        raise ValueError("{} rows of a result of {}", count[0], out.shape[0])
    check_size("offsets", offsets.size, batch + 1)
    check_size("lookup_table", lookup_table.shape[0], batch)
    check_heads("a row", size, blocks)
    check_rising("offsets", offsets, width)
    # offsets may end before the result does, where a buffer is larger than its batch
    rows = k.i64(offsets[batch])
    if k.i64(offsets[0]) != 0 or rows > out.shape[0]:
        raise ValueError(
            "offsets are {} to {}, expected 0 to at most {}", offsets[0], rows, out.shape[0]
        )
    if blocks.shape[1] <= side or blocks.shape[3] == 0:
        raise ValueError(
            "the cache has {} kinds of pages of {} tokens", blocks.shape[1], blocks.shape[3]
        )
    for row in ctx.parallel(out.shape[0]):
        if row < rows:
            sequence = sequence_of(offsets, batch, row)
            # the first offset is 0 and offsets rise: each row below `rows` has a sequence
            position = k.i64(starts[sequence]) + row - k.i64(offsets[sequence])
            page = page_of(blocks, lookup_table, sequence, position)
            heads = blocks.shape[4]
            source = blocks[page, side, layer, position % blocks.shape[3]]  # [kv_heads, row size]
            for head in range(heads):
                part = size // heads
                load_head(out[row][head * part : (head + 1) * part], source[head], width)
        else:
            # the buffer is not zeroed by its allocation: unused rows are defined as 0
            for j, mask in k.vectors(size, width):
                out.store(row, j, value=k.splat(k.f32(0), width), mask=mask)


@k.kernel
def key_store(
    keys: k.Input,
    input_row_offsets: k.Input,
    cache: PagedCache,
    layer_index: k.Input,
    ctx: k.Context,
    *,
    side: int,
) -> None:
    """Writes row `i` of `keys` `[total, kv_heads * head_dim]` to its token's slot of keys (`side` 0) or values (1)."""
    width = ctx.target.width(k.f32)
    blocks, _, lookup_table = cache
    layer = layer_of(blocks, layer_index)
    size = keys.shape[1]
    # a cache of latents has one kind of page, so only `side + 1` are required
    check_batch(input_row_offsets, keys.shape[0], cache, width, side + 1)
    check_heads("a row", size, blocks)
    for token in ctx.parallel(keys.shape[0]):
        sequence, position = place_of(input_row_offsets, cache, token)
        page = page_of(blocks, lookup_table, sequence, position)
        store_heads(blocks[page, side, layer, position % blocks.shape[3]], keys[token], width)


def _lower_load(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    """The call for `mo.kv_load.ragged.paged`."""
    (out,) = results
    args = (
        view("result", 0, out, static=(False, True)),
        view("operand", 0, operands[0], static=False),
        view("operand", 1, operands[1], static=CACHE_DIMS),
        view("operand", 2, operands[2], static=False),
        view("operand", 3, operands[3], static=False),
        view("operand", 4, operands[4], ((),)),
        view("operand", 5, operands[5], ((),)),
    )
    return KernelCall(cache_load, args, {"side": int(attributes["side"])})


def _lower_store(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    """The call for `mo.k_store.ragged.paged`."""
    args = (
        view("operand", 0, operands[0], static=(False, True)),
        view("operand", 1, operands[1], static=False),
        view("operand", 2, operands[2], static=CACHE_DIMS),
        view("operand", 3, operands[3], static=False),
        view("operand", 4, operands[4], static=False),
        view("operand", 5, operands[5], ((),)),
    )
    return KernelCall(key_store, args, {"side": int(attributes["side"])})


LOWERINGS = {"mo.kv_load.ragged.paged": _lower_load, "mo.k_store.ragged.paged": _lower_store}
