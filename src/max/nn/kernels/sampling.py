"""The choice of one token per row of logits, and penalties on tokens that occurred."""

from __future__ import annotations

from typing import Any

import numpy as np

from max.dtype import DType
from max.graph import BufferValue, DeviceRef, TensorValue, TensorValueLike, Value, ops
from max.graph.ops.staging.stage import check_operand, stage_declared

__all__ = [
    "apply_penalties_to_logits",
    "sample_rows",
    "topk_fused_sampling",
    "update_frequency_data",
]


def _per_row(op: str, what: str, value: Any, dtype: DType, like: TensorValue) -> TensorValue:
    """Converts a scalar or a vector to one parameter per row of `like`."""
    batch = like.shape[0]
    if not isinstance(value, Value):
        value = ops.constant(np.asarray(value), dtype, like.device)
    tensor = ops.cast(TensorValue(value), dtype).to(like.device)
    # one value for all rows
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
        logits: ``[batch, vocab_size]``; cast to float32.
        top_k: The number of tokens to sample from, per row or for all rows; 1: greedy, -1: all.
        temperature: The divisor of the logits; 0 is greedy.
        max_k: The greatest `top_k`, for kernels with a fixed buffer; only validated here.
        min_top_p: The least `top_p`; only validated here.
        top_p: The total probability of the tokens to sample from.
        seed: The seed, per row or for all rows. Rows with equal seeds draw different numbers.

    Returns:
        int64 ``[batch, 1]``; -1 for a row whose logits are all NaN.

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
    """Samples one token per row of logits, int64 ``[batch, 1]``; -1 for a row of NaN; see `topk_fused_sampling`.

    Args:
        op: The name of the op, for error messages.
        logits: ``[batch, vocab_size]``; cast to float32.
        temperature: The divisor of the logits; 0 is greedy.
        top_k: The number of tokens to sample from; -1: all.
        top_p: The total probability of the tokens to sample from.
        min_p: Tokens with less than this fraction of the greatest probability are dropped.
        seed: The seed, per row or for all rows. Rows with equal seeds draw different numbers.

    Raises:
        ValueError: A shape does not fit.
    """
    wide = ops.cast(logits, DType.float32)
    seeds = _per_row(op, "seed", seed, DType.uint64, logits)
    # one seed for all rows: the number of the row is added, so that rows draw different numbers
    if not isinstance(seed, Value) or TensorValue(seed).rank == 0:
        rows = ops.range(0, TensorValue(logits.shape[0]), 1, out_dim=logits.shape[0],
                         dtype=DType.int64, device=DeviceRef.CPU())  # fmt: skip
        seeds = seeds + ops.cast(rows, DType.uint64).to(logits.device)
    tokens = stage_declared(
        "sample.token",
        [
            wide,
            _per_row(op, "temperature", temperature, DType.float32, logits),
            _per_row(op, "top_k", top_k, DType.int64, logits),
            _per_row(op, "top_p", top_p, DType.float32, logits),
            _per_row(op, "min_p", min_p, DType.float32, logits),
            seeds,
        ],
    )[0]
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
    """Penalizes the logits of tokens that have occurred.

    A positive logit is divided by the repetition penalty, any other is multiplied by it;
    then the frequency penalty times the count, and the presence penalty, are subtracted.

    Args:
        logits_buffer: ``[batch, vocab_size]``, changed in place.
        frequency_data: int32 ``[n, 2]``: pairs of token and count. A count of 0 has no effect.
        frequency_offsets: uint32 ``[batch + 1]``: the first pair of each row, then the end of the last row.
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
    check_operand(op, "frequency_data", frequency_data, DType.int32, 2)
    logits = ops.buffer_load(logits_buffer)
    penalties = (
        ("frequency_penalty", frequency_penalty),
        ("presence_penalty", presence_penalty),
        ("repetition_penalty", repetition_penalty),
    )
    lowered = stage_declared(
        "penalties",
        [
            ops.cast(logits, DType.float32),
            frequency_data[:, 0],
            frequency_data[:, 1],
            frequency_offsets,
            *(_per_row(op, what, value, DType.float32, logits) for what, value in penalties),
        ],
    )[0]
    ops.buffer_store(logits_buffer, ops.cast(lowered, logits.dtype))


def update_frequency_data(
    frequency_data: BufferValue, frequency_offsets: TensorValue, tokens: TensorValue
) -> None:
    """Increments the count of one token per sequence, for `apply_penalties_to_logits`.

    A token without a pair takes the first free pair: one with a negative token or a count of 0.

    Args:
        frequency_data: int32 ``[n, 2]``: pairs of token and count, changed in place.
        frequency_offsets: uint32 ``[batch + 1]``: the first pair of each sequence, then the end of the last sequence.
        tokens: Integers ``[batch]``.

    Raises:
        ValueError: A shape does not fit. A sequence without a free pair raises when the graph runs.
    """
    stage_declared(
        "frequencies.update",
        [frequency_data, frequency_offsets, ops.cast(tokens, frequency_data.dtype)],
    )
