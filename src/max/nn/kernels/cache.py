"""Rows of the paged KV cache: stores and loads of the keys or values of a batch."""

from __future__ import annotations

from max.dtype import DType
from max.graph import (
    DeviceRef,
    Dim,
    Graph,
    TensorType,
    TensorValue,
    ops,
)
from max.graph.ops.staging.stage import stage_declared
from max.nn.kernels.ragged import ragged_rows
from max.nn.kv_cache.cache_params import KVCacheParams
from max.nn.kv_cache.cache_values import PagedCacheValues

__all__ = [
    "KEYS",
    "VALUES",
    "check_cache",
    "for_cache",
    "k_cache_to_buffer",
    "kv_cache_get_max_seq_len",
    "kv_cache_ragged_radd",
    "kv_cache_store_paged_padded",
    "kv_cache_store_paged_ragged",
    "load_rows",
    "row_size",
    "store_k_cache_padded",
    "store_k_cache_ragged",
    "store_kv_cache_ragged",
    "store_rows",
    "store_v_cache_ragged",
]

KEYS, VALUES = 0, 1


def row_size(params: KVCacheParams) -> int:
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
    # the host reads the number, as it is a size of the result
    number = TensorValue(rows) if count is None else ops.reshape(count, []).to(DeviceRef.CPU())
    parameters: dict[str, bool | int | str | DType] = {"side": side}
    # rows of an i8 cache hold scales too, so that they do not tell the size of a head
    if kv_params.dtype is DType.int8:
        parameters["head_dim"] = kv_params.head_dim
    return stage_declared(
        "kv_load.ragged.paged",
        [offsets, kv.kv_blocks, starts, kv.lookup_table, layer_idx, number],
        parameters,
        [TensorType(kv_params.loaded_dtype, [rows, row_size(kv_params)], offsets.device)],
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
    kv = kv_collection
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
    op, size = "kv_cache_ragged_radd", row_size(kv_params)
    if a.rank != 2 or a.shape[1] != 2 * size:
        raise ValueError(f"{op}: a is {a!r}, expected [rows, {2 * size}]")
    if batch_offset.rank != 0:
        raise ValueError(f"{op}: batch_offset is {batch_offset!r}, expected a scalar")
    if isinstance(layer_idx, int):
        layer_idx = ops.constant(layer_idx, DType.uint32, DeviceRef.CPU())
    first = ops.cast(batch_offset.to(DeviceRef.CPU()), DType.int64)
    # the slices' sizes are known at run time only: symbols that they bind
    bounds, batch = (Graph.current.new_symbol(stem) for stem in ("bounds", "batch"))
    offsets = input_row_offsets[(slice(first, None), bounds)]
    # rows of `a` begin at 0
    offsets = offsets - offsets[0]
    kv = PagedCacheValues(
        kv_collection.kv_blocks,
        kv_collection.cache_lengths[(slice(first, None), batch)],
        kv_collection.lookup_table[(slice(first, None), batch), :],
        kv_collection.max_lengths,
    )
    for side in (KEYS, VALUES):
        before = load_rows(kv_params, offsets, kv.cache_lengths, kv, layer_idx, a.shape[0], side)
        added = ops.cast(a[:, side * size : (side + 1) * size], DType.float32)
        # the sum is rounded once, by the store
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
    if not 0 < weight_dim <= row_size(kv_params):
        raise ValueError(
            f"k_cache_to_buffer: weight_dim is {weight_dim}, a key has {row_size(kv_params)} elements"
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


def check_cache(op: str, params: KVCacheParams, kv: PagedCacheValues) -> None:
    blocks = kv.kv_blocks
    # latents serve as keys and as values
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
        k: ``[total_seq_len, kv_heads * head_dim]``; rounded to the cache's dtype.
        v: The values, of the shape of the keys.
        input_row_offsets: The first row of each sequence.
        kv_collection: The cache.
        layer_idx: The index of the layer in the cache.

    Raises:
        ValueError: A shape does not fit.
        TypeError: A dtype does not fit.
    """
    op = "store_kv_cache_ragged"
    check_cache(op, kv_params, kv_collection)
    stage_declared(
        "kv_store.ragged.paged",
        [
            for_cache(kv_params, k),
            for_cache(kv_params, v),
            input_row_offsets,
            *kv_collection,
            layer_idx,
        ],
    )


def kv_cache_store_paged_ragged(
    kv_collection: PagedCacheValues,
    x_cache: TensorValue,
    input_row_offsets: TensorValue,
    layer_idx: TensorValue,
    *,
    key_or_value: int,
) -> None:
    """Writes keys or values of new tokens to the cache; they are rounded to its dtype.

    Args:
        kv_collection: The cache.
        x_cache: ``[total_seq_len, kv_heads, head_dim]``.
        input_row_offsets: The first row of each sequence, uint32 ``[batch + 1]``.
        layer_idx: The index of the layer in the cache, uint32.
        key_or_value: 0 writes keys, 1 writes values.

    Raises:
        ValueError: A shape does not fit, or `key_or_value` is not 0 or 1.
        TypeError: A dtype does not fit.
    """
    op, blocks = "kv_cache_store_paged_ragged", kv_collection.kv_blocks
    if x_cache.rank != 3 or x_cache.shape[1] != blocks.shape[4]:
        raise ValueError(
            f"{op}: the rows are {x_cache!r}, expected [total_seq_len, {blocks.shape[4]}, head_dim]"
        )
    size = int(x_cache.shape[2])
    # stores to 8 bits round themselves, from float32
    rounded = blocks.dtype if blocks.dtype.size_in_bytes > 1 else DType.float32
    rows = ops.reshape(x_cache, [x_cache.shape[0], x_cache.shape[1] * size])
    stage_declared(
        "k_store.ragged.paged",
        [
            ops.cast(rows, rounded),
            input_row_offsets,
            blocks,
            kv_collection.cache_lengths,
            kv_collection.lookup_table,
            layer_idx,
        ],
        {"side": key_or_value},
    )


def store_k_cache_ragged(
    kv_collection: PagedCacheValues,
    x_k: TensorValue,
    input_row_offsets: TensorValue,
    layer_idx: TensorValue,
) -> None:
    """Writes the keys of new tokens to the cache; see `kv_cache_store_paged_ragged`.

    Args:
        kv_collection: The cache.
        x_k: ``[total_seq_len, kv_heads, head_dim]``.
        input_row_offsets: The first row of each sequence, uint32 ``[batch + 1]``.
        layer_idx: The index of the layer in the cache, uint32.

    Raises:
        ValueError: A shape does not fit.
        TypeError: A dtype does not fit.
    """
    kv_cache_store_paged_ragged(kv_collection, x_k, input_row_offsets, layer_idx, key_or_value=KEYS)


def store_v_cache_ragged(
    kv_collection: PagedCacheValues,
    x_v: TensorValue,
    input_row_offsets: TensorValue,
    layer_idx: TensorValue,
) -> None:
    """Writes the values of new tokens to the cache; see `kv_cache_store_paged_ragged`.

    Args:
        kv_collection: The cache.
        x_v: ``[total_seq_len, kv_heads, head_dim]``.
        input_row_offsets: The first row of each sequence, uint32 ``[batch + 1]``.
        layer_idx: The index of the layer in the cache, uint32.

    Raises:
        ValueError: A shape does not fit.
        TypeError: A dtype does not fit.
    """
    kv_cache_store_paged_ragged(
        kv_collection, x_v, input_row_offsets, layer_idx, key_or_value=VALUES
    )


def kv_cache_store_paged_padded(
    kv_collection: PagedCacheValues,
    x_cache: TensorValue,
    valid_lengths: TensorValue,
    layer_idx: TensorValue,
    *,
    key_or_value: int,
) -> None:
    """Writes keys or values of the new tokens of a padded batch to the cache.

    Args:
        kv_collection: The cache.
        x_cache: ``[batch, seq_len, kv_heads, head_dim]``.
        valid_lengths: The number of new tokens of each sequence, uint32 ``[batch]``; tokens past this length are not
            stored.
        layer_idx: The index of the layer in the cache, uint32.
        key_or_value: 0 writes keys, 1 writes values.

    Raises:
        ValueError: A shape does not fit, or `key_or_value` is not 0 or 1.
        TypeError: A dtype does not fit.
    """
    op = "kv_cache_store_paged_padded"
    if x_cache.rank != 4:
        raise ValueError(
            f"{op}: the rows are {x_cache!r}, expected [batch, seq_len, kv_heads, head_dim]"
        )
    rows, offsets = ragged_rows(op, x_cache, valid_lengths)
    kv_cache_store_paged_ragged(kv_collection, rows, offsets, layer_idx, key_or_value=key_or_value)


def store_k_cache_padded(
    kv_collection: PagedCacheValues,
    x_k: TensorValue,
    valid_lengths: TensorValue,
    layer_idx: TensorValue,
) -> None:
    """Writes the keys of the new tokens of a padded batch to the cache; see `kv_cache_store_paged_padded`.

    Args:
        kv_collection: The cache.
        x_k: ``[batch, seq_len, kv_heads, head_dim]``.
        valid_lengths: The number of new tokens of each sequence, uint32 ``[batch]``.
        layer_idx: The index of the layer in the cache, uint32.

    Raises:
        ValueError: A shape does not fit.
        TypeError: A dtype does not fit.
    """
    kv_cache_store_paged_padded(kv_collection, x_k, valid_lengths, layer_idx, key_or_value=KEYS)
