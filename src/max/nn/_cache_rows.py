"""The library ops on rows of the paged cache, and latent attention."""

from __future__ import annotations

import numpy as np

from max.dtype import DType
from max.graph import BufferValue, DeviceRef, Dim, TensorType, TensorValue, ops
from max.nn._projection import matmul_input, project
from max.nn.attention.mask_config import MHAMaskVariant
from max.nn.kv_cache.cache_params import KVCacheParams
from max.nn.kv_cache.cache_values import PagedCacheValues

__all__ = [
    "flare_mla_decode_ragged",
    "flare_mla_decompress_k_cache",
    "flare_mla_prefill_plan",
    "flare_mla_prefill_ragged",
    "k_cache_to_buffer",
    "kv_cache_get_max_seq_len",
    "kv_cache_ragged_radd",
    "matmul_k_cache_ragged",
    "rms_norm_key_cache",
    "update_frequency_data",
]

KEYS, VALUES = 0, 1


def _row_size(params: KVCacheParams) -> int:
    return params.n_kv_heads_per_device * params.head_dim


def for_cache(kv_params: KVCacheParams, rows: TensorValue) -> TensorValue:
    """Keys or values in the dtype that the kernels store from: the cache's, or float32 where they round to 8 bits."""
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
    """Keys or values of some tokens, ``[rows, kv_heads * head_dim]``; rows past the last offset are 0.

    They have the cache's dtype, float32 for a cache of 8 bits.

    Args:
        kv_params: The parameters of the cache.
        offsets: The first row of each sequence, uint32 ``[batch + 1]``.
        starts: The first token of each sequence, uint32 ``[batch]``.
        kv_collection: The cache.
        layer_idx: The layer.
        rows: The number of rows.
        side: Keys or values.
        count: The value of `rows` where the graph computes it, an integer of one element.
    """
    kv = kv_collection
    number = TensorValue(rows) if count is None else ops.reshape(count, []).to(DeviceRef.CPU())
    parameters: dict[str, bool | int | str | DType] = {"side": side}
    if kv_params.dtype is DType.int8:
        parameters["head_dim"] = kv_params.head_dim
    return ops.inplace_custom(
        "mo.kv_load.ragged.paged",
        device=offsets.device,
        values=[offsets, kv.kv_blocks, starts, kv.lookup_table, layer_idx, number],
        out_types=[
            TensorType(kv_params.loaded_dtype, [rows, _row_size(kv_params)], offsets.device)
        ],
        parameters=parameters,
    )[0].tensor


def store_rows(
    kv_params: KVCacheParams,
    rows: TensorValue,
    input_row_offsets: TensorValue,
    kv_collection: PagedCacheValues,
    layer_idx: TensorValue,
    side: int = KEYS,
) -> None:
    """Writes keys or values ``[total_seq_len, kv_heads * head_dim]`` of new tokens; they are rounded to the cache's
    dtype.

    Args:
        kv_params: The parameters of the cache.
        rows: The rows.
        input_row_offsets: The first row of each sequence, uint32 ``[batch + 1]``.
        kv_collection: The cache.
        layer_idx: The layer.
        side: Keys or values.

    Raises:
        ValueError: The rows have another size.
    """
    kv, size = kv_collection, _row_size(kv_params)
    if rows.rank != 2 or rows.shape[1] != size:
        raise ValueError(f"the rows are {rows!r}, expected [total_seq_len, {size}]")
    ops.inplace_custom(
        "mo.k_store.ragged.paged",
        device=rows.device,
        values=[
            for_cache(kv_params, rows),
            input_row_offsets,
            kv.kv_blocks,
            kv.cache_lengths,
            kv.lookup_table,
            layer_idx,
        ],
        parameters={"side": side},
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
        layer_idx: The layer.

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
        gamma: The weight: ``[head_dim]``, or without `per_head_norm` ``[kv_heads * head_dim]``; or fewer, with
            `rms_norm_cols`: only the first elements are normalised.
        epsilon: Is added to the mean of squares.
        layer_idx: The layer.
        total_seq_len: The number of new tokens.
        input_row_offsets: The first row of each sequence.
        weight_offset: Is added to the weight.
        rms_norm_cols: The number of normalised elements, where it is less than the size.
        multiply_before_cast: Whether the weight is multiplied in float32.
        per_head_norm: Whether each head is normalised by itself.

    Raises:
        ValueError: The weight's size does not fit.
    """
    op = "rms_norm_key_cache"
    heads, dim = kv_params.n_kv_heads_per_device, kv_params.head_dim
    size = dim if per_head_norm else heads * dim
    if gamma.rank != 1:
        raise ValueError(f"{op}: gamma is {gamma!r}, expected rank 1")
    columns = int(gamma.shape[0])
    if columns != size and rms_norm_cols != columns:
        raise ValueError(
            f"{op}: gamma has {columns} elements, a {'head' if per_head_norm else 'key'} {size}; rms_norm_cols={columns} "
            "normalises the first ones only"
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
    store_rows(kv_params, rows, input_row_offsets, kv_collection, layer_idx)


def kv_cache_ragged_radd(
    kv_params: KVCacheParams,
    a: TensorValue,
    kv_collection: PagedCacheValues,
    input_row_offsets: TensorValue,
    batch_offset: TensorValue,
    layer_idx: int | TensorValue,
) -> None:
    """Adds to the new keys and values of the last sequences of a batch.

    Args:
        kv_params: The parameters of the cache.
        a: ``[rows, 2 * kv_heads * head_dim]``: what is added to keys, then to values, for the tokens of these
            sequences.
        kv_collection: The cache, with the new keys and values stored.
        input_row_offsets: The first row of each sequence of the batch.
        batch_offset: The first of these sequences, an integer scalar.
        layer_idx: The layer.

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
    """The most new tokens of a sequence, uint32, rank 0.

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
    """Keys of some tokens of each sequence, one after the other.

    Args:
        kv_params: The parameters of the cache.
        buffer_row_offsets_1d: The first row of each sequence in the buffer, uint32 ``[batch + 1]``.
        cache_offsets_1d: The first token of each sequence, uint32 ``[batch]``.
        kv_collection: The cache.
        layer_idx: The layer.
        buffer_length: The number of keys; that of the last offset.
        buffer_size: The rows of the buffer.
        weight_dim: The first elements of each key that are copied.

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


def flare_mla_decompress_k_cache(
    kv_params: KVCacheParams,
    buffer_row_offsets_1d: TensorValue,
    cache_offsets_1d: TensorValue,
    buffer_length: TensorValue,
    weight: TensorValue,
    kv_collection: PagedCacheValues,
    layer_idx: TensorValue,
    buffer_size: int,
) -> TensorValue:
    """Expands latent keys: ``latent @ weight.T`` of `k_cache_to_buffer`.

    Args:
        kv_params: The parameters of the cache.
        buffer_row_offsets_1d: The first row of each sequence in the buffer.
        cache_offsets_1d: The first token of each sequence.
        buffer_length: The number of keys.
        weight: ``[out_dim, latent size]``.
        kv_collection: The cache.
        layer_idx: The layer.
        buffer_size: The rows of the buffer.

    Returns:
        ``[buffer_size, out_dim]``; rows past `buffer_length` have no meaning.
    """
    latent = k_cache_to_buffer(
        kv_params, buffer_row_offsets_1d, cache_offsets_1d, kv_collection, layer_idx, buffer_length,
        buffer_size, int(weight.shape[1]),
    )  # fmt: skip
    return project(ops.cast(latent, weight.dtype), weight)


def flare_mla_prefill_plan(
    kv_params: KVCacheParams,
    input_row_offsets: TensorValue,
    kv_collection: PagedCacheValues,
    layer_idx: TensorValue,
    buffer_size: int,
    max_chunks: int = 16,
) -> tuple[TensorValue, TensorValue, TensorValue]:
    """Cuts the tokens of all sequences, cached and new, one after the other, into chunks that fill a buffer.

    Args:
        kv_params: The parameters of the cache.
        input_row_offsets: The first row of each sequence.
        kv_collection: The cache.
        layer_idx: The layer.
        buffer_size: The rows of the buffer.
        max_chunks: The number of chunks that are planned; those past the last token are empty.

    Returns:
        For each chunk the first row of each sequence in the buffer, uint32 ``[max_chunks, batch + 1]``; the first token
        of each sequence in the chunk, uint32 ``[max_chunks, batch]``; and the number of tokens, int32 ``[max_chunks]``.
    """
    device = input_row_offsets.device
    bounds = ops.cast(input_row_offsets, DType.int64)
    batch = kv_collection.cache_lengths.shape[0]
    cached = ops.cast(kv_collection.cache_lengths, DType.int64)
    lengths = cached + ops.rebind(bounds[1:] - bounds[:-1], [batch])
    ends = ops.cumsum(lengths, axis=0)
    zero = ops.constant(np.zeros(1, np.int64), DType.int64, device)
    starts = ops.unsqueeze(ops.rebind(ops.concat([zero, ends]), [input_row_offsets.shape[0]]), 0)
    chunks = ops.range(0, max_chunks, 1, out_dim=max_chunks, dtype=DType.int64, device=device)
    first = ops.unsqueeze(chunks * buffer_size, 1)
    rows = ops.max(ops.min(starts - first, buffer_size), 0)
    tokens = ops.max(
        ops.min(first - ops.unsqueeze(ends - lengths, 0), ops.unsqueeze(lengths, 0)), 0
    )
    counts = ops.reshape(rows[:, -1], [max_chunks])
    return (
        ops.cast(rows, DType.uint32),
        ops.cast(tokens, DType.uint32),
        ops.cast(counts, DType.int32),
    )


def _check_causal(op: str, mask: MHAMaskVariant) -> bool:
    if mask not in (MHAMaskVariant.CAUSAL_MASK, MHAMaskVariant.NULL_MASK):
        raise NotImplementedError(
            f"{op}: the mask {mask.name}; CAUSAL_MASK and NULL_MASK have kernels"
        )
    return mask is MHAMaskVariant.CAUSAL_MASK


def flare_mla_prefill_ragged(
    kv_params: KVCacheParams,
    input: TensorValue,
    k: TensorValue,
    v: TensorValue,
    input_row_offsets: TensorValue,
    buffer_row_offsets: TensorValue,
    cache_offsets: TensorValue,
    kv_collection: PagedCacheValues,
    layer_idx: TensorValue,
    mask_variant: MHAMaskVariant,
    scale: float,
    qk_rope_dim: int = 64,
    prev_output: TensorValue | None = None,
    prev_softmax_info: TensorValue | None = None,
) -> tuple[TensorValue, TensorValue]:
    """Latent attention over a chunk of expanded keys and values, and over the chunks before it.

    A key has the elements of `k`, which its head expanded, then the last `qk_rope_dim` elements of the cached latent,
    which all heads share.

    Args:
        kv_params: The parameters of the cache.
        input: The queries ``[total_seq_len, n_heads, k's size + qk_rope_dim]``.
        k: ``[buffer_size, n_heads, size]``.
        v: ``[buffer_size, n_heads, value_size]``.
        input_row_offsets: The first row of each sequence.
        buffer_row_offsets: The first row of each sequence in the buffer, uint32 ``[batch + 1]``.
        cache_offsets: The first token of each sequence in the buffer, uint32 ``[batch]``.
        kv_collection: The cache.
        layer_idx: The layer.
        mask_variant: ``CAUSAL_MASK`` or ``NULL_MASK``.
        scale: The factor of the scores.
        qk_rope_dim: The size of the rotated part of a key.
        prev_output: The output of the chunks before.
        prev_softmax_info: Their maxima and totals.

    Returns:
        The output ``[total_seq_len, n_heads, value_size]``, of the queries' dtype, and maximum and total of each row's
        softmax, float32 ``[total_seq_len, n_heads, 2]``.

    Raises:
        ValueError: A shape does not fit, or one of the previous results is missing.
    """
    op = "flare_mla_prefill_ragged"
    causal = _check_causal(op, mask_variant)
    if (
        input.rank != 3
        or k.rank != 3
        or v.rank != 3
        or input.shape[2] != int(k.shape[2]) + qk_rope_dim
    ):
        raise ValueError(
            f"{op}: queries {input!r}, keys {k!r}, values {v!r} and {qk_rope_dim} rotated elements do not fit"
        )
    if (prev_output is None) != (prev_softmax_info is None):
        raise ValueError(f"{op}: prev_output and prev_softmax_info go together")
    kv = kv_collection
    previous = (
        [] if prev_output is None or prev_softmax_info is None else [prev_output, prev_softmax_info]
    )
    out, info = ops.inplace_custom(
        "mo.mla.prefill.ragged.paged",
        device=input.device,
        values=[
            input,
            k,
            v,
            input_row_offsets,
            buffer_row_offsets,
            cache_offsets,
            kv.kv_blocks,
            kv.cache_lengths,
            kv.lookup_table,
            layer_idx,
            ops.constant(np.array(scale, np.float32), DType.float32, DeviceRef.CPU()),
            *previous,
        ],
        out_types=[
            TensorType(input.dtype, [*input.shape[:2], v.shape[2]], input.device),
            TensorType(DType.float32, [*input.shape[:2], 2], input.device),
        ],
        parameters={"causal": causal},
    )
    return out.tensor, info.tensor


def flare_mla_decode_ragged(
    kv_params: KVCacheParams,
    input: TensorValue,
    input_row_offsets: TensorValue,
    kv_collection: PagedCacheValues,
    layer_idx: TensorValue,
    mask_variant: MHAMaskVariant,
    scale: float,
    qk_rope_dim: int = 64,
) -> TensorValue:
    """Attention over cached latents: each is a key, and without its rotated part a value, of all heads.

    Args:
        kv_params: The parameters of the cache: one head of the latent's size plus `qk_rope_dim`.
        input: The queries ``[total_seq_len, n_heads, head_dim]``, in the space of the latents.
        input_row_offsets: The first row of each sequence.
        kv_collection: The cache, with the new latents stored.
        layer_idx: The layer.
        mask_variant: ``CAUSAL_MASK`` or ``NULL_MASK``.
        scale: The factor of the scores.
        qk_rope_dim: The size of the rotated part of a latent.

    Returns:
        ``[total_seq_len, n_heads, head_dim - qk_rope_dim]``, of the queries' dtype.

    Raises:
        ValueError: A shape does not fit.
    """
    op = "flare_mla_decode_ragged"
    mask = "causal" if _check_causal(op, mask_variant) else "null"
    size = kv_params.head_dim - qk_rope_dim
    if (
        input.rank != 3
        or input.shape[2] != kv_params.head_dim
        or size < 1
        or kv_params.n_kv_heads_per_device != 1
    ):
        raise ValueError(
            f"{op}: queries {input!r} over {kv_params.n_kv_heads_per_device} heads of {kv_params.head_dim} elements with "
            f"{qk_rope_dim} rotated ones; expected [total_seq_len, n_heads, {kv_params.head_dim}] over one"
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
        ],
        out_types=[TensorType(input.dtype, [*input.shape[:2], size], input.device)],
        parameters={"mask": mask, "local_window_size": -1, "value_size": size},
    )[0].tensor


def update_frequency_data(
    frequency_data: BufferValue, frequency_offsets: TensorValue, tokens: TensorValue
) -> None:
    """Counts a token of each sequence, for `apply_penalties_to_logits`.

    A token without a pair takes the first whose token is negative or whose count is 0.

    Args:
        frequency_data: int32 ``[n, 2]``: token and count, changed in place.
        frequency_offsets: uint32 ``[batch + 1]``: where each sequence's pairs begin.
        tokens: Integers ``[batch]``.

    Raises:
        ValueError: A shape does not fit. A sequence without a free pair is an error when the graph runs.
    """
    op = "update_frequency_data"
    if frequency_data.rank != 2 or frequency_data.shape[1] != 2 or tokens.rank != 1:
        raise ValueError(
            f"{op}: data {frequency_data!r} and tokens {tokens!r}; expected [n, 2] and [batch]"
        )
    ops.inplace_custom(
        "mo.frequencies.update",
        device=tokens.device,
        values=[frequency_data, frequency_offsets, ops.cast(tokens, frequency_data.dtype)],
    )
