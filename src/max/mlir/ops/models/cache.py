"""Ops on a paged KV cache: stores, loads, RoPE, and attention of a ragged batch over its sequences.

A ragged batch concatenates the new tokens of its sequences: ``input_row_offsets`` has the first row of each sequence,
then the number of rows. The cache is a buffer ``blocks [pages, sides, layers, page_size, kv_heads, row]`` with the keys
in side 0 and the values in side 1; ``row`` is `max.dtype.cache_rows.cache_row_elements`. Row ``b`` of ``lookup_table``
has the pages of sequence ``b``, of which ``cache_lengths[b]`` tokens precede the new ones.
"""

from __future__ import annotations

import math

from max.dtype import DType
from max.dtype.cache_rows import cache_row_elements
from max.mlir.declare import NamedTypes, check_float_result, declare, static_dims
from max.mlir.operand import FLOATS, INTEGERS, Operand
from max.mlir.operation import Attrs, Types, define
from max.mlir.types import ShapedType, TensorType

__all__ = ["BATCH", "CACHE", "LAYER", "OFFSETS", "SCALE", "check_window"]

_U32 = (DType.uint32,)
_CACHES = (*FLOATS, DType.int8)

OFFSETS = Operand("input_row_offsets", _U32, 1)
LAYER = Operand("layer_idx", _U32, 0, on_any_device=True)
SCALE = Operand("scale", (DType.float32,), 0, on_any_device=True)
BLOCKS = Operand("blocks", _CACHES, 6, is_buffer=True)
LENGTHS = Operand("cache_lengths", _U32, 1)
TABLE = Operand("lookup_table", _U32, 2)
BATCH = (BLOCKS, LENGTHS, TABLE)
"""The cache and the sequences of a batch in it."""
CACHE = (*BATCH, Operand("max_lengths", _U32, 2, on_any_device=True))
"""The same with the greatest lengths of the batch, as `PagedCacheValues` has them."""


def _has_trees(attrs: Attrs) -> bool:
    return bool(attrs.get("trees", False))


ANCESTORS = Operand("ancestors", (DType.uint64,), 1, present=_has_trees)
"""The new rows of its sequence that each row of a tree of drafted tokens sees, a bit for each."""


def check_window(op: str, attrs: Attrs, default: str, masks: tuple[str, ...]) -> None:
    """Checks the mask of an attention op, and its window.

    Args:
        op: The op.
        attrs: Its attributes; ``mask`` and ``local_window_size`` are optional.
        default: The mask of an op that states none.
        masks: The masks that the op has.

    Raises:
        ValueError: The mask is unknown, or it requires a window and has none.
    """
    mask, window = attrs.get("mask", default), attrs.get("local_window_size", -1)
    if mask not in masks:
        raise ValueError(f"{op}: mask is {mask!r}, expected {', '.join(masks)}")
    if mask in ("sliding_window", "chunked_causal", "symmetric_window") and window < 1:
        raise ValueError(
            f"{op}: the mask {mask} with local_window_size {window}; expected a positive number of tokens"
        )


def _check_row(op: str, blocks: ShapedType, head_dim: int, sides: int = 1) -> int:
    """Checks the cache's rows for heads of `head_dim` elements, and returns the number of KV heads."""
    stored_sides, _, kv_heads, row = static_dims(op, "blocks", blocks, 1, 3, 4, 5)
    expected = cache_row_elements(blocks.dtype, head_dim)
    if row != expected:
        raise ValueError(
            f"{op}: blocks is {blocks.short}; heads of {head_dim} elements take rows of {expected} in "
            f"{blocks.dtype.name}"
        )
    if stored_sides < sides:
        raise ValueError(f"{op}: blocks is {blocks.short}, expected keys and values in axis 1")
    return kv_heads


def _check_rows(op: str, types: NamedTypes, name: str, side: int, sides: int) -> None:
    """Checks rows ``[total, kv_heads * head_dim]`` that are stored in one side of the cache, or loaded from it."""
    blocks, rows = types["blocks"], types[name]
    stored_sides, _, kv_heads, _ = static_dims(op, "blocks", blocks, 1, 3, 4, 5)
    (size,) = static_dims(op, name, rows, 1)
    if kv_heads < 1 or size % kv_heads:
        raise ValueError(
            f"{op}: {name} is {rows.short}, blocks {blocks.short}; expected a multiple of {kv_heads} columns"
        )
    if not 0 <= side < stored_sides:
        raise ValueError(f"{op}: side {side} of blocks {blocks.short}; it has {stored_sides} sides")
    _check_row(op, blocks, size // kv_heads, sides)


def _store_both(types: NamedTypes, attrs: Attrs) -> Types:
    op = "kv_store.ragged.paged"
    for side, name in enumerate(("k", "v")):
        _check_rows(op, types, name, side, 2)
    return ()


define(
    declare(
        "mo.kv_store.ragged.paged",
        # [total, kv_heads * head_dim] each
        (Operand("k", FLOATS, 2), Operand("v", FLOATS, 2), OFFSETS, *CACHE, LAYER),
        0,
        _store_both,
        chained=True,
        takes=(
            "k `[total, kv_heads*head_dim]`, v, input_row_offsets u32 `[batch+1]`, kv…, "
            "layer_idx, chain"
        ),
        gives="chain",
        doc="stores the rows behind the cached tokens of each sequence",
    )
)


def _store_side(types: NamedTypes, attrs: Attrs) -> Types:
    _check_rows("k_store.ragged.paged", types, "rows", attrs["side"], 1)
    return ()


define(
    declare(
        "mo.k_store.ragged.paged",
        # [total, kv_heads * head_dim]
        (Operand("rows", FLOATS, 2), OFFSETS, *BATCH, LAYER),
        0,
        _store_side,
        chained=True,
        attributes={"side": int},
        takes=(
            "rows `[total, kv_heads*head_dim]`, input_row_offsets, blocks, cache_lengths, "
            "lookup_table, layer_idx, chain"
        ),
        gives="chain",
        doc="stores rows in one side of the cache: `side` 0 keys, 1 values",
    )
)


def _check_loaded(types: NamedTypes, results: Types, attrs: Attrs) -> None:
    """The result has the rows of a token range; their number is the value of the operand ``rows``."""
    op = "kv_load.ragged.paged"
    (loaded,) = results
    if not isinstance(loaded, TensorType) or loaded.rank != 2 or not loaded.dtype.is_float():
        raise ValueError(
            f"{op}: the result is {loaded}, expected floats [rows, kv_heads * head_dim]"
        )
    _check_rows(op, {**types, "result": loaded}, "result", attrs["side"], 1)


define(
    declare(
        "mo.kv_load.ragged.paged",
        (
            Operand("offsets", _U32, 1),
            BLOCKS,
            Operand("first_tokens", _U32, 1),
            TABLE,
            LAYER,
            Operand("rows", INTEGERS, 0, on_any_device=True),
        ),
        1,
        result_rule=_check_loaded,
        chained=True,
        attributes={"side": int},
        optional={"head_dim": int},
        takes=(
            "offsets u32 `[batch+1]`, blocks, first tokens u32 `[batch]`, lookup_table, "
            "layer_idx, rows (rank 0), chain"
        ),
        gives="`[rows, kv_heads*head_dim]`, chain",
        doc=(
            "`side`: 0 keys, 1 values; `head_dim`, of an i8 cache; rows past the last offset are 0"
        ),
    )
)


def _rotated_type(types: NamedTypes, attrs: Attrs) -> Types:
    op = "rope.ragged.paged"
    queries, frequencies, blocks = types["q"], types["freqs_cis"], types["blocks"]
    (head_dim,) = static_dims(op, "q", queries, 2)
    (columns,) = static_dims(op, "freqs_cis", frequencies, 1)
    if columns % 2 or columns > head_dim:
        raise ValueError(
            f"{op}: freqs_cis is {frequencies.short}; an even number of columns up to {head_dim}, the size of a "
            "head, fits"
        )
    if attrs.get("rotates_cache", True):
        _check_row(op, blocks, head_dim)
    return (queries,)


define(
    declare(
        "mo.rope.ragged.paged",
        (
            # q: [total, heads, head_dim]; freqs_cis: [positions, cosine and sine of each pair]
            Operand("q", FLOATS, 3),
            OFFSETS,
            Operand("freqs_cis", (DType.float32,), 2),
            *CACHE,
            LAYER,
            ANCESTORS,
        ),
        1,
        _rotated_type,
        chained=True,
        optional={"interleaved": bool, "rotates_cache": bool, "trees": bool},
        takes=(
            "q `[total, heads, head_dim]`, input_row_offsets, freqs_cis f32 `[max_seq, "
            "rope_dim]` (cos, sin interleaved), kv…, layer_idx, [ancestors u64 `[n]`], chain"
        ),
        gives="q, chain",
        doc=(
            "`interleaved`: bool; also rotates in the cache the new K rows, unless "
            "`rotates_cache` is false; `trees`: whether the operands include ancestors; the position "
            "of a row that has some is the number of cached tokens and of its ancestors before it"
        ),
    )
)

_MASKS = ("causal", "causal_alibi", "chunked_causal", "null", "sliding_window")


def _check_attended(types: NamedTypes, results: Types, attrs: Attrs) -> None:
    """The result has the shape of the queries, of values of the attribute ``value_size``, and any float dtype."""
    op = "attention.ragged.paged"
    check_window(op, attrs, "causal", _MASKS)
    queries, blocks = types["q"], types["blocks"]
    heads, head_dim = static_dims(op, "q", queries, 1, 2)
    value_size, softcap = attrs.get("value_size", 0), attrs.get("softcap", 0.0)
    # values that are parts of their keys need no second side
    kv_heads = _check_row(op, blocks, head_dim, sides=1 if value_size else 2)
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"{op}: {heads} query heads cannot share {kv_heads} key heads")
    # values that are parts of their keys exist for latents only, which all heads share
    if not 0 <= value_size <= head_dim or (value_size and kv_heads != 1):
        raise ValueError(
            f"{op}: value_size is {value_size}, expected up to {head_dim}, over one key head; there are {kv_heads}"
        )
    if _has_trees(attrs) and (attrs.get("mask", "causal") != "causal" or attrs.get("cross", False)):
        raise ValueError(
            f"{op}: trees with the mask {attrs.get('mask', 'causal')}; expected causal self attention"
        )
    if not (softcap >= 0 and math.isfinite(softcap)):
        raise ValueError(f"{op}: softcap is {softcap}, expected a finite number from 0")
    for name in ("sink_weights", "alibi_slopes"):
        if name in types and types[name].shape != queries.shape[1:2]:
            raise ValueError(f"{op}: {name} is {types[name].short}, expected [{heads}]")
    check_float_result(
        op, results, queries.with_shape((*queries.shape[:2], value_size or head_dim))
    )


define(
    declare(
        "mo.attention.ragged.paged",
        (
            # [total, heads, head_dim]
            Operand("q", FLOATS, 3),
            OFFSETS,
            *CACHE,
            LAYER,
            SCALE,
            Operand(
                "sink_weights", (DType.float32,), 1, present=lambda attrs: attrs.get("sinks", False)
            ),
            Operand(
                "alibi_slopes",
                (DType.float32,),
                1,
                present=lambda attrs: attrs.get("mask", "causal") == "causal_alibi",
            ),
            Operand(
                "kv_input_row_offsets", _U32, 1, present=lambda attrs: attrs.get("cross", False)
            ),
            ANCESTORS,
        ),
        1,
        result_rule=_check_attended,
        chained=True,
        optional={
            "mask": str,
            "local_window_size": int,
            "softcap": float,
            "sinks": bool,
            "cross": bool,
            "value_size": int,
            "trees": bool,
        },
        takes=(
            "q `[total, heads, head_dim]`, input_row_offsets, kv…, layer_idx, scale f32 "
            "rank 0, [sinks f32 `[heads]`], [slopes f32 `[heads]`], [key offsets u32 "
            "`[batch+1]`], [ancestors u64 `[n]`], chain"
        ),
        gives="out (q's shape, any float dtype), chain",
        doc=(
            "`mask`: causal, causal_alibi (takes slopes), chunked_causal, null, "
            "sliding_window; `local_window_size`; `softcap` (0: none); `sinks`, `cross`: "
            "whether the operands include sinks and key offsets (a sequence's keys are its "
            "cached ones and those of the key offsets); `value_size`: values are the first "
            "elements of keys (0: values are separate); `trees` (with causal): whether the operands include "
            "ancestors, for none or all rows; bit `i` says that a row sees new row `i` of its sequence, of up to "
            "64; 0: it sees all before it"
        ),
    )
)
