"""Ops on means of squares, for RMS norms whose statistics devices exchange before the norm is applied."""

from __future__ import annotations

import numpy as np

from max.dtype import DType
from max.graph import Dim, StaticDim, TensorValue, ops
from max.nn._operand_checks import check_operand

__all__ = ["apply_qk_rms_norm", "mtp_eh_norm", "row_mean_of_squares", "row_mean_of_squares_qk"]

_DTYPES = (DType.bfloat16, DType.float32)


def _check_floats(op: str, what: str, value: TensorValue) -> None:
    if value.dtype not in _DTYPES:
        raise ValueError(f"{op}: {what} is {value!r}, expected bfloat16 or float32")


def _check_pair(op: str, q: TensorValue, k: TensorValue) -> None:
    for what, value in (("q", q), ("k", k)):
        _check_floats(op, what, value)
        if value.rank != 2:
            raise ValueError(f"{op}: {what} is {value!r}, expected rank 2")
    if q.dtype is not k.dtype or q.shape[0] != k.shape[0]:
        raise ValueError(f"{op}: q is {q!r} and k {k!r}, expected one dtype and as many rows")


def row_mean_of_squares(x: TensorValue) -> TensorValue:
    """The mean of squares along the last axis, computed in float32.

    Args:
        x: bfloat16 or float32, of rank 1 or more.

    Returns:
        float32, of the shape of `x` with a last axis of 1.

    Raises:
        ValueError: The dtype is not supported, or the rank is 0.
    """
    _check_floats("row_mean_of_squares", "x", x)
    if not x.rank:
        raise ValueError(f"row_mean_of_squares: x is {x!r}, expected rank 1 or more")
    wide = ops.cast(x, DType.float32)
    return ops.mean(wide * wide, axis=-1)


def row_mean_of_squares_qk(q: TensorValue, k: TensorValue) -> TensorValue:
    """The means of squares of the rows of queries and of keys.

    Args:
        q: ``[rows, q_dim]``, bfloat16 or float32.
        k: ``[rows, k_dim]`` of the same dtype.

    Returns:
        float32 ``[rows, 2]``: the means of queries, then of keys.

    Raises:
        ValueError: The shapes or dtypes do not fit.
    """
    _check_pair("row_mean_of_squares_qk", q, k)
    return ops.concat([row_mean_of_squares(q), row_mean_of_squares(k)], axis=-1)


def apply_qk_rms_norm(
    q: TensorValue,
    k: TensorValue,
    qk_var: TensorValue,
    gamma_q: TensorValue,
    gamma_k: TensorValue,
    epsilon: float | np.floating,
) -> tuple[TensorValue, TensorValue]:
    """``x * rsqrt(mean of squares + epsilon) * gamma`` of queries and of keys, computed in float32.

    Args:
        q: ``[rows, q_dim]``, bfloat16 or float32.
        k: ``[rows, k_dim]`` of the same dtype.
        qk_var: The means of squares, float32 ``[rows, 2]``, as `row_mean_of_squares_qk` returns them.
        gamma_q: float32 ``[q_dim]``.
        gamma_k: float32 ``[k_dim]``.
        epsilon: Added to the means.

    Returns:
        The normalised queries and keys, of the shapes and dtype of the inputs.

    Raises:
        ValueError: The shapes or dtypes do not fit.
    """
    op = "apply_qk_rms_norm"
    _check_pair(op, q, k)
    expected: list[tuple[str, TensorValue, list[Dim]]] = [
        ("qk_var", qk_var, [q.shape[0], Dim(2)]),
        ("gamma_q", gamma_q, [q.shape[1]]),
        ("gamma_k", gamma_k, [k.shape[1]]),
    ]
    for what, value, shape in expected:
        if value.dtype is not DType.float32 or list(value.shape) != shape:
            raise ValueError(f"{op}: {what} is {value!r}, expected float32 {shape}")
    normalised = [
        ops.cast(
            ops.cast(x, DType.float32)
            * ops.rsqrt(qk_var[:, side : side + 1] + float(epsilon))
            * gamma,
            x.dtype,
        )
        for side, (x, gamma) in enumerate(((q, gamma_q), (k, gamma_k)))
    ]
    return normalised[0], normalised[1]


def mtp_eh_norm(
    embed: TensorValue,
    prev_hidden: TensorValue,
    enorm_weight: TensorValue,
    hnorm_weight: TensorValue,
    epsilon: float,
    block_threads: int = 256,
) -> TensorValue:
    """RMS norms of embeddings and of hidden states, concatenated: the input of a multi-token prediction (MTP) layer.

    Args:
        embed: ``[tokens, hidden_size]``, of a float dtype.
        prev_hidden: The hidden states, of the shape and dtype of `embed`.
        enorm_weight: ``[hidden_size]``, for `embed`.
        hnorm_weight: ``[hidden_size]``, for `prev_hidden`.
        epsilon: Added to the means of squares.
        block_threads: The number of threads per block of GPU kernels; only validated here.

    Returns:
        ``[tokens, 2 * hidden_size]``: the normalised embeddings, then the hidden states. Both are rounded to the dtype
        before the product with the weight.

    Raises:
        ValueError: The shapes, dtypes or devices do not fit, the hidden size is not static, or `block_threads` is not
            a multiple of 32 up to 1024.
    """
    op = "mtp_eh_norm"
    if embed.rank != 2 or not isinstance(embed.shape[1], StaticDim):
        raise ValueError(f"{op}: embed is {embed!r}, expected [tokens, a number]")
    if prev_hidden.type != embed.type:
        raise ValueError(
            f"{op}: embed is {embed!r} and prev_hidden {prev_hidden!r}, expected one type"
        )
    if block_threads % 32 or not 0 < block_threads <= 1024:
        raise ValueError(
            f"{op}: block_threads is {block_threads}, expected a multiple of 32 up to 1024"
        )
    for what, weight in (("enorm_weight", enorm_weight), ("hnorm_weight", hnorm_weight)):
        check_operand(op, what, weight, embed.dtype, 1)
        if weight.shape[0] != embed.shape[1]:
            raise ValueError(f"{op}: {what} is {weight!r}, expected [{embed.shape[1]}]")
    return ops.concat(
        [
            ops.rms_norm(x, weight, epsilon, multiply_before_cast=False)
            for x, weight in ((embed, enorm_weight), (prev_hidden, hnorm_weight))
        ],
        axis=-1,
    )
