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
    factor = ops.constant(np.array(scale, np.float32), DType.float32, DeviceRef.CPU())
    values = [q, k, v, input_row_offsets, factor]
    if bias is not None:
        values.append(bias)
    return stage_declared("attention.ragged", values, {"mask": mask, "local_window_size": window})[
        0
    ]
