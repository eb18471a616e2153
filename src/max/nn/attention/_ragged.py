"""Stages attention of a ragged batch without a cache."""

from __future__ import annotations

import numpy as np

from max.dtype import DType
from max.graph import DeviceRef, TensorValue, ops
from max.graph.ops._stage import stage_declared

__all__ = ["attend_ragged"]


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
    for what, value in (("q", q), ("k", k), ("v", v)):
        if value.rank != 3 or value.dtype is not q.dtype:
            raise ValueError(f"attention: {what} is {value!r}, expected {q.dtype.name} of rank 3")
    if k.shape != v.shape or k.shape[0] != q.shape[0] or k.shape[2] != q.shape[2]:
        raise ValueError(f"attention: queries {q!r}, keys {k!r} and values {v!r} do not fit")
    heads, kv_heads = int(q.shape[1]), int(k.shape[1])
    if not kv_heads or heads % kv_heads:
        raise ValueError(f"attention: {heads} query heads cannot share {kv_heads} key heads")
    if input_row_offsets.dtype is not DType.uint32 or input_row_offsets.rank != 1:
        raise TypeError(
            f"attention: input_row_offsets is {input_row_offsets!r}, expected uint32 of rank 1"
        )
    factor = ops.constant(np.array(scale, np.float32), DType.float32, DeviceRef.CPU())
    values = [q, k, v, input_row_offsets, factor]
    if bias is not None:
        if bias.dtype is not DType.float32 or bias.rank != 2 or bias.shape[0] != heads:
            raise ValueError(
                f"attention: the bias is {bias!r}, expected float32 [{heads}, 2 * n - 1]"
            )
        values.append(bias)
    return stage_declared("attention.ragged", values, {"mask": mask, "local_window_size": window})[
        0
    ]
