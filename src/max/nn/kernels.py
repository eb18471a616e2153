"""The library ops of attention over a paged KV cache, and of sampling.

A ragged batch has the tokens of all sequences concatenated; ``input_row_offsets`` (uint32
``[batch + 1]``) has the first row of each. `PagedCacheValues` is the cache, ``layer_idx`` (uint32,
rank 0) the index of a layer in it. New keys and values are written after the cached ones; the number of cached tokens
changes between executions only.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from max._earlier import earlier_names
from max.dtype import DType
from max.graph import (
    BufferValue,
    BufferValueLike,
    DeviceRef,
    Dim,
    HasBufferValue,
    TensorType,
    TensorValue,
    TensorValueLike,
    Value,
    ops,
)
from max.nn._adapters import sgmv_kernel, sgmv_lora_kernel, sgmv_qkv_lora_kernel
from max.nn._cache_rows import (
    flare_mla_decode_ragged,
    flare_mla_decompress_k_cache,
    flare_mla_prefill_plan,
    flare_mla_prefill_ragged,
    for_cache,
    k_cache_to_buffer,
    kv_cache_get_max_seq_len,
    kv_cache_ragged_radd,
    matmul_k_cache_ragged,
    rms_norm_key_cache,
    update_frequency_data,
)
from max.nn._experts import (
    grouped_dynamic_scaled_fp8_matmul,
    grouped_matmul_ragged,
    moe_create_indices,
)
from max.nn._formats import (
    fused_qkv_ragged_matmul_quantized,
    fused_qkv_ragged_matmul_scaled_float8,
    matmul_k_cache_ragged_scaled_float8,
    needs_fp8_fnuz_conversion,
    normalize_e4m3fn_to_e4m3fnuz,
    unfused_qkv_ragged_matmul_gguf_quantized,
)
from max.nn._projection import matmul_input, project
from max.nn._scaled import (
    batched_dynamic_scaled_fp8_matmul,
    batched_quantize_dynamic_scaled_float8,
    convert_weights_to_fp8_fnuz_if_needed,
    dynamic_scaled_matmul,
    matmul_static_scaled_float8,
    quantize_dynamic_scaled_float8,
    quantize_static_scaled_float8,
)
from max.nn.attention._ragged import attend_ragged
from max.nn.attention.mask_config import MHAMaskVariant
from max.nn.kv_cache.cache_params import KVCacheParams
from max.nn.kv_cache.cache_values import PagedCacheValues

__all__ = [
    "apply_penalties_to_logits",
    "batched_dynamic_scaled_fp8_matmul",
    "batched_quantize_dynamic_scaled_float8",
    "convert_weights_to_fp8_fnuz_if_needed",
    "cross_attention_ragged",
    "dynamic_scaled_matmul",
    "flare_mla_decode_ragged",
    "flare_mla_decompress_k_cache",
    "flare_mla_prefill_plan",
    "flare_mla_prefill_ragged",
    "flash_attention_gpu",
    "flash_attention_ragged",
    "flash_attention_ragged_gpu",
    "fused_qk_ragged_rope",
    "fused_qkv_ragged_matmul",
    "fused_qkv_ragged_matmul_quantized",
    "fused_qkv_ragged_matmul_scaled_float8",
    "grouped_dynamic_scaled_fp8_matmul",
    "grouped_matmul_ragged",
    "k_cache_to_buffer",
    "kv_cache_get_max_seq_len",
    "kv_cache_ragged_radd",
    "matmul_k_cache_ragged",
    "matmul_k_cache_ragged_scaled_float8",
    "matmul_kv_cache_ragged",
    "matmul_static_scaled_float8",
    "merge_ragged_tensors",
    "moe_create_indices",
    "needs_fp8_fnuz_conversion",
    "normalize_e4m3fn_to_e4m3fnuz",
    "quantize_dynamic_scaled_float8",
    "quantize_static_scaled_float8",
    "rms_norm_key_cache",
    "scatter_set_constant",
    "sgmv_kernel",
    "sgmv_lora_kernel",
    "sgmv_qkv_lora_kernel",
    "store_kv_cache_ragged",
    "swish_glu",
    "topk_fused_sampling",
    "unfused_qkv_ragged_matmul_gguf_quantized",
    "update_frequency_data",
]

MASKS: dict[MHAMaskVariant, str] = {
    MHAMaskVariant.CAUSAL_MASK: "causal",
    MHAMaskVariant.CAUSAL_ALIBI_MASK: "causal_alibi",
    MHAMaskVariant.NULL_MASK: "null",
    MHAMaskVariant.CHUNKED_CAUSAL_MASK: "chunked_causal",
    MHAMaskVariant.SLIDING_WINDOW_CAUSAL_MASK: "sliding_window",
}
"""The masks of the attention kernel, by their names in the kernel."""


def _check(op: str, what: str, value: TensorValue, dtype: DType, rank: int) -> None:
    if value.dtype is not dtype:
        raise TypeError(f"{op}: {what} is {value!r}, expected {dtype.name}")
    if value.rank != rank:
        raise ValueError(f"{op}: {what} is {value!r}, expected rank {rank}")


def _check_ragged(op: str, input_row_offsets: TensorValue, layer_idx: TensorValue) -> None:
    _check(op, "input_row_offsets", input_row_offsets, DType.uint32, 1)
    _check(op, "layer_idx", layer_idx, DType.uint32, 0)


def _check_mask(op: str, mask: MHAMaskVariant, window: int) -> None:
    windowed = (MHAMaskVariant.CHUNKED_CAUSAL_MASK, MHAMaskVariant.SLIDING_WINDOW_CAUSAL_MASK)
    if mask in windowed and window < 1:
        raise ValueError(
            f"{op}: the mask {mask.name} with local_window_size {window}; expected a positive "
            "number of tokens"
        )


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
        k: ``[total_seq_len, kv_heads * head_dim]``; is rounded to the cache's dtype.
        v: The same for the values.
        input_row_offsets: The first row of each sequence.
        kv_collection: The cache.
        layer_idx: The layer.

    Raises:
        ValueError: A shape does not fit.
        TypeError: A dtype does not fit.
    """
    op = "store_kv_cache_ragged"
    _check_ragged(op, input_row_offsets, layer_idx)
    _check_cache(op, kv_params, kv_collection)
    width = kv_params.n_kv_heads_per_device * kv_params.head_dim
    for what, value in (("k", k), ("v", v)):
        if value.rank != 2 or value.shape[1] != width:
            raise ValueError(f"{op}: {what} is {value!r}, expected [total_seq_len, {width}]")
    ops.inplace_custom(
        "mo.kv_store.ragged.paged",
        device=k.device,
        values=[
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
        wqkv: ``[(n_heads + 2 * kv_heads) * head_dim, hidden_size]``: the rows for queries, keys, values.
        kv_collection: The cache.
        layer_idx: The layer.
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
        layer_idx: The layer.

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
    """Rotates queries, and in the cache the keys of the new tokens.

    A token's position is the number of its sequence's tokens before it. Keys of 8 bits are rounded a second time; where
    that matters rotate them with `rotate_ragged` and store them then.

    Args:
        kv_params: The parameters of the cache.
        input: The queries ``[total_seq_len, n_heads, head_dim]``.
        input_row_offsets: The first row of each sequence.
        kv_collection: The cache, with the new keys stored.
        freqs_cis: Interleaved cosines and sines, one row per position; is cast to float32.
        layer_idx: The layer.
        interleaved: Whether the elements of a pair are adjacent.
        position_ids: Other positions; not supported yet.
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
    """Rotates queries, or keys that are not stored yet; the cache stays as it is.

    Args:
        kv_params: The parameters of the cache.
        input: ``[total_seq_len, heads, head_dim]``.
        input_row_offsets: The first row of each sequence.
        kv_collection: The cache.
        freqs_cis: Interleaved cosines and sines, one row per position; is cast to float32.
        layer_idx: The layer.
        interleaved: Whether the elements of a pair are adjacent.

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
    _check_ragged(op, input_row_offsets, layer_idx)
    _check_cache(op, kv_params, kv_collection)
    if input.rank != 3 or input.shape[-1] != kv_params.head_dim:
        raise ValueError(
            f"{op}: the queries are {input!r}, expected [total_seq_len, n_heads, "
            f"{kv_params.head_dim}]"
        )
    if freqs_cis.rank != 2:
        raise ValueError(f"{op}: freqs_cis is {freqs_cis!r}, expected [positions, rope_dim]")
    return ops.inplace_custom(
        "mo.rope.ragged.paged",
        device=input.device,
        values=[
            input,
            input_row_offsets,
            ops.cast(freqs_cis, DType.float32),
            *kv_collection,
            layer_idx,
        ],
        out_types=[input.type],
        parameters=parameters,
    )[0].tensor


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

    A soft cap replaces scores by ``softcap * tanh(scale * q kᵀ / softcap)``, before the mask. A sink is a key without
    value: the softmax of head ``h`` runs over its scores and ``sink_weights[h]``, and the sink's share is dropped. The
    mask ``CAUSAL_ALIBI_MASK`` adds ``alibi_slopes[h] * (key - position)`` to the scores.

    Args:
        kv_params: The parameters of the cache.
        input: The queries ``[total_seq_len, n_heads, head_dim]``.
        input_row_offsets: The first row of each sequence.
        kv_collection: The cache, with the new keys and values stored.
        layer_idx: The layer.
        mask_variant: The mask: which keys a query attends to.
        scale: The factor of the scores.
        local_window_size: The window of the sliding mask, the chunk of the chunked one.
        sink_weights: The logit of each head's sink, ``[n_heads]``; is cast to float32.
        softcap: The bound of soft-capped scores; None or 0 for none.
        alibi_slopes: The slope of each head, ``[n_heads]``, for ``CAUSAL_ALIBI_MASK``; by default those of
            `default_alibi_slopes`.
        out_dtype: The dtype of the result; that of the queries by default.

    Returns:
        The attention output, of the queries' shape.

    Raises:
        ValueError: A shape does not fit, the window is missing, the soft cap is negative or not finite, or there are
            slopes without their mask.
        TypeError: A dtype does not fit.
    """
    op = "flash_attention_ragged"
    _check_mask(op, mask_variant, local_window_size)
    _check_ragged(op, input_row_offsets, layer_idx)
    _check_cache(op, kv_params, kv_collection)
    heads = kv_params.n_kv_heads_per_device
    if input.rank != 3 or input.shape[-1] != kv_params.head_dim:
        raise ValueError(
            f"{op}: the queries are {input!r}, expected [total_seq_len, n_heads, "
            f"{kv_params.head_dim}]"
        )
    if int(input.shape[1]) % heads:
        raise ValueError(f"{op}: {input.shape[1]} query heads cannot share {heads} key heads")
    parameters: dict[str, Any] = {
        "mask": MASKS[mask_variant],
        "local_window_size": local_window_size,
    }
    if softcap:
        if not 0 < softcap < math.inf:
            raise ValueError(f"{op}: softcap is {softcap}, expected a positive number")
        parameters["softcap"] = float(softcap)
    by_head: list[TensorValue] = []
    if sink_weights is not None:
        by_head.append(_per_head(op, "sink_weights", sink_weights, input))
        parameters["sinks"] = True
    if mask_variant is MHAMaskVariant.CAUSAL_ALIBI_MASK:
        slopes = default_alibi_slopes(int(input.shape[1])) if alibi_slopes is None else alibi_slopes
        by_head.append(_per_head(op, "alibi_slopes", slopes, input))
    elif alibi_slopes is not None:
        raise ValueError(f"{op}: alibi_slopes with the mask {mask_variant.name}; CAUSAL_ALIBI_MASK takes them")  # fmt: skip
    return ops.inplace_custom(
        "mo.attention.ragged.paged",
        device=input.device,
        values=[
            input,
            input_row_offsets,
            *kv_collection,
            layer_idx,
            ops.constant(np.array(scale, np.float32), DType.float32, DeviceRef.CPU()),
            *by_head,
        ],
        out_types=[TensorType(out_dtype or input.dtype, input.shape, input.device)],
        parameters=parameters,
    )[0].tensor


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
    """``softmax(scale * q kᵀ + mask) v`` of rows over the keys of another ragged batch, which are in the cache.

    The keys of sequence ``b`` are those that are counted in ``cache_lengths[b]``, and the
    ``kv_input_row_offsets[b + 1] - kv_input_row_offsets[b]`` after them.

    Args:
        kv_params: The parameters of the cache.
        input: The queries ``[total_q_len, n_heads, head_dim]``.
        input_row_offsets: The first query of each sequence, uint32 ``[batch + 1]``.
        kv_collection: The cache, with all keys and values stored.
        layer_idx: The layer.
        mask_variant: The mask; query ``i`` of a sequence has the position ``cache_lengths[b] + i``.
        kv_input_row_offsets: The first new key of each sequence, uint32 ``[batch + 1]``.
        q_max_seq_len: The queries of the longest sequence; unused, the kernel reads the offsets.
        scale: The factor of the scores.
        local_window_size: The window of the sliding mask, the chunk of the chunked one.

    Returns:
        The attention output, of the queries' shape and dtype; 0 for rows that see no key.

    Raises:
        ValueError: A shape does not fit, or the window is missing.
        TypeError: A dtype does not fit.
        NotImplementedError: The mask is ``CAUSAL_ALIBI_MASK``.
    """
    op = "cross_attention_ragged"
    if mask_variant is MHAMaskVariant.CAUSAL_ALIBI_MASK:
        raise NotImplementedError(f"{op}: CAUSAL_ALIBI_MASK is of self attention")
    _check_mask(op, mask_variant, local_window_size)
    _check_ragged(op, input_row_offsets, layer_idx)
    _check(op, "kv_input_row_offsets", kv_input_row_offsets, DType.uint32, 1)
    _check_cache(op, kv_params, kv_collection)
    heads = kv_params.n_kv_heads_per_device
    if input.rank != 3 or input.shape[-1] != kv_params.head_dim or int(input.shape[1]) % heads:
        raise ValueError(
            f"{op}: the queries are {input!r}, expected [total_q_len, n_heads, {kv_params.head_dim}], a multiple of {heads} heads"
        )
    return ops.inplace_custom(
        "mo.attention.ragged.paged",
        device=input.device,
        values=[
            input,
            input_row_offsets,
            *kv_collection,
            layer_idx,
            ops.constant(np.array(scale, np.float32), DType.float32, DeviceRef.CPU()),
            kv_input_row_offsets,
        ],
        out_types=[input.type],
        parameters={
            "mask": MASKS[mask_variant],
            "local_window_size": local_window_size,
            "cross": True,
        },
    )[0].tensor


def default_alibi_slopes(heads: int) -> npt.NDArray[np.float32]:
    """The slopes of ALiBi: ``2 ** (-8 (h + 1) / heads)`` where `heads` is a power of 2.

    Other numbers take those of the power of 2 below, and every second slope of the one above.

    Args:
        heads: The number of query heads.
    """
    power = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * (h + 1) / power) for h in range(power)]
    slopes += [2.0 ** (-4 * (2 * h + 1) / power) for h in range(heads - power)]
    return np.array(slopes, np.float32)


def _per_head(op: str, what: str, value: TensorValueLike, queries: TensorValue) -> TensorValue:
    """A number for each query head, float32 ``[n_heads]``."""
    numbers = TensorValue(value)
    if numbers.rank != 1 or numbers.shape[0] != queries.shape[1]:
        raise ValueError(f"{op}: {what} is {numbers!r}, expected [{queries.shape[1]}]")
    return ops.cast(numbers, DType.float32).to(queries.device)


def flash_attention_gpu(
    q: TensorValue,
    k: TensorValue,
    v: TensorValue,
    mask_variant: MHAMaskVariant,
    scale: float,
    local_window_size: int = -1,
    valid_length: TensorValue | None = None,
) -> TensorValue:
    """``softmax(scale * q kᵀ + mask) v`` of padded sequences, on any device.

    Sums and softmax are computed in float32. Query head ``i`` reads KV head ``i // (n_heads // kv_heads)``.

    Args:
        q: The queries ``[batch, seq_len, n_heads, head_dim]``.
        k: The keys ``[batch, seq_len, kv_heads, head_dim]``; without a mask their number is their own.
        v: The values, of the shape of the keys.
        mask_variant: The mask: which keys a query attends to.
        scale: The factor of the scores.
        local_window_size: The window of the sliding mask, the chunk of the chunked one.
        valid_length: The length of each sequence, uint32 ``[batch]``: keys past it are masked, and rows past it
            have no meaning.

    Returns:
        The attention output, of the queries' shape and dtype.

    Raises:
        ValueError: A shape does not fit, or the window is missing.
        TypeError: A dtype does not fit.
    """
    op = "flash_attention_gpu"
    _check_mask(op, mask_variant, local_window_size)
    for what, value in (("q", q), ("k", k), ("v", v)):
        if value.rank != 4 or value.dtype is not q.dtype:
            raise ValueError(f"{op}: {what} is {value!r}, expected {q.dtype.name} of rank 4")
    batch, length, heads, size = q.shape
    keys, kv_heads = k.shape[1], k.shape[2]
    if k.shape != v.shape or k.shape[0] != batch or k.shape[3] != size:
        raise ValueError(f"{op}: queries {q!r}, keys {k!r} and values {v!r} do not go together")
    if mask_variant is not MHAMaskVariant.NULL_MASK and keys != length:
        raise ValueError(
            f"{op}: {length} queries and {keys} keys; with the mask {mask_variant.name} there are as "
            "many of both"
        )
    if int(heads) % int(kv_heads):
        raise ValueError(f"{op}: {heads} query heads cannot share {kv_heads} key heads")
    group = int(heads) // int(kv_heads)
    # query heads that share a KV head are rows of one product: [batch, kv_heads, group, tokens, size]
    rows = ops.permute(
        ops.reshape(ops.cast(q, DType.float32), [batch, length, kv_heads, group, size]),
        [0, 2, 3, 1, 4],
    )
    columns, values = (
        ops.unsqueeze(ops.permute(ops.cast(x, DType.float32), [0, 2, 1, 3]), 2) for x in (k, v)
    )
    scores = ops.matmul(rows, ops.transpose(columns, 3, 4)) * scale
    seen = _seen(length, keys, mask_variant, local_window_size, q.device)
    if valid_length is not None:
        _check(op, "valid_length", valid_length, DType.uint32, 1)
        lengths = ops.reshape(ops.cast(valid_length, DType.int64), [batch, 1, 1, 1, 1])
        inside = ops.greater(lengths, _positions(keys, q.device))
        seen = inside if seen is None else ops.logical_and(seen, inside)
    if mask_variant is MHAMaskVariant.CAUSAL_ALIBI_MASK:
        slopes = ops.constant(default_alibi_slopes(int(heads)), DType.float32, q.device)
        away = ops.unsqueeze(_positions(keys, q.device), 0) - ops.unsqueeze(
            _positions(length, q.device), 1
        )
        slopes = ops.reshape(slopes, [1, kv_heads, group, 1, 1])
        scores = scores + slopes * ops.cast(away, DType.float32)
    if seen is not None:
        # not -inf: a fully masked row must not become NaN
        hidden = ops.constant(float(np.finfo(np.float32).min), DType.float32, q.device)
        scores = ops.where(seen, scores, hidden)
    attended = ops.permute(ops.matmul(ops.softmax(scores), values), [0, 3, 1, 2, 4])
    return ops.cast(ops.reshape(attended, q.shape), q.dtype)


def flash_attention_ragged_gpu(
    q: TensorValue,
    k: TensorValue,
    v: TensorValue,
    input_row_offsets: TensorValue,
    max_seq_len: TensorValue,
    mask_variant: MHAMaskVariant,
    scale: float,
    local_window_size: int = -1,
) -> TensorValue:
    """``softmax(scale * q kᵀ + mask) v`` of a ragged batch without a KV cache, on any device.

    Sums and softmax are computed in float32. Query head ``i`` reads KV head ``i // (n_heads // kv_heads)``.

    Args:
        q: The queries ``[total_seq_len, n_heads, head_dim]``.
        k: The keys ``[total_seq_len, kv_heads, head_dim]``.
        v: The values, of the shape of the keys.
        input_row_offsets: The first row of each sequence, and the number of rows, uint32 ``[batch + 1]``.
        max_seq_len: The rows of the longest sequence, uint32; unused, the kernel reads the offsets.
        mask_variant: The mask: which keys a query attends to.
        scale: The factor of the scores.
        local_window_size: The window of the sliding mask, the chunk of the chunked one.

    Returns:
        The attention output, of the queries' shape and dtype.

    Raises:
        ValueError: A shape does not fit, or the window is missing.
        TypeError: A dtype does not fit.
        NotImplementedError: There is no kernel for the mask.
    """
    _check_mask("flash_attention_ragged_gpu", mask_variant, local_window_size)
    if mask_variant is MHAMaskVariant.CAUSAL_ALIBI_MASK:
        raise NotImplementedError(
            "flash_attention_ragged_gpu: CAUSAL_ALIBI_MASK has no kernel without a cache; "
            "flash_attention_gpu and flash_attention_ragged take it"
        )
    return attend_ragged(
        q, k, v, input_row_offsets, scale, mask=MASKS[mask_variant], window=local_window_size
    )


def _positions(length: Dim, device: DeviceRef) -> TensorValue:
    return ops.range(0, length, 1, out_dim=length, dtype=DType.int64, device=device)


def _seen(
    length: Dim, keys: Dim, mask: MHAMaskVariant, window: int, device: DeviceRef
) -> TensorValue | None:
    """The mask of each query and key, ``[queries, keys]``; None for all."""
    if mask is MHAMaskVariant.NULL_MASK:
        return None
    row = ops.unsqueeze(_positions(length, device), 1)
    column = ops.unsqueeze(_positions(keys, device), 0)
    seen = ops.greater_equal(row, column)
    if mask is MHAMaskVariant.SLIDING_WINDOW_CAUSAL_MASK:
        return ops.logical_and(seen, ops.greater(column + window, row))
    if mask is MHAMaskVariant.CHUNKED_CAUSAL_MASK:
        return ops.logical_and(seen, ops.equal(row // window, column // window))
    return seen


def swish_glu(a: TensorValueLike, b0: TensorValueLike, b1: TensorValueLike) -> TensorValue:
    """``silu(a @ b0ᵀ) * (a @ b1ᵀ)``.

    Args:
        a: ``[rows, in_dim]``.
        b0: The gate projection's weight ``[out_dim, in_dim]``.
        b1: The up projection's weight ``[out_dim, in_dim]``.

    Raises:
        ValueError: The sizes do not fit.
    """
    return ops.silu(project(a, b0)) * project(a, b1)


def _per_row(op: str, what: str, value: Any, dtype: DType, like: TensorValue) -> TensorValue:
    """A parameter per row of `like`, from a scalar or a vector."""
    batch = like.shape[0]
    if not isinstance(value, Value):
        value = ops.constant(np.asarray(value), dtype, like.device)
    tensor = ops.cast(TensorValue(value), dtype).to(like.device)
    if tensor.rank == 0 or (tensor.rank == 1 and tensor.shape[0] == 1):
        return ops.broadcast_to(ops.reshape(tensor, [1]), [batch])
    if tensor.rank != 1 or tensor.shape[0] != batch:
        raise ValueError(f"{op}: {what} is {tensor!r}, expected a scalar or [{batch}]")
    return tensor


def topk_fused_sampling(
    logits: TensorValue,
    top_k: TensorValueLike,
    *,
    temperature: TensorValueLike = 1.0,
    max_k: TensorValueLike | None = None,
    min_top_p: TensorValueLike | None = None,
    top_p: TensorValueLike = 1.0,
    seed: TensorValueLike = 0,
) -> TensorValue:
    """Samples a token per row: temperature, then top-k, then top-p.

    Args:
        logits: ``[batch, vocab_size]``; is cast to float32.
        top_k: The number of tokens to sample from, per row or for all rows; 1 is greedy, -1 takes all.
        temperature: The divisor of the logits; 0 is greedy.
        max_k: The greatest `top_k`: for kernels with a fixed buffer; only checked here.
        min_top_p: The least `top_p`; only checked here.
        top_p: The total probability of the tokens to sample from.
        seed: The seed, per row or for all rows. Rows with one seed draw different numbers.

    Returns:
        int64 ``[batch, 1]``.

    Raises:
        ValueError: The shapes do not fit, or a number is out of range.
    """
    op = "topk_fused_sampling"
    if logits.rank != 2:
        raise ValueError(f"{op}: the logits are {logits!r}, expected [batch, vocab_size]")
    if isinstance(top_k, Value) and max_k is None:
        raise ValueError(f"{op}: top_k is a tensor, so max_k is needed")
    numbers = (("temperature", temperature, 0.0, None), ("top_p", top_p, 0.0, 1.0))
    for what, value, low, high in numbers:
        if isinstance(value, int | float) and (value < low or (high is not None and value > high)):
            raise ValueError(f"{op}: {what} is {value}, expected {low} to {high or 'any'}")
    if isinstance(top_k, int) and (top_k == 0 or top_k < -1):
        raise ValueError(f"{op}: top_k is {top_k}, expected 1 or more, or -1 for all tokens")
    return sample_rows(op, logits, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)


def sample_rows(
    op: str,
    logits: TensorValue,
    *,
    temperature: TensorValueLike = 1.0,
    top_k: TensorValueLike = -1,
    top_p: TensorValueLike = 1.0,
    min_p: TensorValueLike = 0.0,
    seed: TensorValueLike = 0,
) -> TensorValue:
    """A token for each row of logits, int64 ``[batch, 1]``; see `topk_fused_sampling`.

    Args:
        op: For errors.
        logits: ``[batch, vocab_size]``; is cast to float32.
        temperature: The divisor of the logits; 0 is greedy.
        top_k: The number of tokens to sample from; -1: all.
        top_p: The total probability of the tokens to sample from.
        min_p: The least part of the greatest probability.
        seed: The seed, per row or for all rows. Rows with one seed draw different numbers.

    Raises:
        ValueError: A shape does not fit.
    """
    wide = ops.cast(logits, DType.float32)
    seeds = _per_row(op, "seed", seed, DType.uint64, logits)
    if not isinstance(seed, Value) or TensorValue(seed).rank == 0:
        rows = ops.range(0, TensorValue(logits.shape[0]), 1, out_dim=logits.shape[0],
                         dtype=DType.int64, device=DeviceRef.CPU())  # fmt: skip
        seeds = seeds + ops.cast(rows, DType.uint64).to(logits.device)
    tokens = ops.custom(
        "mo.sample.token",
        device=logits.device,
        values=[
            wide,
            _per_row(op, "temperature", temperature, DType.float32, logits),
            _per_row(op, "top_k", top_k, DType.int64, logits),
            _per_row(op, "top_p", top_p, DType.float32, logits),
            _per_row(op, "min_p", min_p, DType.float32, logits),
            seeds,
        ],
        out_types=[TensorType(DType.int64, [logits.shape[0]], logits.device)],
    )[0].tensor
    return ops.reshape(tokens, [logits.shape[0], 1])


def apply_penalties_to_logits(
    logits_buffer: BufferValue,
    frequency_data: TensorValue,
    frequency_offsets: TensorValue,
    *,
    frequency_penalty: TensorValueLike = 0.0,
    presence_penalty: TensorValueLike = 0.0,
    repetition_penalty: TensorValueLike = 1.0,
) -> None:
    """Penalises the logits of tokens that occurred before.

    A positive logit is divided by the repetition penalty, any other is multiplied by it;
    then the frequency penalty times the count, and the presence penalty, are subtracted.

    Args:
        logits_buffer: ``[batch, vocab_size]``, changed in place.
        frequency_data: int32 ``[n, 2]``: token and count. A count of 0 has no effect.
        frequency_offsets: uint32 ``[batch + 1]``: where each row's data begins.
        frequency_penalty: Per row or for all rows.
        presence_penalty: Per row or for all rows.
        repetition_penalty: Per row or for all rows.

    Raises:
        ValueError: A shape does not fit.
        TypeError: A dtype does not fit.
    """
    op = "apply_penalties_to_logits"
    if logits_buffer.rank != 2:
        raise ValueError(f"{op}: the logits are {logits_buffer!r}, expected [batch, vocab_size]")
    _check(op, "frequency_data", frequency_data, DType.int32, 2)
    _check(op, "frequency_offsets", frequency_offsets, DType.uint32, 1)
    logits = ops.buffer_load(logits_buffer)
    penalties = (
        ("frequency_penalty", frequency_penalty),
        ("presence_penalty", presence_penalty),
        ("repetition_penalty", repetition_penalty),
    )
    lowered = ops.custom(
        "mo.penalties",
        device=logits.device,
        values=[
            ops.cast(logits, DType.float32),
            frequency_data[:, 0],
            frequency_data[:, 1],
            frequency_offsets,
            *(_per_row(op, what, value, DType.float32, logits) for what, value in penalties),
        ],
        out_types=[TensorType(DType.float32, logits.shape, logits.device)],
    )[0].tensor
    ops.buffer_store(logits_buffer, ops.cast(lowered, logits.dtype))


def merge_ragged_tensors(
    a: TensorValue, a_row_offsets: TensorValue, b: TensorValue, b_row_offsets: TensorValue
) -> tuple[TensorValue, TensorValue]:
    """Joins two ragged batches sequence by sequence: the rows of `a` first, then those of `b`.

    Args:
        a: ``[a_rows, …]``.
        a_row_offsets: The first row of each sequence in `a`, ``[batch + 1]``.
        b: ``[b_rows, …]``, of the other sizes and the dtype of `a`.
        b_row_offsets: The first row of each sequence in `b`, ``[batch + 1]``.

    Returns:
        The rows ``[a_rows + b_rows, …]``, and where each sequence begins in them.

    Raises:
        ValueError: A shape does not fit. Offsets that do not begin at 0, rise, and end at the number of rows are
            an error when the graph runs.
        TypeError: The dtypes differ.
    """
    op = "merge_ragged_tensors"
    if a.rank < 1 or a.rank != b.rank or a.shape[1:] != b.shape[1:]:
        raise ValueError(f"{op}: {a!r} and {b!r}; expected equal sizes but for the rows")
    if a.dtype is not b.dtype:
        raise TypeError(f"{op}: {a!r} and {b!r}; expected one dtype")
    if a_row_offsets.rank != 1 or a_row_offsets.shape != b_row_offsets.shape:
        raise ValueError(
            f"{op}: the offsets are {a_row_offsets!r} and {b_row_offsets!r}; expected vectors of "
            "one size"
        )
    a_row_offsets = _checked_offsets(f"{op}: a_row_offsets", a_row_offsets, a)
    b_row_offsets = _checked_offsets(f"{op}: b_row_offsets", b_row_offsets, b)
    a_bounds, b_bounds = (ops.cast(o, DType.int64) for o in (a_row_offsets, b_row_offsets))
    a_places = _shifted_rows(a.shape[0], a_bounds, b_bounds[:-1], a.device)
    b_places = _shifted_rows(b.shape[0], b_bounds, a_bounds[1:], a.device)
    places = ops.concat([a_places, b_places])
    total = a.shape[0] + b.shape[0]
    rows = ops.concat([a, b])
    # the target row of each source row, inverted to the source row of each target row
    order = ops.scatter_nd(
        ops.broadcast_to(ops.constant(0, DType.int64, a.device), [total]),
        ops.range(0, TensorValue(total), 1, out_dim=total, dtype=DType.int64, device=a.device),
        ops.reshape(places, [total, 1]),
    )
    return ops.gather(rows, order, axis=0), a_row_offsets + b_row_offsets


def _checked_offsets(what: str, offsets: TensorValue, rows: TensorValue) -> TensorValue:
    """The first row of each sequence, checked when the graph runs."""
    return ops.custom(
        "mo.check.offsets",
        device=offsets.device,
        values=[offsets, TensorValue(rows.shape[0])],
        out_types=[offsets.type],
        parameters={"what": what},
    )[0].tensor


def _shifted_rows(
    count: Dim, bounds: TensorValue, shifts: TensorValue, device: DeviceRef
) -> TensorValue:
    """The index of each row plus the shift of its sequence."""
    rows = ops.range(0, TensorValue(count), 1, out_dim=count, dtype=DType.int64, device=device)
    ends = ops.reshape(bounds[1:], [1, bounds.shape[0] - 1])
    passed = ops.cast(ops.reshape(rows, [count, 1]) >= ends, DType.int64)
    sequence = ops.reshape(ops.sum(passed, axis=1), [count])
    return rows + ops.gather(shifts, sequence, axis=0)


def scatter_set_constant(
    data: BufferValue | HasBufferValue, indices: TensorValueLike, fill_val: float
) -> None:
    """Sets elements of a buffer to a number.

    Args:
        data: ``[rows, columns]``, changed in place.
        indices: Row and column of each element, int32 or int64 ``[n, 2]``.
        fill_val: The number.

    Raises:
        ValueError: A shape does not fit.
    """
    op = "scatter_set_constant"
    buffer: BufferValueLike = data
    tensor = ops.buffer_load(buffer)
    where = TensorValue(indices)
    if tensor.rank != 2 or where.rank != 2 or where.shape[1] != 2:
        raise ValueError(f"{op}: data {tensor!r} and indices {where!r}; expected rank 2 and [n, 2]")
    values = ops.broadcast_to(ops.constant(fill_val, tensor.dtype, tensor.device), [where.shape[0]])
    ops.buffer_store(buffer, ops.scatter_nd(tensor, values, where))


__getattr__ = earlier_names(__name__)
