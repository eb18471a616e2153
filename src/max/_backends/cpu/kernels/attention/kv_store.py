"""Storing the new keys and values of a ragged batch in the paged cache: a task is a token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from max import kernel as k
from max._backends.cpu.kernels.attention.cache_formats import check_heads, store_heads
from max._backends.cpu.kernels.attention.paged_cache import (
    CACHE_DIMS,
    PagedCache,
    check_batch,
    layer_of,
    page_of,
    place_of,
)
from max._backends.cpu.kernels.operand_checks import check_size
from max._backends.kernel_call import KernelCall, Operand, view


@k.kernel
def kv_store(
    keys: k.Input,
    values: k.Input,
    input_row_offsets: k.Input,
    cache: PagedCache,
    max_lengths: k.Input,
    layer_index: k.Input,
    ctx: k.Context,
) -> None:
    """Writes row `i` of `keys` and `values` `[total, kv_heads * head_dim]` to the slot of its token."""
    width = ctx.target.width(k.f32)
    blocks, _, lookup_table = cache
    layer = layer_of(blocks, layer_index)
    size = keys.shape[1]
    check_batch(input_row_offsets, keys.shape[0], cache, width)
    check_heads("a key", size, blocks)
    check_size("a value", values.shape[1], size)
    check_size("values", values.shape[0], keys.shape[0])
    # slots of different tokens are disjoint, so tasks need no order
    for token in ctx.parallel(keys.shape[0]):
        sequence, position = place_of(input_row_offsets, cache, token)
        page = page_of(blocks, lookup_table, sequence, position)
        slot = position % blocks.shape[3]
        store_heads(blocks[page, 0, layer, slot], keys[token], width)  # [kv_heads, row size]
        store_heads(blocks[page, 1, layer, slot], values[token], width)


def _lower_kv_store(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    """The call for `mo.kv_store.ragged.paged`; the sizes of a page and a head are static."""
    blocks = operands[3]
    args = (
        view("operand", 0, operands[0]),
        view("operand", 1, operands[1]),
        view("operand", 2, operands[2], static=False),
        view("operand", 3, blocks, static=CACHE_DIMS),
        view("operand", 4, operands[4], static=False),
        view("operand", 5, operands[5], static=False),
        view("operand", 6, operands[6], static=False),
        view("operand", 7, operands[7], ((),)),
    )
    return KernelCall(kv_store, args)


LOWERINGS = {"mo.kv_store.ragged.paged": _lower_kv_store}
