"""Attention over keys and values that are plain tensors, padded or ragged."""

from __future__ import annotations

import numpy as np

from max.dtype import DType
from max.graph import (
    DeviceRef,
    Dim,
    TensorValue,
    ops,
)
from max.nn._operand_checks import check_mask, check_operand
from max.nn._paged_attention import MASKS, default_alibi_slopes
from max.nn.attention._ragged import attend_ragged
from max.nn.attention.mask_config import MHAMaskVariant


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
    check_mask(op, mask_variant, local_window_size)
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
        check_operand(op, "valid_length", valid_length, DType.uint32, 1)
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
    check_mask("flash_attention_ragged_gpu", mask_variant, local_window_size)
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
    """Whether each query attends to each key, ``[queries, keys]``; None: to all keys."""
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
