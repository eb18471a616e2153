"""The library ops on rows of the paged cache."""

from __future__ import annotations

import numpy as np

from max.dtype import DType
from max.graph import DeviceRef, Dim, TensorType, TensorValue, ops
from max.graph.ops._stage import stage_declared
from max.nn._projection import matmul_input, project
from max.nn.kv_cache.cache_params import KVCacheParams
from max.nn.kv_cache.cache_values import PagedCacheValues

__all__ = [
    "k_cache_to_buffer",
    "kv_cache_get_max_seq_len",
    "kv_cache_ragged_radd",
    "matmul_k_cache_ragged",
    "rms_norm_key_cache",
    "rms_norm_value_cache",
]

KEYS, VALUES = 0, 1


def _row_size(params: KVCacheParams) -> int:
    return params.n_kv_heads_per_device * params.head_dim


def for_cache(kv_params: KVCacheParams, rows: TensorValue) -> TensorValue:
    """Casts keys or values to the dtype that the store kernels read: the cache's, or float32 for an 8-bit cache."""
    return ops.cast(rows, kv_params.dtype if kv_params.rotates_stored_keys else DType.float32)


def load_rows(
    kv_params: KVCacheParams,
    offsets: TensorValue,
    starts: TensorValue,
    kv_collection: PagedCacheValues,
    layer_idx: TensorValue,
    rows: Dim,
    side: int = KEYS,
    *,
    count: TensorValue | None = None,
) -> TensorValue:
    """Loads the keys or values of a token range, ``[rows, kv_heads * head_dim]``; rows past the last offset are 0.

    The result has the cache's dtype, or float32 for an 8-bit cache.

    Args:
        kv_params: The parameters of the cache.
        offsets: The first row of each sequence, uint32 ``[batch + 1]``.
        starts: The first token to load of each sequence, uint32 ``[batch]``.
        kv_collection: The cache.
        layer_idx: The index of the layer in the cache.
        rows: The number of rows.
        side: Keys or values.
        count: The value of `rows` if the graph computes it: an integer tensor of one element.
    """
    kv = kv_collection
    number = TensorValue(rows) if count is None else ops.reshape(count, []).to(DeviceRef.CPU())
    parameters: dict[str, bool | int | str | DType] = {"side": side}
    if kv_params.dtype is DType.int8:
        parameters["head_dim"] = kv_params.head_dim
    return stage_declared(
        "kv_load.ragged.paged",
        [offsets, kv.kv_blocks, starts, kv.lookup_table, layer_idx, number],
        parameters,
        [TensorType(kv_params.loaded_dtype, [rows, _row_size(kv_params)], offsets.device)],
    )[0]


def store_rows(
    kv_params: KVCacheParams,
    rows: TensorValue,
    input_row_offsets: TensorValue,
    kv_collection: PagedCacheValues,
    layer_idx: TensorValue,
    side: int = KEYS,
) -> None:
    """Writes keys or values of new tokens to the cache, rounded to its dtype.

    Args:
        kv_params: The parameters of the cache.
        rows: ``[total_seq_len, kv_heads * head_dim]``.
        input_row_offsets: The first row of each sequence, uint32 ``[batch + 1]``.
        kv_collection: The cache.
        layer_idx: The index of the layer in the cache.
        side: Keys or values.

    Raises:
        ValueError: The rows have a size other than ``kv_heads * head_dim``.
    """
    kv, size = kv_collection, _row_size(kv_params)
    if rows.rank != 2 or rows.shape[1] != size:
        raise ValueError(f"the rows are {rows!r}, expected [total_seq_len, {size}]")
    stage_declared(
        "k_store.ragged.paged",
        [
            for_cache(kv_params, rows),
            input_row_offsets,
            kv.kv_blocks,
            kv.cache_lengths,
            kv.lookup_table,
            layer_idx,
        ],
        {"side": side},
    )


def matmul_k_cache_ragged(
    kv_params: KVCacheParams,
    hidden_states: TensorValue,
    input_row_offsets: TensorValue,
    weight: TensorValue,
    kv_collection: PagedCacheValues,
    layer_idx: TensorValue,
) -> None:
    """Projects to keys, and writes them to the cache.

    Args:
        kv_params: The parameters of the cache.
        hidden_states: ``[total_seq_len, hidden_size]``.
        input_row_offsets: The first row of each sequence.
        weight: ``[kv_heads * head_dim, hidden_size]``.
        kv_collection: The cache.
        layer_idx: The index of the layer in the cache.

    Raises:
        ValueError: A shape does not fit.
    """
    if weight.rank != 2 or weight.shape[0] != _row_size(kv_params):
        raise ValueError(
            f"matmul_k_cache_ragged: the weight is {weight!r}, expected {_row_size(kv_params)} rows"
        )
    keys = project(matmul_input(hidden_states, weight), weight)
    store_rows(kv_params, keys, input_row_offsets, kv_collection, layer_idx)


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
    """Normalises the new keys of the cache, in place.

    Args:
        kv_params: The parameters of the cache.
        kv_collection: The cache, with the new keys stored.
        gamma: The weight: ``[head_dim]``, or ``[kv_heads * head_dim]`` without `per_head_norm`. With `rms_norm_cols` it
            is ``[rms_norm_cols]``, and only the leading elements are normalised.
        epsilon: Added to the mean of squares.
        layer_idx: The index of the layer in the cache.
        total_seq_len: The number of new tokens.
        input_row_offsets: The first row of each sequence.
        weight_offset: Added to the weight.
        rms_norm_cols: The number of leading elements to normalise; by default all of them.
        multiply_before_cast: Whether the product with the weight is computed in float32, before it is rounded.
        per_head_norm: Whether each head is normalised separately.

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
    """Normalises the new values of the cache, in place; see `rms_norm_key_cache`.

    Args:
        kv_params: The parameters of the cache.
        kv_collection: The cache, with the new values stored.
        gamma: The weight.
        epsilon: Added to the mean of squares.
        layer_idx: The index of the layer in the cache.
        total_seq_len: The number of new tokens.
        input_row_offsets: The first row of each sequence.
        weight_offset: Added to the weight.
        rms_norm_cols: The number of leading elements to normalise; by default all of them.
        multiply_before_cast: Whether the product with the weight is computed in float32, before it is rounded.
        per_head_norm: Whether each head is normalised separately.

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
            f"rms_norm_cols={columns} normalises the first ones only"
        )
    if columns > size:
        raise ValueError(f"{op}: gamma has {columns} elements, more than the {size} of a key")
    keys = load_rows(
        kv_params,
        input_row_offsets,
        kv_collection.cache_lengths,
        kv_collection,
        layer_idx,
        Dim(total_seq_len),
        side,
    )
    shape = [keys.shape[0], heads if per_head_norm else 1, size]
    parts = ops.reshape(keys, shape)
    normalised = ops.rms_norm(
        parts[:, :, :columns] if columns < size else parts,
        ops.cast(gamma, keys.dtype),
        float(epsilon),
        weight_offset=float(weight_offset),
        multiply_before_cast=multiply_before_cast,
    )
    if columns < size:
        normalised = ops.concat([normalised, parts[:, :, columns:]], axis=-1)
    rows = ops.reshape(normalised, keys.shape)
    store_rows(kv_params, rows, input_row_offsets, kv_collection, layer_idx, side)


def kv_cache_ragged_radd(
    kv_params: KVCacheParams,
    a: TensorValue,
    kv_collection: PagedCacheValues,
    input_row_offsets: TensorValue,
    batch_offset: TensorValue,
    layer_idx: int | TensorValue,
) -> None:
    """Adds a tensor to the new keys and values of the last sequences of a batch, in place.

    Args:
        kv_params: The parameters of the cache.
        a: ``[rows, 2 * kv_heads * head_dim]``: the terms for the keys, then for the values, of the tokens of these
            sequences.
        kv_collection: The cache, with the new keys and values stored.
        input_row_offsets: The first row of each sequence of the batch.
        batch_offset: The index of the first of these sequences, an integer scalar.
        layer_idx: The index of the layer in the cache.

    Raises:
        ValueError: A shape does not fit.
    """
    op, size = "kv_cache_ragged_radd", _row_size(kv_params)
    if a.rank != 2 or a.shape[1] != 2 * size:
        raise ValueError(f"{op}: a is {a!r}, expected [rows, {2 * size}]")
    if batch_offset.rank != 0:
        raise ValueError(f"{op}: batch_offset is {batch_offset!r}, expected a scalar")
    if isinstance(layer_idx, int):
        layer_idx = ops.constant(layer_idx, DType.uint32, DeviceRef.CPU())
    first = ops.cast(batch_offset.to(DeviceRef.CPU()), DType.int64)
    name = f"{op}_{id(a)}"
    offsets = input_row_offsets[(slice(first, None), f"{name}_bounds")]
    offsets = offsets - offsets[0]
    kv = PagedCacheValues(
        kv_collection.kv_blocks,
        kv_collection.cache_lengths[(slice(first, None), f"{name}_batch")],
        kv_collection.lookup_table[(slice(first, None), f"{name}_batch"), :],
        kv_collection.max_lengths,
    )
    for side in (KEYS, VALUES):
        before = load_rows(kv_params, offsets, kv.cache_lengths, kv, layer_idx, a.shape[0], side)
        added = ops.cast(a[:, side * size : (side + 1) * size], DType.float32)
        rows = ops.cast(before, DType.float32) + added
        store_rows(kv_params, rows, offsets, kv, layer_idx, side)


def kv_cache_get_max_seq_len(
    kv_params: KVCacheParams, kv_collection: PagedCacheValues
) -> TensorValue:
    """The maximum number of new tokens in a sequence, uint32, rank 0.

    Args:
        kv_params: The parameters of the cache.
        kv_collection: The cache.
    """
    return kv_collection.max_lengths[0, 0]


def k_cache_to_buffer(
    kv_params: KVCacheParams,
    buffer_row_offsets_1d: TensorValue,
    cache_offsets_1d: TensorValue,
    kv_collection: PagedCacheValues,
    layer_idx: TensorValue,
    buffer_length: TensorValue,
    buffer_size: int,
    weight_dim: int,
) -> TensorValue:
    """Copies the keys of a token range of each sequence into one buffer, concatenated.

    Args:
        kv_params: The parameters of the cache.
        buffer_row_offsets_1d: The first row of each sequence in the buffer, uint32 ``[batch + 1]``.
        cache_offsets_1d: The first token to load of each sequence, uint32 ``[batch]``.
        kv_collection: The cache.
        layer_idx: The index of the layer in the cache.
        buffer_length: The number of keys, equal to the last offset.
        buffer_size: The number of rows of the buffer.
        weight_dim: The number of leading elements of each key to copy.

    Returns:
        ``[buffer_size, weight_dim]``; rows past `buffer_length` are 0.
    """
    if not 0 < weight_dim <= _row_size(kv_params):
        raise ValueError(
            f"k_cache_to_buffer: weight_dim is {weight_dim}, a key has {_row_size(kv_params)} elements"
        )
    rows = load_rows(
        kv_params,
        buffer_row_offsets_1d,
        cache_offsets_1d,
        kv_collection,
        layer_idx,
        Dim(buffer_size),
    )
    return rows if rows.shape[1] == weight_dim else rows[:, :weight_dim]
