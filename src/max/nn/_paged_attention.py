"""The ops of attention over a paged KV cache: projections, rotation, stores and attention of ragged batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from max.dtype import DType
from max.graph import (
    DeviceRef,
    TensorType,
    TensorValue,
    TensorValueLike,
    ops,
)
from max.graph.ops._stage import stage_declared
from max.nn._cache_rows import (
    for_cache,
)
from max.nn._projection import matmul_input, project
from max.nn.attention.mask_config import MHAMaskVariant
from max.nn.kv_cache.cache_params import KVCacheParams
from max.nn.kv_cache.cache_values import PagedCacheValues

MASKS: dict[MHAMaskVariant, str] = {
    MHAMaskVariant.CAUSAL_MASK: "causal",
    MHAMaskVariant.CAUSAL_ALIBI_MASK: "causal_alibi",
    MHAMaskVariant.NULL_MASK: "null",
    MHAMaskVariant.CHUNKED_CAUSAL_MASK: "chunked_causal",
    MHAMaskVariant.SLIDING_WINDOW_CAUSAL_MASK: "sliding_window",
}
"""The name in the attention kernel of each mask."""


def _check_cache(op: str, params: KVCacheParams, kv: PagedCacheValues) -> None:
    blocks = kv.kv_blocks
    kinds = 1 if params.is_mla else 2
    heads, row = params.n_kv_heads_per_device, params.stored_head_dim
    expected_shape = [kinds, None, params.page_size, heads, row]
    fits = blocks.rank == 6 and all(
        size is None or dim == size
        for dim, size in zip(blocks.shape[1:], expected_shape, strict=True)
    )
    if blocks.dtype is not params.dtype or not fits:
        raise ValueError(
            f"{op}: the cache's pages are {blocks!r}; kv_params says {params.dtype.name} [pages, {kinds}, "
            f"layers, {params.page_size}, {heads}, {row}]"
        )


def store_kv_cache_ragged(
    kv_params: KVCacheParams,
    k: TensorValue,
    v: TensorValue,
    input_row_offsets: TensorValue,
    kv_collection: PagedCacheValues,
    layer_idx: TensorValue,
) -> None:
    """Writes the keys and values of new tokens to the cache.

    Args:
        kv_params: The parameters of the cache.
        k: ``[total_seq_len, kv_heads * head_dim]``; rounded to the cache's dtype.
        v: The values, of the shape of the keys.
        input_row_offsets: The first row of each sequence.
        kv_collection: The cache.
        layer_idx: The index of the layer in the cache.

    Raises:
        ValueError: A shape does not fit.
        TypeError: A dtype does not fit.
    """
    op = "store_kv_cache_ragged"
    _check_cache(op, kv_params, kv_collection)
    stage_declared(
        "kv_store.ragged.paged",
        [
            for_cache(kv_params, k),
            for_cache(kv_params, v),
            input_row_offsets,
            *kv_collection,
            layer_idx,
        ],
    )


def fused_qkv_ragged_matmul(
    kv_params: KVCacheParams,
    input: TensorValue,
    input_row_offsets: TensorValue,
    wqkv: TensorValue,
    kv_collection: PagedCacheValues,
    layer_idx: TensorValue,
    n_heads: int,
    bias: TensorValue | None = None,
) -> TensorValue:
    """Projects to queries, keys and values, and writes keys and values to the cache.

    Args:
        kv_params: The parameters of the cache.
        input: ``[total_seq_len, hidden_size]``.
        input_row_offsets: The first row of each sequence.
        wqkv: ``[(n_heads + 2 * kv_heads) * head_dim, hidden_size]``: the rows for queries, then keys, then values.
        kv_collection: The cache.
        layer_idx: The index of the layer in the cache.
        n_heads: The number of query heads.
        bias: ``[(n_heads + 2 * kv_heads) * head_dim]``.

    Returns:
        The queries ``[total_seq_len, n_heads * head_dim]``, of the weight's dtype.

    Raises:
        ValueError: A shape does not fit.
        TypeError: A dtype does not fit.
    """
    op = "fused_qkv_ragged_matmul"
    if input.rank != 2:
        raise ValueError(f"{op}: the input is {input!r}, expected [total_seq_len, hidden_size]")
    q_width = n_heads * kv_params.head_dim
    kv_width = kv_params.n_kv_heads_per_device * kv_params.head_dim
    if wqkv.rank != 2 or wqkv.shape[0] != q_width + 2 * kv_width:
        raise ValueError(
            f"{op}: wqkv is {wqkv!r}; {n_heads} query heads and twice "
            f"{kv_params.n_kv_heads_per_device} key heads of {kv_params.head_dim} need "
            f"{q_width + 2 * kv_width} rows"
        )
    qkv = project(matmul_input(input, wqkv), wqkv, bias)
    q, k, v = ops.split(qkv, [q_width, kv_width, kv_width], axis=1)
    store_kv_cache_ragged(kv_params, k, v, input_row_offsets, kv_collection, layer_idx)
    return q


def matmul_kv_cache_ragged(
    kv_params: KVCacheParams,
    hidden_states: TensorValue,
    input_row_offsets: TensorValue,
    weight: TensorValue,
    kv_collection: PagedCacheValues,
    layer_idx: TensorValue,
) -> None:
    """Projects to keys and values, and writes them to the cache.

    Args:
        kv_params: The parameters of the cache.
        hidden_states: ``[total_seq_len, hidden_size]``.
        input_row_offsets: The first row of each sequence.
        weight: ``[2 * kv_heads * head_dim, hidden_size]``: the rows for keys, then for values.
        kv_collection: The cache.
        layer_idx: The index of the layer in the cache.

    Raises:
        ValueError: A shape does not fit.
        TypeError: A dtype does not fit.
    """
    width = kv_params.n_kv_heads_per_device * kv_params.head_dim
    if weight.rank != 2 or weight.shape[0] != 2 * width:
        raise ValueError(
            f"matmul_kv_cache_ragged: the weight is {weight!r}, expected {2 * width} rows"
        )
    kv = project(matmul_input(hidden_states, weight), weight)
    k, v = ops.split(kv, [width, width], axis=1)
    store_kv_cache_ragged(kv_params, k, v, input_row_offsets, kv_collection, layer_idx)


def fused_qk_ragged_rope(
    kv_params: KVCacheParams,
    input: TensorValue,
    input_row_offsets: TensorValue,
    kv_collection: PagedCacheValues,
    freqs_cis: TensorValue,
    layer_idx: TensorValue,
    interleaved: bool = True,
    position_ids: TensorValue | None = None,
    mrope_section: list[int] | None = None,
) -> TensorValue:
    """Applies RoPE to queries, and in place to the keys of the new tokens in the cache.

    The position of a token is the number of tokens before it in its sequence. Keys in an 8-bit cache are rounded a
    second time; to avoid it, rotate them with `rotate_ragged` before they are stored.

    Args:
        kv_params: The parameters of the cache.
        input: The queries ``[total_seq_len, n_heads, head_dim]``.
        input_row_offsets: The first row of each sequence.
        kv_collection: The cache, with the new keys stored.
        freqs_cis: Interleaved cosines and sines, one row per position; cast to float32.
        layer_idx: The index of the layer in the cache.
        interleaved: Whether the two elements of a rotated pair are adjacent.
        position_ids: Explicit positions; not supported yet.
        mrope_section: Sections of positions; not supported yet.

    Returns:
        The rotated queries, of the input's shape and dtype.

    Raises:
        ValueError: A shape does not fit.
        TypeError: A dtype does not fit.
        NotImplementedError: `position_ids` or `mrope_section` is given.
    """
    op = "fused_qk_ragged_rope"
    if position_ids is not None or mrope_section is not None:
        raise NotImplementedError(f"{op}: positions are counted in the cache; position_ids and "
                                  "mrope_section have no kernel yet")  # fmt: skip
    return _rotated(
        op, kv_params, input, input_row_offsets, kv_collection, freqs_cis, layer_idx,
        {"interleaved": interleaved},
    )  # fmt: skip


def rotate_ragged(
    kv_params: KVCacheParams,
    input: TensorValue,
    input_row_offsets: TensorValue,
    kv_collection: PagedCacheValues,
    freqs_cis: TensorValue,
    layer_idx: TensorValue,
    interleaved: bool = True,
) -> TensorValue:
    """Applies RoPE to queries, or to keys that are not stored yet. The cache is not changed.

    Args:
        kv_params: The parameters of the cache.
        input: ``[total_seq_len, heads, head_dim]``.
        input_row_offsets: The first row of each sequence.
        kv_collection: The cache.
        freqs_cis: Interleaved cosines and sines, one row per position; cast to float32.
        layer_idx: The index of the layer in the cache.
        interleaved: Whether the two elements of a rotated pair are adjacent.

    Returns:
        The rotated heads, of the input's shape and dtype.

    Raises:
        ValueError: A shape does not fit.
        TypeError: A dtype does not fit.
    """
    return _rotated(
        "rotate_ragged", kv_params, input, input_row_offsets, kv_collection, freqs_cis, layer_idx,
        {"interleaved": interleaved, "rotates_cache": False},
    )  # fmt: skip


def _rotated(
    op: str, kv_params: KVCacheParams, input: TensorValue, input_row_offsets: TensorValue,
    kv_collection: PagedCacheValues, freqs_cis: TensorValue, layer_idx: TensorValue,
    parameters: dict[str, bool | int | str | DType],
) -> TensorValue:  # fmt: skip
    _check_cache(op, kv_params, kv_collection)
    return stage_declared(
        "rope.ragged.paged",
        [
            input,
            input_row_offsets,
            ops.cast(freqs_cis, DType.float32),
            *kv_collection,
            layer_idx,
        ],
        parameters,
    )[0]


def flash_attention_ragged(
    kv_params: KVCacheParams,
    input: TensorValue,
    input_row_offsets: TensorValue,
    kv_collection: PagedCacheValues,
    layer_idx: TensorValue,
    mask_variant: MHAMaskVariant,
    scale: float,
    local_window_size: int = -1,
    sink_weights: TensorValue | None = None,
    *,
    softcap: float | None = None,
    alibi_slopes: TensorValueLike | None = None,
    out_dtype: DType | None = None,
) -> TensorValue:
    """``softmax(scale * q kᵀ + mask) v`` of new tokens over their sequences in the cache.

    Sums and softmax are computed in float32. Query head ``i`` reads KV head
    ``i // (n_heads // kv_heads)``.

    A soft cap replaces scores by ``softcap * tanh(scale * q kᵀ / softcap)``, before the mask. A sink is an extra logit
    without a value: the softmax denominator of head ``h`` includes ``exp(sink_weights[h])``. The mask
    ``CAUSAL_ALIBI_MASK`` adds ``alibi_slopes[h] * (key position - query position)`` to the scores.

    Args:
        kv_params: The parameters of the cache.
        input: The queries ``[total_seq_len, n_heads, head_dim]``.
        input_row_offsets: The first row of each sequence.
        kv_collection: The cache, with the new keys and values stored.
        layer_idx: The index of the layer in the cache.
        mask_variant: The mask, which selects the keys that a query attends to.
        scale: The scale of the attention scores.
        local_window_size: The window of the sliding-window mask, or the chunk size of the chunked mask.
        sink_weights: The logit of the sink of each head, ``[n_heads]``; cast to float32.
        softcap: The bound of soft-capped scores; None or 0: no soft cap.
        alibi_slopes: The slope of each head, ``[n_heads]``, for ``CAUSAL_ALIBI_MASK``; by default those of
            `default_alibi_slopes`.
        out_dtype: The dtype of the result; that of the queries by default.

    Returns:
        The attention output, of the queries' shape.

    Raises:
        ValueError: A shape does not fit, the window is missing, the soft cap is negative or not finite, or
            `alibi_slopes` is given without ``CAUSAL_ALIBI_MASK``.
        TypeError: A dtype does not fit.
    """
    op = "flash_attention_ragged"
    _check_cache(op, kv_params, kv_collection)
    parameters: dict[str, Any] = {
        "mask": MASKS[mask_variant],
        "local_window_size": local_window_size,
    }
    if softcap:
        parameters["softcap"] = float(softcap)
    by_head: list[TensorValue] = []
    if sink_weights is not None:
        by_head.append(_per_head(sink_weights, input))
        parameters["sinks"] = True
    if mask_variant is MHAMaskVariant.CAUSAL_ALIBI_MASK:
        if alibi_slopes is None:
            # queries of another rank are refused when the op is staged
            alibi_slopes = default_alibi_slopes(int(input.shape[1]) if input.rank > 1 else 1)
        by_head.append(_per_head(alibi_slopes, input))
    elif alibi_slopes is not None:
        raise ValueError(
            f"{op}: alibi_slopes with the mask {mask_variant.name}; CAUSAL_ALIBI_MASK takes them"
        )
    return stage_declared(
        "attention.ragged.paged",
        [
            input,
            input_row_offsets,
            *kv_collection,
            layer_idx,
            ops.constant(np.array(scale, np.float32), DType.float32, DeviceRef.CPU()),
            *by_head,
        ],
        parameters,
        [TensorType(out_dtype or input.dtype, input.shape, input.device)],
    )[0]


def cross_attention_ragged(
    kv_params: KVCacheParams,
    input: TensorValue,
    input_row_offsets: TensorValue,
    kv_collection: PagedCacheValues,
    layer_idx: TensorValue,
    mask_variant: MHAMaskVariant,
    kv_input_row_offsets: TensorValue,
    q_max_seq_len: TensorValue,
    scale: float,
    local_window_size: int = -1,
) -> TensorValue:
    """``softmax(scale * q kᵀ + mask) v`` of queries over the keys of another ragged batch, which the cache holds.

    Sequence ``b`` has ``cache_lengths[b] + kv_input_row_offsets[b + 1] - kv_input_row_offsets[b]`` keys: the cached
    ones, then the new ones.

    Args:
        kv_params: The parameters of the cache.
        input: The queries ``[total_q_len, n_heads, head_dim]``.
        input_row_offsets: The first query of each sequence, uint32 ``[batch + 1]``.
        kv_collection: The cache, with all keys and values stored.
        layer_idx: The index of the layer in the cache.
        mask_variant: The mask; query ``i`` of a sequence has the position ``cache_lengths[b] + i``.
        kv_input_row_offsets: The first new key of each sequence, uint32 ``[batch + 1]``.
        q_max_seq_len: The number of queries of the longest sequence; unused, the kernel reads the offsets.
        scale: The scale of the attention scores.
        local_window_size: The window of the sliding-window mask, or the chunk size of the chunked mask.

    Returns:
        The attention output, of the queries' shape and dtype; 0 for rows that attend to no key.

    Raises:
        ValueError: A shape does not fit, or the window is missing.
        TypeError: A dtype does not fit.
        NotImplementedError: The mask is ``CAUSAL_ALIBI_MASK``.
    """
    op = "cross_attention_ragged"
    if mask_variant is MHAMaskVariant.CAUSAL_ALIBI_MASK:
        raise NotImplementedError(f"{op}: CAUSAL_ALIBI_MASK is of self attention")
    _check_cache(op, kv_params, kv_collection)
    return stage_declared(
        "attention.ragged.paged",
        [
            input,
            input_row_offsets,
            *kv_collection,
            layer_idx,
            ops.constant(np.array(scale, np.float32), DType.float32, DeviceRef.CPU()),
            kv_input_row_offsets,
        ],
        {
            "mask": MASKS[mask_variant],
            "local_window_size": local_window_size,
            "cross": True,
        },
        [input.type],
    )[0]


def default_alibi_slopes(heads: int) -> npt.NDArray[np.float32]:
    """The slopes of ALiBi (https://arxiv.org/abs/2108.12409): ``2 ** (-8 (h + 1) / heads)`` for powers of 2.

    Any other number of heads takes the slopes of the next lower power of 2, then every second slope of the next higher.

    Args:
        heads: The number of query heads.
    """
    power = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * (h + 1) / power) for h in range(power)]
    slopes += [2.0 ** (-4 * (2 * h + 1) / power) for h in range(heads - power)]
    return np.array(slopes, np.float32)


def _per_head(value: TensorValueLike, queries: TensorValue) -> TensorValue:
    """Casts one number per query head to float32, on the device of the queries."""
    return ops.cast(TensorValue(value), DType.float32).to(queries.device)
