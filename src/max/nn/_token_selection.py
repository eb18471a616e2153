"""Sparse attention over cached latents: selection of tokens for each new token, and attention over them."""

from __future__ import annotations

import numpy as np

from max.dtype import DType
from max.graph import DeviceRef, TensorValue, ops
from max.graph.ops._stage import stage_declared
from max.nn.kv_cache.cache_params import KVCacheParams
from max.nn.kv_cache.cache_values import PagedCacheValues

__all__ = ["attend_selected", "select_tokens"]


def select_tokens(
    kv_params: KVCacheParams,
    queries: TensorValue,
    weights: TensorValue,
    count: int,
    input_row_offsets: TensorValue,
    kv_collection: PagedCacheValues,
    layer_idx: TensorValue,
) -> TensorValue:
    """Selects the cached tokens that each new token attends to: those with the greatest scores; ties keep the earliest.

    The score of a token is the sum over heads of ``weight * max(query · key, 0)``; candidates are the new token itself
    and all tokens before it.

    Args:
        kv_params: The parameters of the cache of index keys: one head, with `is_mla`.
        queries: ``[total_seq_len, heads, head_dim]``.
        weights: The weight of each head, ``[total_seq_len, heads]``.
        count: The maximum number of tokens to select.
        input_row_offsets: The first row of each sequence.
        kv_collection: The cache, with the keys of the new tokens stored.
        layer_idx: The index of the layer in the cache.

    Returns:
        int32 ``[total_seq_len, count]``: positions in the sequence in ascending order, padded with -1.

    Raises:
        ValueError: A shape does not fit.
        TypeError: A dtype does not fit.
    """
    kv = kv_collection
    return stage_declared(
        "tokens.select.ragged.paged",
        [
            queries,
            weights,
            input_row_offsets,
            kv.kv_blocks,
            kv.cache_lengths,
            kv.lookup_table,
            layer_idx,
        ],
        {"count": count},
    )[0]


def attend_selected(
    kv_params: KVCacheParams,
    queries: TensorValue,
    selected: TensorValue,
    value_size: int,
    input_row_offsets: TensorValue,
    kv_collection: PagedCacheValues,
    layer_idx: TensorValue,
    scale: float,
) -> TensorValue:
    """Attention over selected latents, shared by all heads: a latent is a key, its first `value_size` elements a value.

    Args:
        kv_params: The parameters of the cache of latents.
        queries: ``[total_seq_len, n_heads, head_dim]``, in the space of the latents.
        selected: The tokens of each row, as `select_tokens` returns them.
        value_size: The size of a value.
        input_row_offsets: The first row of each sequence.
        kv_collection: The cache, with the latents of the new tokens stored.
        layer_idx: The index of the layer in the cache.
        scale: The scale of the attention scores.

    Returns:
        ``[total_seq_len, n_heads, value_size]``, of the queries' dtype.

    Raises:
        ValueError: A shape does not fit.
        TypeError: A dtype does not fit.
    """
    kv = kv_collection
    return stage_declared(
        "attention.selected.paged",
        [
            queries,
            selected,
            input_row_offsets,
            kv.kv_blocks,
            kv.cache_lengths,
            kv.lookup_table,
            layer_idx,
            ops.constant(np.array(scale, np.float32), DType.float32, DeviceRef.CPU()),
        ],
        {"value_size": value_size},
    )[0]
