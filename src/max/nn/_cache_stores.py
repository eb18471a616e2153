"""The library ops of later versions that write keys or values of a ragged or padded batch to the cache."""

from __future__ import annotations

from max.dtype import DType
from max.graph import BufferValue, DeviceRef, Graph, TensorValue, TensorValueLike, ops
from max.graph.ops._stage import stage_declared
from max.nn._adapters import group_of_rows
from max.nn._cache_rows import KEYS, VALUES
from max.nn._operand_checks import check_operand
from max.nn.kv_cache.cache_values import PagedCacheValues

__all__ = [
    "inplace_memcpy",
    "kv_cache_store_paged_padded",
    "kv_cache_store_paged_ragged",
    "padded_rows",
    "ragged_rows",
    "scatter_nd_skip_oob_indices",
    "sliced_add",
    "store_k_cache_padded",
    "store_k_cache_ragged",
    "store_v_cache_ragged",
]


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
    sides = blocks.shape[1]
    if key_or_value not in (KEYS, VALUES) or sides == key_or_value:
        raise ValueError(
            f"{op}: key_or_value is {key_or_value!r}; the cache has {sides} sides, from 0"
        )
    if x_cache.rank != 3 or x_cache.shape[1] != blocks.shape[4]:
        raise ValueError(
            f"{op}: the rows are {x_cache!r}, expected [total_seq_len, {blocks.shape[4]}, head_dim]"
        )
    size = int(x_cache.shape[2])
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


def _offsets(op: str, x: TensorValue, valid_lengths: TensorValue) -> TensorValue:
    """The first row of each sequence, int64 ``[batch + 1]``; lengths are clamped to that of the padded batch."""
    check_operand(op, "valid_lengths", valid_lengths, DType.uint32, 1)
    if x.rank < 2 or valid_lengths.shape[0] != x.shape[0]:
        raise ValueError(
            f"{op}: {x!r} and valid_lengths {valid_lengths!r}, expected [batch, seq_len, …] and [batch]"
        )
    lengths = ops.cast(valid_lengths, DType.int64)
    longest = ops.cast(TensorValue(x.shape[1]), DType.int64).to(x.device)
    ends = ops.cumsum(ops.min(lengths, longest), axis=0)
    return ops.concat([ops.constant([0], DType.int64, x.device), ends])


def ragged_rows(
    op: str, x: TensorValue, valid_lengths: TensorValue
) -> tuple[TensorValue, TensorValue]:
    """Converts a padded batch ``[batch, seq_len, …]`` to a ragged one; returns its rows and row offsets.

    Args:
        op: The name of the op, for error messages.
        x: The padded batch.
        valid_lengths: The length of each sequence, uint32 ``[batch]``.

    Returns:
        The rows ``[rows, …]``, whose number is a new symbol, and the row offsets, uint32 ``[batch + 1]``.

    Raises:
        ValueError: A shape does not fit.
        TypeError: The lengths are not uint32.
    """
    offsets = _offsets(op, x, valid_lengths)
    batch, length = x.shape[:2]
    total = batch * length
    sequence = group_of_rows(total, offsets)
    inside = ops.range(0, TensorValue(total), 1, out_dim=total, dtype=DType.int64, device=x.device)
    inside = inside - ops.gather(offsets, sequence, axis=0)
    size = ops.cast(TensorValue(length), DType.int64).to(x.device)
    source = sequence * size + inside
    # rows past the last sequence read row 0 and are cut off
    last = ops.cast(TensorValue(batch), DType.int64).to(x.device)
    source = ops.where(ops.equal(sequence, last), inside * 0, source)
    count = offsets[-1].to(DeviceRef.CPU())
    source = source[(slice(0, count), Graph.current.new_symbol("rows")),]
    rows = ops.gather(ops.reshape(x, [total, *x.shape[2:]]), source, axis=0)
    return rows, ops.cast(offsets, DType.uint32)


def padded_rows(
    op: str, rows: TensorValue, like: TensorValue, valid_lengths: TensorValue
) -> TensorValue:
    """Converts the rows of a ragged batch to a padded one, with zeros as padding; the inverse of `ragged_rows`.

    Args:
        op: The name of the op, for error messages.
        rows: ``[rows, …]``.
        like: The original padded batch, ``[batch, seq_len, …]``.
        valid_lengths: The length of each sequence, uint32 ``[batch]``.
    """
    batch, length = like.shape[:2]
    offsets = _offsets(op, like, valid_lengths)
    begins = ops.unsqueeze(offsets[:-1], 1)
    place = ops.range(
        0, TensorValue(length), 1, out_dim=length, dtype=DType.int64, device=rows.device
    )
    seen = ops.greater(ops.unsqueeze(ops.cast(valid_lengths, DType.int64), 1), place)
    seen = ops.rebind(seen, [batch, length])
    # padding reads the row of zeros appended to the rows
    source = ops.reshape(ops.where(seen, begins + place, offsets[-1]), [batch * length])
    zeros = ops.broadcast_to(ops.constant(0, rows.dtype, rows.device), [1, *rows.shape[1:]])
    chosen = ops.gather(ops.concat([rows, zeros]), source, axis=0)
    return ops.reshape(chosen, [batch, length, *rows.shape[1:]])


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


def inplace_memcpy(dst: BufferValue, src: TensorValue) -> None:
    """Copies a tensor to a buffer.

    Args:
        dst: The destination buffer.
        src: A tensor of the buffer's shape and dtype.

    Raises:
        ValueError: The shape or the dtype differs.
    """
    if dst.dtype is not src.dtype or dst.shape != src.shape:
        raise ValueError(
            f"inplace_memcpy: {src!r} is copied to {dst!r}, expected its shape and dtype"
        )
    ops.buffer_store(dst, src)


def sliced_add(x: TensorValue, y: TensorValue, lora_end_idx: TensorValue) -> TensorValue:
    """``x + y`` in the first `lora_end_idx` rows, `x` in the others.

    Args:
        x: ``[rows, …]``.
        y: A tensor of the shape and dtype of `x`.
        lora_end_idx: The number of rows that `y` is added to, an integer tensor of one element.

    Returns:
        A tensor of the type of `x`.

    Raises:
        ValueError: The shapes or dtypes of `x` and `y` differ, or `lora_end_idx` has more elements.
        TypeError: `lora_end_idx` is not an integer.
    """
    op = "sliced_add"
    if not x.rank or x.dtype is not y.dtype or x.shape != y.shape:
        raise ValueError(f"{op}: x is {x!r} and y {y!r}, expected one type of rank 1 or more")
    if not lora_end_idx.dtype.is_integral():
        raise TypeError(f"{op}: lora_end_idx is {lora_end_idx!r}, expected an integer")
    end = ops.reshape(ops.cast(lora_end_idx, DType.int64).to(x.device), [])
    rows = x.shape[0]
    numbers = ops.range(0, TensorValue(rows), 1, out_dim=rows, dtype=DType.int64, device=x.device)
    added = ops.reshape(ops.greater(end, numbers), [rows, *([1] * (x.rank - 1))])
    return ops.where(added, x + y, x)


def scatter_nd_skip_oob_indices(
    input: TensorValueLike, updates: TensorValueLike, indices: TensorValueLike
) -> TensorValue:
    """`max.graph.ops.scatter_nd` that skips updates whose indices are out of range.

    Args:
        input: The tensor, of rank 1 or more.
        updates: The elements or slices to write.
        indices: Integers ``[…, depth]``: the first `depth` indices of each update; negative ones count from the end.

    Returns:
        A tensor of the type of `input`.

    Raises:
        ValueError: A shape does not fit.
        TypeError: The indices are not integers.
    """
    op = "scatter_nd_skip_oob_indices"
    x, values, places = TensorValue(input), TensorValue(updates), TensorValue(indices)
    if not places.dtype.is_integral():
        raise TypeError(f"{op}: the indices are {places!r}, expected integers")
    depth = int(places.shape[-1]) if places.rank else 0
    if not 0 < depth <= x.rank:
        raise ValueError(f"{op}: the indices are {places!r}, expected […, 1 to {x.rank}]")
    sizes = ops.cast(ops.shape_to_tensor(x.shape[:depth]), DType.int64).to(x.device)
    wide = ops.cast(places, DType.int64)
    wide = ops.where(wide < 0, wide + sizes, wide)
    fits = ops.logical_and(ops.greater_equal(wide, 0), ops.greater(sizes, wide))
    inside = ops.greater(ops.min(ops.cast(fits, DType.int32), axis=-1), 0)
    # updates out of range write to an extra last row, which is cut off
    behind = ops.concat([sizes[:1], sizes[1:] * 0]) if depth > 1 else sizes
    wide = ops.where(inside, wide, behind)
    row = ops.broadcast_to(ops.constant(0, x.dtype, x.device), [1, *x.shape[1:]])
    written = ops.scatter_nd(ops.concat([x, row]), values, wide)
    return written[(slice(0, x.shape[0]), x.shape[0]),]
