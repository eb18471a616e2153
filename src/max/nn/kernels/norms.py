"""RMS norms of cached keys and values, of queries, and in two steps, with statistics that devices exchange."""

from __future__ import annotations

import numpy as np

from max.dtype import DType
from max.graph import Dim, StaticDim, TensorValue, ops
from max.graph.ops.staging.stage import check_operand
from max.nn.kernels.cache import KEYS, VALUES, load_rows, store_rows
from max.nn.kv_cache.cache_params import KVCacheParams
from max.nn.kv_cache.cache_values import PagedCacheValues

__all__ = [
    "apply_qk_rms_norm",
    "check_gamma",
    "fused_qk_ragged_rms_norm",
    "mtp_eh_norm",
    "rms_norm_key_cache",
    "rms_norm_value_cache",
    "row_mean_of_squares",
    "row_mean_of_squares_qk",
]


def rms_norm_key_cache(
    kv_params: KVCacheParams,
    kv_collection: PagedCacheValues,
    gamma: TensorValue,
    epsilon: float | np.floating,
    layer_idx: TensorValue,
    total_seq_len: Dim,
    input_row_offsets: TensorValue,
    weight_offset: float | np.floating,
    rms_norm_cols: int | None = None,
    multiply_before_cast: bool = True,
    per_head_norm: bool = True,
) -> None:
    """Normalizes the new keys of the cache, in place.

    Args:
        kv_params: The parameters of the cache.
        kv_collection: The cache, with the new keys stored.
        gamma: The weight: ``[head_dim]``, or ``[kv_heads * head_dim]`` without `per_head_norm`. With `rms_norm_cols` it
            is ``[rms_norm_cols]``, and only the leading elements are normalized.
        epsilon: Added to the mean of squares.
        layer_idx: The index of the layer in the cache.
        total_seq_len: The number of new tokens.
        input_row_offsets: The first row of each sequence.
        weight_offset: Added to the weight.
        rms_norm_cols: The number of leading elements to normalize; by default all of them.
        multiply_before_cast: Whether the product with the weight is computed in float32, before it is rounded.
        per_head_norm: Whether each head is normalized separately.

    Raises:
        ValueError: The weight's size does not fit.
    """
    _norm_rows(
        "rms_norm_key_cache", KEYS, kv_params, kv_collection, gamma, epsilon, layer_idx, total_seq_len,
        input_row_offsets, weight_offset, rms_norm_cols, multiply_before_cast, per_head_norm,
    )  # fmt: skip


def rms_norm_value_cache(
    kv_params: KVCacheParams,
    kv_collection: PagedCacheValues,
    gamma: TensorValue,
    epsilon: float | np.floating,
    layer_idx: TensorValue,
    total_seq_len: Dim,
    input_row_offsets: TensorValue,
    weight_offset: float | np.floating,
    rms_norm_cols: int | None = None,
    multiply_before_cast: bool = True,
    per_head_norm: bool = True,
) -> None:
    """Normalizes the new values of the cache, in place; see `rms_norm_key_cache`.

    Args:
        kv_params: The parameters of the cache.
        kv_collection: The cache, with the new values stored.
        gamma: The weight.
        epsilon: Added to the mean of squares.
        layer_idx: The index of the layer in the cache.
        total_seq_len: The number of new tokens.
        input_row_offsets: The first row of each sequence.
        weight_offset: Added to the weight.
        rms_norm_cols: The number of leading elements to normalize; by default all of them.
        multiply_before_cast: Whether the product with the weight is computed in float32, before it is rounded.
        per_head_norm: Whether each head is normalized separately.

    Raises:
        ValueError: The weight's size does not fit, or the cache has no values.
    """
    if kv_params.is_mla:
        raise ValueError("rms_norm_value_cache: a cache of latents has no values")
    _norm_rows(
        "rms_norm_value_cache", VALUES, kv_params, kv_collection, gamma, epsilon, layer_idx, total_seq_len,
        input_row_offsets, weight_offset, rms_norm_cols, multiply_before_cast, per_head_norm,
    )  # fmt: skip


def _norm_rows(
    op: str, side: int, kv_params: KVCacheParams, kv_collection: PagedCacheValues, gamma: TensorValue,
    epsilon: float | np.floating, layer_idx: TensorValue, total_seq_len: Dim, input_row_offsets: TensorValue,
    weight_offset: float | np.floating, rms_norm_cols: int | None, multiply_before_cast: bool, per_head_norm: bool,
) -> None:  # fmt: skip
    heads, dim = kv_params.n_kv_heads_per_device, kv_params.head_dim
    size = dim if per_head_norm else heads * dim
    if gamma.rank != 1:
        raise ValueError(f"{op}: gamma is {gamma!r}, expected rank 1")
    columns = int(gamma.shape[0])
    if columns != size and rms_norm_cols != columns:
        raise ValueError(
            f"{op}: gamma has {columns} elements, a {'head' if per_head_norm else 'key'} {size}; "
            f"rms_norm_cols={columns} normalizes the first ones only"
        )
    if columns > size:
        raise ValueError(f"{op}: gamma has {columns} elements, more than the {size} of a key")
    # [rows, heads * head_dim]
    keys = load_rows(
        kv_params,
        input_row_offsets,
        kv_collection.cache_lengths,
        kv_collection,
        layer_idx,
        Dim(total_seq_len),
        side,
    )
    # [rows, heads, head_dim], or one head of all elements
    shape = [keys.shape[0], heads if per_head_norm else 1, size]
    parts = ops.reshape(keys, shape)
    normalized = ops.rms_norm(
        parts[:, :, :columns] if columns < size else parts,
        ops.cast(gamma, keys.dtype),
        float(epsilon),
        weight_offset=float(weight_offset),
        multiply_before_cast=multiply_before_cast,
    )
    if columns < size:
        # the other elements stay, such as the rotated part of a latent
        normalized = ops.concat([normalized, parts[:, :, columns:]], axis=-1)
    rows = ops.reshape(normalized, keys.shape)
    store_rows(kv_params, rows, input_row_offsets, kv_collection, layer_idx, side)


def check_gamma(op: str, what: str, gamma: TensorValue, size: int) -> None:
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
        The normalized queries, of the shape and dtype of the input.

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
    check_gamma(op, "q_gamma", q_gamma, size)
    check_gamma(op, "k_gamma", k_gamma, size)
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
        The normalized queries and keys, of the shapes and dtype of the inputs.

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
    normalized = [
        ops.cast(
            ops.cast(x, DType.float32)
            * ops.rsqrt(qk_var[:, side : side + 1] + float(epsilon))
            * gamma,
            x.dtype,
        )
        for side, (x, gamma) in enumerate(((q, gamma_q), (k, gamma_k)))
    ]
    return normalized[0], normalized[1]


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
        ``[tokens, 2 * hidden_size]``: the normalized embeddings, then the hidden states. Both are rounded to the dtype
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
