"""Ops over cached latents: attention with expanded or shared keys, and the selection of tokens."""

from __future__ import annotations

from max.dtype import DType
from max.dtype.cache_rows import cache_row_elements
from max.mlir.declare import NamedTypes, declare, static_dims
from max.mlir.operand import FLOATS, Operand
from max.mlir.operation import Attrs, Types, define
from max.mlir.ops.models.cache import BATCH, LAYER, LENGTHS, OFFSETS, SCALE
from max.mlir.types import TensorType

_U32 = (DType.uint32,)
_PLAN = {"least_rows": int, "most_cached": int, "saved": int, "spent": int, "count": int}


def _prefill_types(types: NamedTypes, attrs: Attrs) -> Types:
    """The output and the maximum and total of each row's softmax."""
    op = "mla.prefill.ragged.paged"
    queries, keys, values, blocks = (types[name] for name in ("q", "k", "v", "blocks"))
    heads, size = static_dims(op, "q", queries, 1, 2)
    key_heads, plain = static_dims(op, "k", keys, 1, 2)
    value_heads, value_size = static_dims(op, "v", values, 1, 2)
    if not heads == key_heads == value_heads or plain > size or keys.dtype is not values.dtype:
        raise ValueError(
            f"{op}: q is {queries.short}, k {keys.short}, v {values.short}; expected one number of heads, keys up to "
            "the size of the queries, and one dtype of keys and values"
        )
    if blocks.dtype is DType.int8:
        raise TypeError(f"{op}: blocks is {blocks.short}, expected a floating-point type")
    kv_heads, row = static_dims(op, "blocks", blocks, 4, 5)
    if kv_heads < 1 or row < size - plain:
        raise ValueError(
            f"{op}: blocks is {blocks.short}; the queries read {size - plain} rotated elements of a latent"
        )
    rows = queries.shape[0]
    out = queries.with_shape((rows, heads, value_size))
    info = TensorType.get(DType.float32, queries.with_shape((rows, heads, 2)).shape, queries.device)
    for name, expected in (("previous_out", out), ("previous_info", info)):
        # the number of rows, which may be another symbol, is compared when the kernel runs
        if name in types and types[name].shape[1:] != expected.shape[1:]:
            raise ValueError(f"{op}: {name} is {types[name].short}, expected {expected.short}")
    return (out, info)


define(
    declare(
        "mo.mla.prefill.ragged.paged",
        (
            # q: [total, heads, plain + rotated], k: [buffer, heads, plain], v: [buffer, heads, v]
            Operand("q", FLOATS, 3),
            Operand("k", FLOATS, 3),
            Operand("v", FLOATS, 3),
            OFFSETS,
            Operand("buffer_row_offsets", _U32, 1),
            Operand("cache_offsets", _U32, 1),
            *BATCH,
            LAYER,
            SCALE,
            Operand("previous_out", FLOATS, 3, optional=True),
            Operand("previous_info", FLOATS, 3, optional=True),
        ),
        2,
        _prefill_types,
        chained=True,
        attributes={"causal": bool},
        takes=(
            "q `[total, heads, size]`, k `[buffer, heads, plain]`, v `[buffer, heads, "
            "value]`, input_row_offsets, buffer offsets u32 `[batch+1]`, first tokens u32 "
            "`[batch]`, blocks, cache_lengths, lookup_table, layer_idx, scale f32, [out and"
            " info of the chunks before], chain"
        ),
        gives=("out `[total, heads, value]`, info f32 `[total, heads, 2]` (maximum, total), chain"),
        doc=(
            "`causal`; the last `size - plain` elements of a latent belong to the keys of all heads"
        ),
    )
)


def _plan_types(types: NamedTypes, attrs: Attrs) -> Types:
    negative = [name for name in _PLAN if attrs[name] < 0]
    if negative:
        raise ValueError(
            f"latents.plan.ragged: {negative[0]} is {attrs[negative[0]]}, expected 0 or more"
        )
    offsets = types["input_row_offsets"]
    return (TensorType.get(DType.int32, offsets.with_shape((2,)).shape, offsets.device),)


define(
    declare(
        "mo.latents.plan.ragged",
        (OFFSETS, LENGTHS),
        1,
        _plan_types,
        attributes=_PLAN,
        takes="input_row_offsets, cache_lengths",
        gives="i32 `[2]`: whether keys and values are expanded, whether tokens are selected",
        doc=(
            "`least_rows`, `most_cached`, `saved`, `spent`, `count` (0: never); "
            "batch-invariant kernels expand nothing and always select"
        ),
    ),
)


def _check_latent(op: str, types: NamedTypes) -> tuple[int, int]:
    """Checks queries over one cached key that all heads share; returns the number of heads and the key's size."""
    queries, blocks = types["q"], types["blocks"]
    heads, head_dim = static_dims(op, "q", queries, 1, 2)
    if blocks.dtype is DType.int8:
        raise TypeError(f"{op}: blocks is {blocks.short}, expected a floating-point type")
    if static_dims(op, "blocks", blocks, 4, 5) != (1, cache_row_elements(blocks.dtype, head_dim)):
        raise ValueError(
            f"{op}: q is {queries.short}, blocks {blocks.short}; expected one key head of {head_dim} elements"
        )
    return heads, head_dim


def _selection_types(types: NamedTypes, attrs: Attrs) -> Types:
    op, count = "tokens.select.ragged.paged", attrs["count"]
    heads, _ = _check_latent(op, types)
    queries, weights = types["q"], types["weights"]
    if weights.shape[1] != heads:
        raise ValueError(f"{op}: weights is {weights.short}, expected [total_seq_len, {heads}]")
    if count < 1:
        raise ValueError(f"{op}: count is {count}, expected 1 or more")
    shape = queries.with_shape((queries.shape[0], count)).shape
    return (TensorType.get(DType.int32, shape, queries.device),)


define(
    declare(
        "mo.tokens.select.ragged.paged",
        # q: [total, heads, head_dim]; weights: [total, heads]
        (Operand("q", FLOATS, 3), Operand("weights", FLOATS, 2), OFFSETS, *BATCH, LAYER),
        1,
        _selection_types,
        chained=True,
        attributes={"count": int},
        takes=(
            "q `[total, heads, size]`, weights `[total, heads]`, input_row_offsets, blocks "
            "(one key of `size` a token), cache_lengths, lookup_table, layer_idx, chain"
        ),
        gives="out i32 `[total, count]`, chain",
        doc=(
            "`count`; tokens of the greatest `Σ weight · max(q · key, 0)` in rising order, "
            "then -1; of equal scores the earlier ones"
        ),
    )
)


def _attention_types(types: NamedTypes, attrs: Attrs) -> Types:
    op, value_size = "attention.selected.paged", attrs["value_size"]
    _, head_dim = _check_latent(op, types)
    queries = types["q"]
    if not 0 < value_size <= head_dim:
        raise ValueError(f"{op}: value_size is {value_size}, expected 1 to {head_dim}")
    return (queries.with_shape((*queries.shape[:2], value_size)),)


define(
    declare(
        "mo.attention.selected.paged",
        (
            # q: [total, heads, head_dim]; selected: [total, count], rising, then negative numbers
            Operand("q", FLOATS, 3),
            Operand("selected", (DType.int32,), 2),
            OFFSETS,
            *BATCH,
            LAYER,
            SCALE,
        ),
        1,
        _attention_types,
        chained=True,
        attributes={"value_size": int},
        takes=(
            "q `[total, heads, size]`, selected i32 `[total, count]`, input_row_offsets, "
            "blocks (one latent of `size` a token), cache_lengths, lookup_table, layer_idx,"
            " scale f32, chain"
        ),
        gives="out `[total, heads, value_size]`, chain",
        doc="`value_size`: values are the first elements of latents",
    )
)
