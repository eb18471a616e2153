"""Attention: of ragged and padded batches over a paged KV cache, and without a cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from max import mlir
from max.dtype import DType
from max.graph import DeviceRef, Dim, TensorType, TensorValue, TensorValueLike, ops
from max.graph.ops.staging.stage import check_operand, stage_declared
from max.nn.attention.mask_config import MHAMaskVariant
from max.nn.kernels.cache import check_cache
from max.nn.kernels.ragged import padded_rows, ragged_rows
from max.nn.kv_cache.cache_params import KVCacheParams
from max.nn.kv_cache.cache_values import PagedCacheValues

__all__ = [
    "MASKS",
    "attend_ragged",
    "cross_attention_ragged",
    "default_alibi_slopes",
    "flash_attention_gpu",
    "flash_attention_padded_kv_cache",
    "flash_attention_ragged",
    "flash_attention_ragged_gpu",
]

MASKS: dict[MHAMaskVariant, str] = {
    MHAMaskVariant.CAUSAL_MASK: "causal",
    MHAMaskVariant.CAUSAL_ALIBI_MASK: "causal_alibi",
    MHAMaskVariant.NULL_MASK: "null",
    MHAMaskVariant.CHUNKED_CAUSAL_MASK: "chunked_causal",
    MHAMaskVariant.SLIDING_WINDOW_CAUSAL_MASK: "sliding_window",
}
"""The name in the attention kernel of each mask."""


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
        ValueError: A shape does not fit, the window is missing, the soft cap is negative or not finite, `alibi_slopes`
            is given without ``CAUSAL_ALIBI_MASK``, or the cache has trees and the mask is not ``CAUSAL_MASK``.
        TypeError: A dtype does not fit.
    """
    op = "flash_attention_ragged"
    check_cache(op, kv_params, kv_collection)
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
    trees = list[TensorValue]()
    if kv_collection.ancestors is not None:
        trees.append(kv_collection.ancestors)
        parameters["trees"] = True
    return stage_declared(
        "attention.ragged.paged",
        [
            input,
            input_row_offsets,
            *kv_collection,
            layer_idx,
            ops.constant(np.array(scale, np.float32), DType.float32, DeviceRef.CPU()),
            *by_head,
            *trees,
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
    check_cache(op, kv_params, kv_collection)
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


def default_alibi_slopes(n_heads: int) -> npt.NDArray[np.float32]:
    """The slopes of ALiBi (https://arxiv.org/abs/2108.12409): ``2 ** (-8 (h + 1) / n_heads)`` for powers of 2.

    Any other number of heads takes the slopes of the next lower power of 2, then every second slope of the next higher.

    Args:
        n_heads: The number of query heads.
    """
    # the greatest power of 2 up to n_heads
    power = 1 << (n_heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * (h + 1) / power) for h in range(power)]
    slopes += [2.0 ** (-4 * (2 * h + 1) / power) for h in range(n_heads - power)]
    return np.array(slopes, np.float32)


def _per_head(value: TensorValueLike, queries: TensorValue) -> TensorValue:
    """Casts one number per query head to float32, on the device of the queries."""
    return ops.cast(TensorValue(value), DType.float32).to(queries.device)


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


def attend_ragged(
    q: TensorValue,
    k: TensorValue,
    v: TensorValue,
    input_row_offsets: TensorValue,
    scale: float,
    *,
    mask: str = "null",
    window: int = -1,
    bias: TensorValue | None = None,
) -> TensorValue:
    """``softmax(scale * q kᵀ + bias + mask) v`` of each sequence; sums and softmax in float32.

    Args:
        q: The queries ``[total_seq_len, n_heads, head_dim]``.
        k: The keys ``[total_seq_len, kv_heads, head_dim]``.
        v: The values, of the shape of the keys.
        input_row_offsets: The first row of each sequence, and the number of rows, uint32 ``[batch + 1]``.
        scale: The scale of the attention scores.
        mask: ``null``, ``causal``, ``sliding_window``, ``chunked_causal``, or ``symmetric_window``: a token attends to
            all tokens at a distance of less than `window`, before and after it.
        window: The size of the window or of the chunk.
        bias: Added to the scores by head and distance, float32 ``[n_heads, 2 * n - 1]`` for sequences of up to
            ``n`` tokens; the middle element is the bias of distance 0.

    Returns:
        The attention output, of the queries' shape and dtype.

    Raises:
        ValueError: A shape does not fit.
        TypeError: A dtype does not fit.
    """
    factor = ops.constant(np.array(scale, np.float32), DType.float32, DeviceRef.CPU())
    values = [q, k, v, input_row_offsets, factor]
    if bias is not None:
        values.append(bias)
    return stage_declared("attention.ragged", values, {"mask": mask, "local_window_size": window})[
        0
    ]


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
        k: The keys ``[batch, seq_len, kv_heads, head_dim]``; without a mask, their length may differ from that of the
            queries.
        v: The values, of the shape of the keys.
        mask_variant: The mask, which selects the keys that a query attends to.
        scale: The scale of the attention scores.
        local_window_size: The window of the sliding-window mask, or the chunk size of the chunked mask.
        valid_length: The length of each sequence, uint32 ``[batch]``: keys past it are masked, and result rows past it
            are undefined.

    Returns:
        The attention output, of the queries' shape and dtype.

    Raises:
        ValueError: A shape does not fit, or the window is missing.
        TypeError: A dtype does not fit.
    """
    op = "flash_attention_gpu"
    window = {"mask": MASKS[mask_variant], "local_window_size": local_window_size}
    mlir.check_window(op, window, "null", tuple(MASKS.values()))
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
    # [batch, kv_heads, 1, keys, size]: the query heads of a group share them
    columns, values = (
        ops.unsqueeze(ops.permute(ops.cast(x, DType.float32), [0, 2, 1, 3]), 2) for x in (k, v)
    )
    scores = ops.matmul(rows, ops.transpose(columns, 3, 4)) * scale
    seen = _visible_keys(length, keys, mask_variant, local_window_size, q.device)
    if valid_length is not None:
        check_operand(op, "valid_length", valid_length, DType.uint32, 1)
        # broadcasts against the keys, the last axis of the scores
        lengths = ops.reshape(ops.cast(valid_length, DType.int64), [batch, 1, 1, 1, 1])
        inside = ops.greater(lengths, _positions(keys, q.device))
        seen = inside if seen is None else ops.logical_and(seen, inside)
    if mask_variant is MHAMaskVariant.CAUSAL_ALIBI_MASK:
        slopes = ops.constant(default_alibi_slopes(int(heads)), DType.float32, q.device)
        # [queries, keys]: key minus query, 0 or less for visible keys
        away = ops.unsqueeze(_positions(keys, q.device), 0) - ops.unsqueeze(
            _positions(length, q.device), 1
        )
        slopes = ops.reshape(slopes, [1, kv_heads, group, 1, 1])
        scores = scores + slopes * ops.cast(away, DType.float32)
    if seen is not None:
        # not -inf: a fully masked row must not become NaN
        hidden = ops.constant(float(np.finfo(np.float32).min), DType.float32, q.device)
        scores = ops.where(seen, scores, hidden)
    # back to [batch, tokens, kv_heads, group, size], which is the order of heads in q
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
        max_seq_len: The length of the longest sequence, uint32; unused, the kernel reads the offsets.
        mask_variant: The mask, which selects the keys that a query attends to.
        scale: The scale of the attention scores.
        local_window_size: The window of the sliding-window mask, or the chunk size of the chunked mask.

    Returns:
        The attention output, of the queries' shape and dtype.

    Raises:
        ValueError: A shape does not fit, or the window is missing.
        TypeError: A dtype does not fit.
        NotImplementedError: There is no kernel for the mask.
    """
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


def _visible_keys(
    length: Dim, keys: Dim, mask: MHAMaskVariant, window: int, device: DeviceRef
) -> TensorValue | None:
    """Whether each query attends to each key, ``[queries, keys]``; None: to all keys."""
    if mask is MHAMaskVariant.NULL_MASK:
        return None
    row = ops.unsqueeze(_positions(length, device), 1)
    column = ops.unsqueeze(_positions(keys, device), 0)
    # [queries, keys]: the row is the query's position, the column the key's
    seen = ops.greater_equal(row, column)
    if mask is MHAMaskVariant.SLIDING_WINDOW_CAUSAL_MASK:
        # at a distance of less than `window`
        return ops.logical_and(seen, ops.greater(column + window, row))
    if mask is MHAMaskVariant.CHUNKED_CAUSAL_MASK:
        return ops.logical_and(seen, ops.equal(row // window, column // window))
    return seen
