"""The fused attention ops of later versions: norms with rotation and stores, and attention over padded batches."""

from __future__ import annotations

import numpy as np

from max.dtype import DType
from max.graph import Dim, DimLike, TensorValue, ops
from max.nn._cache_rows import rms_norm_key_cache
from max.nn._cache_stores import padded_rows, ragged_rows
from max.nn._operand_checks import check_operand
from max.nn._paged_attention import (
    flash_attention_ragged,
    fused_qk_ragged_rope,
    fused_qkv_ragged_matmul,
    rotate_ragged,
    store_kv_cache_ragged,
)
from max.nn._ragged_rope import rope_ragged_with_position_ids
from max.nn.attention.mask_config import MHAMaskVariant
from max.nn.kv_cache.cache_params import KVCacheParams
from max.nn.kv_cache.cache_values import PagedCacheValues

__all__ = [
    "ceildiv",
    "flash_attention_padded_kv_cache",
    "fused_qk_ragged_rms_norm",
    "fused_qk_rms_norm_rope_ragged",
    "fused_qkv_padded_matmul",
    "rope_split_store_ragged",
]


def ceildiv(n: DimLike, d: DimLike) -> Dim:
    """``n / d``, rounded up.

    Args:
        n: The dividend.
        d: The divisor.

    Raises:
        ZeroDivisionError: The divisor is 0.
    """
    divisor = Dim(d)
    return (Dim(n) + (divisor - 1)) // divisor


def _check_gamma(op: str, what: str, gamma: TensorValue, size: int) -> None:
    if gamma.rank != 1 or gamma.shape[0] != size:
        raise ValueError(f"{op}: {what} is {gamma!r}, expected [{size}]")


def fused_qk_ragged_rms_norm(
    kv_params: KVCacheParams,
    input: TensorValue,
    input_row_offsets: TensorValue,
    kv_collection: PagedCacheValues,
    q_gamma: TensorValue,
    k_gamma: TensorValue,
    epsilon: float | np.floating,
    layer_idx: TensorValue,
    weight_offset: float | np.floating,
    multiply_before_cast: bool = True,
) -> TensorValue:
    """Applies RMS norm to each head of the queries, and in place to each head of the new keys in the cache.

    Args:
        kv_params: The parameters of the cache.
        input: The queries ``[total_seq_len, n_heads, head_dim]``.
        input_row_offsets: The first row of each sequence, uint32.
        kv_collection: The cache, with the new keys stored.
        q_gamma: The weight of queries, ``[head_dim]``.
        k_gamma: The weight of keys, ``[head_dim]``.
        epsilon: Added to the mean of squares.
        layer_idx: The index of the layer in the cache, uint32.
        weight_offset: Added to the weights.
        multiply_before_cast: Whether the product with the weight is computed in float32, before it is rounded.

    Returns:
        The normalised queries, of the shape and dtype of the input.

    Raises:
        ValueError: A shape does not fit.
        TypeError: A dtype does not fit.
    """
    op, size = "fused_qk_ragged_rms_norm", kv_params.head_dim
    check_operand(op, "input_row_offsets", input_row_offsets, DType.uint32, 1)
    check_operand(op, "layer_idx", layer_idx, DType.uint32, 0)
    if input.rank != 3 or input.shape[2] != size:
        raise ValueError(
            f"{op}: the queries are {input!r}, expected [total_seq_len, n_heads, {size}]"
        )
    _check_gamma(op, "q_gamma", q_gamma, size)
    _check_gamma(op, "k_gamma", k_gamma, size)
    rms_norm_key_cache(
        kv_params, kv_collection, k_gamma, epsilon, layer_idx, input.shape[0], input_row_offsets,
        weight_offset, multiply_before_cast=multiply_before_cast,
    )  # fmt: skip
    return ops.rms_norm(
        input,
        ops.cast(q_gamma, input.dtype),
        float(epsilon),
        weight_offset=float(weight_offset),
        multiply_before_cast=multiply_before_cast,
    )


def fused_qk_rms_norm_rope_ragged(
    kv_params: KVCacheParams,
    input: TensorValue,
    input_row_offsets: TensorValue,
    kv_collection: PagedCacheValues,
    q_gamma: TensorValue,
    k_gamma: TensorValue,
    freqs_cis: TensorValue,
    epsilon: float | np.floating,
    layer_idx: TensorValue,
    weight_offset: float | np.floating,
    interleaved: bool = True,
    multiply_before_cast: bool = True,
    q_out_dtype: DType | None = None,
) -> TensorValue:
    """`fused_qk_ragged_rms_norm`, then `max.nn.kernels.fused_qk_ragged_rope`.

    Args:
        kv_params: The parameters of the cache.
        input: The queries ``[total_seq_len, n_heads, head_dim]``.
        input_row_offsets: The first row of each sequence, uint32.
        kv_collection: The cache, with the new keys stored.
        q_gamma: The weight of queries, ``[head_dim]``.
        k_gamma: The weight of keys, ``[head_dim]``.
        freqs_cis: Interleaved cosines and sines, one row per position.
        epsilon: Added to the mean of squares.
        layer_idx: The index of the layer in the cache, uint32.
        weight_offset: Added to the weights.
        interleaved: Whether the two elements of a rotated pair are adjacent.
        multiply_before_cast: Whether the product with the weight is computed in float32, before it is rounded.
        q_out_dtype: The dtype of the result; by default that of the input. The result is rounded to the dtype of the
            input before the cast.

    Returns:
        The normalised and rotated queries, of the shape of the input.

    Raises:
        ValueError: A shape does not fit.
        TypeError: A dtype does not fit.
    """
    queries = fused_qk_ragged_rms_norm(
        kv_params, input, input_row_offsets, kv_collection, q_gamma, k_gamma, epsilon, layer_idx,
        weight_offset, multiply_before_cast,
    )  # fmt: skip
    rotated = fused_qk_ragged_rope(
        kv_params, queries, input_row_offsets, kv_collection, freqs_cis, layer_idx, interleaved
    )
    return rotated if q_out_dtype is None else ops.cast(rotated, q_out_dtype)


def rope_split_store_ragged(
    kv_params: KVCacheParams,
    qkv: TensorValue,
    input_row_offsets: TensorValue,
    freqs_cis: TensorValue,
    kv_collection: PagedCacheValues,
    layer_idx: TensorValue,
    n_heads: int,
    interleaved: bool = True,
    position_ids: TensorValue | None = None,
    mrope_section: list[int] | None = None,
    fuse: bool = True,
    q_out_dtype: DType | None = None,
    q_norm_weight: TensorValue | None = None,
    k_norm_weight: TensorValue | None = None,
    rms_norm_eps: float | None = None,
    k_eq_v: bool = False,
) -> TensorValue:
    """Rotates queries and keys of a joint projection, and writes keys and values to the cache.

    Args:
        kv_params: The parameters of the cache.
        qkv: ``[total_seq_len, (n_heads + 2 * kv_heads) * head_dim]``: queries, then keys, then values.
        input_row_offsets: The first row of each sequence, uint32.
        freqs_cis: Interleaved cosines and sines, one row per position.
        kv_collection: The cache.
        layer_idx: The index of the layer in the cache, uint32.
        n_heads: The number of query heads.
        interleaved: Whether the two elements of a rotated pair are adjacent.
        position_ids: The positions, uint32 ``[1, total_seq_len]``; by default the positions after the cached tokens.
        mrope_section: Sections of positions; not supported yet.
        fuse: A hint to the compiler of MAX; not used.
        q_out_dtype: The dtype of the result; by default that of `qkv`. The result is rounded to the dtype of `qkv`
            before the cast.
        q_norm_weight: The weight of the norm of queries, ``[head_dim]``. If given, all heads are normalised before the
            rotation; those of values are normalised without a weight.
        k_norm_weight: The weight of the norm of keys, ``[head_dim]``.
        rms_norm_eps: Added to the mean of squares; required if the norm weights are given.
        k_eq_v: Whether the values are the keys before rotation; `qkv` then holds queries and keys only. Requires the
            norm weights.

    Returns:
        The rotated queries, ``[total_seq_len, n_heads * head_dim]``.

    Raises:
        ValueError: A shape does not fit, or an argument that another one requires is missing.
        TypeError: A dtype does not fit.
        NotImplementedError: `mrope_section` is given.
    """
    op, size = "rope_split_store_ragged", kv_params.head_dim
    kv_heads = kv_params.n_kv_heads_per_device
    normalised = q_norm_weight is not None
    if normalised != (k_norm_weight is not None) or normalised != (rms_norm_eps is not None):
        raise ValueError(f"{op}: q_norm_weight, k_norm_weight and rms_norm_eps go together")
    if k_eq_v and not normalised:
        raise ValueError(f"{op}: k_eq_v needs q_norm_weight")
    if normalised and position_ids is not None:
        raise ValueError(f"{op}: q_norm_weight and position_ids do not go together")
    heads = [n_heads, kv_heads] if k_eq_v else [n_heads, kv_heads, kv_heads]
    if qkv.rank != 2 or qkv.shape[1] != sum(heads) * size:
        raise ValueError(f"{op}: qkv is {qkv!r}, expected [total_seq_len, {sum(heads) * size}]")
    rows = qkv.shape[0]
    parts = [
        ops.reshape(part, [rows, count, size])
        for part, count in zip(
            ops.split(qkv, [count * size for count in heads], axis=1), heads, strict=True
        )
    ]
    queries, keys, values = parts[0], parts[1], parts[-1]
    if q_norm_weight is not None and k_norm_weight is not None and rms_norm_eps is not None:
        _check_gamma(op, "q_norm_weight", q_norm_weight, size)
        _check_gamma(op, "k_norm_weight", k_norm_weight, size)
        ones = ops.constant(np.ones(size, np.float32), DType.float32, qkv.device)
        queries, keys, values = (
            ops.rms_norm(x, ops.cast(gamma, x.dtype), rms_norm_eps)
            for x, gamma in ((queries, q_norm_weight), (keys, k_norm_weight), (values, ones))
        )
    if position_ids is not None or mrope_section is not None:
        if position_ids is None:
            raise ValueError(f"{op}: mrope_section needs position_ids")
        queries, keys = (
            rope_ragged_with_position_ids(
                x, freqs_cis, position_ids, mrope_section=mrope_section, interleaved=interleaved
            )
            for x in (queries, keys)
        )
    else:
        queries, keys = (
            rotate_ragged(
                kv_params, x, input_row_offsets, kv_collection, freqs_cis, layer_idx, interleaved
            )
            for x in (queries, keys)
        )
    k, v = (ops.reshape(x, [rows, kv_heads * size]) for x in (keys, values))
    store_kv_cache_ragged(kv_params, k, v, input_row_offsets, kv_collection, layer_idx)
    queries = ops.reshape(queries, [rows, n_heads * size])
    return queries if q_out_dtype is None else ops.cast(queries, q_out_dtype)


def fused_qkv_padded_matmul(
    kv_params: KVCacheParams,
    input: TensorValue,
    wqkv: TensorValue,
    kv_collection: PagedCacheValues,
    layer_idx: TensorValue,
    valid_lengths: TensorValue,
    n_heads: int,
) -> TensorValue:
    """Projects a padded batch to queries, keys and values, and writes keys and values to the cache.

    Args:
        kv_params: The parameters of the cache.
        input: ``[batch, seq_len, hidden_size]``.
        wqkv: ``[(n_heads + 2 * kv_heads) * head_dim, hidden_size]``: the rows for queries, then keys, then values.
        kv_collection: The cache.
        layer_idx: The index of the layer in the cache, uint32.
        valid_lengths: The number of new tokens of each sequence, uint32 ``[batch]``; keys and values of tokens past
            this length are not stored, and their queries are 0.
        n_heads: The number of query heads.

    Returns:
        The queries ``[batch, seq_len, n_heads * head_dim]``, of the weight's dtype.

    Raises:
        ValueError: A shape does not fit.
        TypeError: A dtype does not fit.
    """
    op = "fused_qkv_padded_matmul"
    if input.rank != 3:
        raise ValueError(f"{op}: the input is {input!r}, expected [batch, seq_len, hidden_size]")
    rows, offsets = ragged_rows(op, input, valid_lengths)
    queries = fused_qkv_ragged_matmul(
        kv_params, rows, offsets, wqkv, kv_collection, layer_idx, n_heads
    )
    return padded_rows(op, queries, input, valid_lengths)


def flash_attention_padded_kv_cache(
    kv_params: KVCacheParams,
    q: TensorValue,
    kv_collection: PagedCacheValues,
    layer_idx: TensorValue,
    valid_lengths: TensorValue,
    mask_variant: MHAMaskVariant,
    scale: float,
    local_window_size: int = -1,
) -> TensorValue:
    """Attention of a padded batch over its sequences in the cache; see `max.nn.kernels.flash_attention_ragged`.

    Args:
        kv_params: The parameters of the cache.
        q: The queries ``[batch, seq_len, n_heads, head_dim]``.
        kv_collection: The cache, with the new keys and values stored.
        layer_idx: The index of the layer in the cache, uint32.
        valid_lengths: The number of new tokens of each sequence, uint32 ``[batch]``; the results of tokens past this
            length are 0.
        mask_variant: The mask, which selects the keys that a query attends to.
        scale: The scale of the attention scores.
        local_window_size: The window of the sliding-window mask, or the chunk size of the chunked mask.

    Returns:
        The attention output, of the shape and dtype of `q`.

    Raises:
        ValueError: A shape does not fit, or the window is missing.
        TypeError: A dtype does not fit.
    """
    op = "flash_attention_padded_kv_cache"
    if q.rank != 4:
        raise ValueError(f"{op}: q is {q!r}, expected [batch, seq_len, n_heads, head_dim]")
    rows, offsets = ragged_rows(op, q, valid_lengths)
    attended = flash_attention_ragged(
        kv_params, rows, offsets, kv_collection, layer_idx, mask_variant, scale, local_window_size
    )
    return padded_rows(op, attended, q, valid_lengths)
