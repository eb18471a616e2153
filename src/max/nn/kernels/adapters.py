"""Matrix products with LoRA adapters (SGMV): each group of rows is multiplied by the matrix of its adapter."""

from __future__ import annotations

from typing import NamedTuple

from max.dtype import DType
from max.graph import DeviceRef, Dim, StaticDim, TensorType, TensorValue, ops
from max.graph.ops.staging.stage import stage_declared
from max.nn.kernels.cache import kv_cache_ragged_radd
from max.nn.kernels.experts import grouped_matmul_ragged
from max.nn.kernels.ragged import group_of_rows
from max.nn.kv_cache.cache_params import KVCacheParams
from max.nn.kv_cache.cache_values import PagedCacheValues

__all__ = [
    "AdapterRows",
    "add_adapters",
    "adapter_rows",
    "sgmv_kernel",
    "sgmv_lora_kernel",
    "sgmv_qkv_lora_kernel",
]


class AdapterRows(NamedTuple):
    """The rows of a batch, sorted by the slots of their adapters.

    Args:
        order: The row of each position, int32 ``[rows]``; rows without an adapter come last.
        slots: The slot of each position, int32 ``[rows]``; -1: none.
        scales: The scale of each row, float32 ``[rows]``.
        num_adapted: The number of rows with an adapter, int32 ``[1]``.
    """

    order: TensorValue
    slots: TensorValue
    scales: TensorValue
    num_adapted: TensorValue


def adapter_rows(
    slots: TensorValue,
    scales: TensorValue,
    input_row_offsets: TensorValue,
    rows: Dim,
    max_slots: int,
) -> AdapterRows:
    """Sorts the rows of sequences by the slots of their adapters.

    Args:
        slots: The slot of each sequence, int32 ``[batch]``; -1: none.
        scales: The scale of the adapter of each sequence, float32 ``[batch]``.
        input_row_offsets: The first row of each sequence, then the number of rows, uint32 ``[batch + 1]``.
        rows: The number of rows.
        max_slots: The number of slots.

    Raises:
        ValueError: A shape does not fit. Invalid offsets and slots raise when the graph runs.
        TypeError: A dtype does not fit.
    """
    device = slots.device

    def vector(dtype: DType, size: Dim | int) -> TensorType:
        return TensorType(dtype, [size], device)

    types = [
        vector(DType.int32, rows), vector(DType.int32, rows), vector(DType.float32, rows), vector(DType.int32, 1),
    ]  # fmt: skip
    operands = [slots, scales, input_row_offsets]
    return AdapterRows(
        *stage_declared("lora.rows.ragged", operands, {"max_slots": max_slots}, types)
    )


def add_adapters(
    y: TensorValue,
    x: TensorValue,
    memory: TensorValue,
    forms: TensorValue,
    rows: AdapterRows,
    place: TensorValue,
    *,
    max_rank: int,
    inputs: int,
    site: int,
    offset: int,
) -> TensorValue:
    """``y + scale * (B A x + gain * y + shift)`` for each row, with the adapter of its slot.

    `max.mlir.ops.models.adapters` describes the layout of the memory. Each adapter is read once.

    Args:
        y: The product without adapters, ``[rows, columns]``.
        x: The input of the product, ``[rows, inputs]``; or, for a table of rows, their indices, int64 ``[rows, 1]``.
        memory: The adapters, ``[slots, elements]``.
        forms: The rank of each site in each slot, and whether it has gain and shift, int32 ``[slots, sites, 2]``.
        rows: The rows, sorted by slot.
        place: The first element and the first site of the block that has the site, int64 ``[2]``.
        max_rank: The bound of the rank.
        inputs: The number of inputs of the product.
        site: The index of the site in its block.
        offset: The first element of the site, in its block.

    Raises:
        ValueError: A shape does not fit. Invalid ranks, slots and places raise when the graph runs.
        TypeError: A dtype does not fit.
    """
    attributes = {"max_rank": max_rank, "inputs": inputs, "site": site, "offset": offset}
    operands = [y, x, memory, forms, *rows, place]
    return stage_declared("lora.add", operands, attributes)[0]


def sgmv_kernel(
    input: TensorValue,
    lora: TensorValue,
    lora_ids: TensorValue,
    lora_ranks: TensorValue,
    input_row_offsets: TensorValue,
    max_lora_seq_len: int,
    bias: TensorValue | None = None,
) -> TensorValue:
    """Multiplies each group of rows by the matrix of its adapter: ``x @ lora[id].T + bias[id]``.

    Args:
        input: ``[rows, in_dim]``.
        lora: ``[adapters, out_dim, in_dim]``; adapters of lower rank are padded with zeros.
        lora_ids: The adapter of each group, ``[groups]``; -1: the group's results are 0. Elements past the last group
            are not read.
        lora_ranks: The rank of each group's adapter; unused, because matrices are padded with zeros.
        input_row_offsets: The first row of each group, then the end of the last group, ``[groups + 1]``. Rows past that
            end get the result 0.
        max_lora_seq_len: The maximum number of rows in a group; unused, the kernel reads the offsets.
        bias: ``[adapters, out_dim]``.

    Returns:
        ``[rows, out_dim]``.

    Raises:
        ValueError: A shape does not fit. Invalid offsets and adapter ids raise when the graph runs.
        TypeError: The adapters, ranks or offsets are not integers.
    """
    op = "sgmv_kernel"
    for name, value in (
        ("lora_ids", lora_ids),
        ("lora_ranks", lora_ranks),
        ("input_row_offsets", input_row_offsets),
    ):
        if not value.dtype.is_integral():
            raise TypeError(f"{op}: {name} is {value!r}, expected integers")
    if lora_ids.rank != 1 or input_row_offsets.rank != 1 or input_row_offsets.shape[0] == 0:
        raise ValueError(
            f"{op}: lora_ids {lora_ids!r} and input_row_offsets {input_row_offsets!r}; expected [groups] and [groups + "
            "1]"
        )
    groups, slots = input_row_offsets.shape[0] - 1, lora_ids.shape[0]
    if isinstance(groups, StaticDim) and isinstance(slots, StaticDim) and int(slots) < int(groups):
        raise ValueError(f"{op}: {slots} lora_ids for the {groups} groups of input_row_offsets")
    # ids past the last group are not read
    if slots != groups:
        lora_ids = lora_ids[(slice(0, groups), groups),]
    count = ops.reshape(ops.cast(TensorValue(groups), DType.uint32), [1])
    longest = ops.constant([max_lora_seq_len], DType.uint32, DeviceRef.CPU())
    # the rows of the longest group, and the number of groups: the host reads both
    stats = ops.concat([longest, count.to(DeviceRef.CPU())])
    starts = ops.cast(input_row_offsets, DType.uint32)
    ids = ops.cast(lora_ids, DType.int32)
    y = grouped_matmul_ragged(input, lora, starts, ids, stats)
    if bias is None:
        return y
    if bias.rank != 2 or bias.shape[0] != lora.shape[0] or bias.shape[1] != lora.shape[1]:
        raise ValueError(f"{op}: the bias is {bias!r}, expected [{lora.shape[0]}, {lora.shape[1]}]")
    # rows without an adapter read the row of zeros appended to the biases
    zeros = ops.broadcast_to(ops.constant(0, bias.dtype, bias.device), [1, bias.shape[1]])
    table = ops.concat([bias, zeros])
    # the index of that row; rows past the last group have it too
    none = ops.constant([int(lora.shape[0])], DType.int64, ids.device)
    of_group = ops.concat([ops.cast(ids, DType.int64), none])
    adapter = ops.gather(of_group, group_of_rows(input.shape[0], starts), axis=0)
    adapter = ops.where(ops.greater_equal(adapter, 0), adapter, none)
    return y + ops.cast(ops.gather(table, adapter, axis=0), y.dtype)


def sgmv_lora_kernel(
    input: TensorValue,
    lora_a: TensorValue,
    lora_b: TensorValue,
    lora_ids: TensorValue,
    lora_ranks: TensorValue,
    grouped_row_offsets: TensorValue,
    max_lora_seq_len: int,
    bias: TensorValue | None = None,
) -> TensorValue:
    """Applies the adapter of each group of rows: ``(x @ a[id].T) @ b[id].T + bias[id]``.

    Args:
        input: ``[rows, in_dim]``.
        lora_a: ``[adapters, rank, in_dim]``.
        lora_b: ``[adapters, out_dim, rank]``.
        lora_ids: The adapter of each group, ``[groups]``; -1: none.
        lora_ranks: The rank of each group's adapter.
        grouped_row_offsets: The first row of each group, then the end of the last group.
        max_lora_seq_len: The maximum number of rows in a group.
        bias: ``[adapters, out_dim]``.

    Returns:
        ``[rows, out_dim]``.

    Raises:
        ValueError: A shape does not fit.
    """
    groups = (lora_ids, lora_ranks, grouped_row_offsets, max_lora_seq_len)
    return sgmv_kernel(sgmv_kernel(input, lora_a, *groups), lora_b, *groups, bias)


def sgmv_qkv_lora_kernel(
    input: TensorValue,
    lora_a: TensorValue,
    lora_b: TensorValue,
    lora_ids: TensorValue,
    lora_ranks: TensorValue,
    input_row_offsets: TensorValue,
    lora_grouped_offsets: TensorValue,
    kv_collection: PagedCacheValues,
    kv_params: KVCacheParams,
    layer_idx: TensorValue,
    max_lora_seq_len: int,
    max_rank: int,
    q_dim: int,
    kv_dim: int,
    bias: TensorValue | None = None,
) -> TensorValue:
    """Applies the adapters of queries, keys and values; the terms of keys and values are added to the cache in place.

    Args:
        input: ``[total_seq_len, in_dim]``.
        lora_a: ``[adapters, 3 * max_rank, in_dim]``: the rows for queries, then keys, then values.
        lora_b: ``[adapters, q_dim + 2 * kv_dim, max_rank]``.
        lora_ids: The adapter of each group, ``[groups]``; -1: none.
        lora_ranks: The rank of each group's adapter.
        input_row_offsets: The first row of each sequence.
        lora_grouped_offsets: The first row of each group, then the end of the last group.
        kv_collection: The cache, with the new keys and values stored.
        kv_params: The parameters of the cache.
        layer_idx: The index of the layer in the cache.
        max_lora_seq_len: The maximum number of rows in a group.
        max_rank: The rank of the matrices.
        q_dim: The size of the queries.
        kv_dim: The size of the keys.
        bias: ``[adapters, q_dim + 2 * kv_dim]``.

    Returns:
        The terms to add to the queries, ``[total_seq_len, q_dim]``.

    Raises:
        ValueError: A shape does not fit.
    """
    op = "sgmv_qkv_lora_kernel"
    width = q_dim + 2 * kv_dim
    if (
        lora_a.rank != 3
        or lora_b.rank != 3
        or lora_a.shape[1] != 3 * max_rank
        or lora_b.shape[1] != width
    ):
        raise ValueError(
            f"{op}: matrices {lora_a!r} and {lora_b!r}; expected [adapters, {3 * max_rank}, in_dim] and [adapters, "
            f"{width}, {max_rank}]"
        )
    groups = (lora_ids, lora_ranks, lora_grouped_offsets, max_lora_seq_len)
    # [rows, 3 * max_rank]: the matrices A of queries, keys and values are stacked
    narrow = sgmv_kernel(input, lora_a, *groups)
    parts: list[TensorValue] = []
    begin = 0
    for i, size in enumerate((q_dim, kv_dim, kv_dim)):
        rows = narrow[:, i * max_rank : (i + 1) * max_rank]
        of_part = None if bias is None else bias[:, begin : begin + size]
        parts.append(sgmv_kernel(rows, lora_b[:, begin : begin + size], *groups, of_part))
        begin += size
    # the terms are those of all sequences
    first = ops.constant(0, DType.int64, DeviceRef.CPU())
    added = ops.concat(parts[1:], axis=1)
    kv_cache_ragged_radd(kv_params, added, kv_collection, input_row_offsets, first, layer_idx)
    return parts[0]
