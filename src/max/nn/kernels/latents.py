"""Attention over cached latents: the choice between shared and expanded keys, expansion in chunks, sparse selection."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from max.dtype import DType
from max.graph import DeviceRef, TensorType, TensorValue, ops
from max.graph.ops.staging.stage import stage_declared
from max.nn.attention.mask_config import MHAMaskVariant
from max.nn.kernels.cache import k_cache_to_buffer
from max.nn.kernels.products import project
from max.nn.kv_cache.cache_params import KVCacheParams
from max.nn.kv_cache.cache_values import PagedCacheValues

__all__ = [
    "Expansion",
    "LEAST_ROWS",
    "MOST_CACHED",
    "attend_selected",
    "flare_mla_decode_ragged",
    "flare_mla_decompress_k_cache",
    "flare_mla_prefill_plan",
    "flare_mla_prefill_ragged",
    "plan_latents",
    "select_tokens",
]


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
    """Expands latents to keys: ``latent @ weight.T``, with the latents of `k_cache_to_buffer`.

    Args:
        kv_params: The parameters of the cache.
        buffer_row_offsets_1d: The first row of each sequence in the buffer.
        cache_offsets_1d: The first token of each sequence to expand.
        buffer_length: The number of keys.
        weight: ``[out_dim, latent size]``.
        kv_collection: The cache.
        layer_idx: The index of the layer in the cache.
        buffer_size: The number of rows of the buffer.

    Returns:
        ``[buffer_size, out_dim]``; rows past `buffer_length` are undefined.
    """
    # [buffer_length, rank]: only the latent part of a cached row is multiplied; its RoPE part is a key already
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
    """Divides the concatenated tokens of all sequences, cached and new, into chunks of the size of a buffer.

    Args:
        kv_params: The parameters of the cache.
        input_row_offsets: The first row of each sequence.
        kv_collection: The cache.
        layer_idx: The index of the layer in the cache.
        buffer_size: The number of rows of the buffer.
        max_chunks: The number of chunks to plan; chunks past the last token are empty.

    Returns:
        For each chunk: the first row of each sequence in the buffer, uint32 ``[max_chunks, batch + 1]``; the first
        token of each sequence in the chunk, uint32 ``[max_chunks, batch]``; and the number of tokens, int32
        ``[max_chunks]``.
    """
    device = input_row_offsets.device
    bounds = ops.cast(input_row_offsets, DType.int64)
    batch = kv_collection.cache_lengths.shape[0]
    cached = ops.cast(kv_collection.cache_lengths, DType.int64)
    # [batch]: cached and new tokens of each sequence, whose concatenation is cut into chunks
    lengths = cached + ops.rebind(bounds[1:] - bounds[:-1], [batch])
    ends = ops.cumsum(lengths, axis=0)
    zero = ops.constant(np.zeros(1, np.int64), DType.int64, device)
    starts = ops.unsqueeze(ops.rebind(ops.concat([zero, ends]), [input_row_offsets.shape[0]]), 0)
    # below [max_chunks, …]: chunk i begins at row i * buffer_size of the concatenation
    chunks = ops.range(0, max_chunks, 1, out_dim=max_chunks, dtype=DType.int64, device=device)
    first = ops.unsqueeze(chunks * buffer_size, 1)
    # sequences before the chunk begin at its row 0, those after it at its end
    rows = ops.max(ops.min(starts - first, buffer_size), 0)
    # how much of a sequence earlier chunks have
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
    """Latent attention over a chunk of expanded keys and values, combined with the results of the previous chunks.

    A key of a head consists of its row of `k`, followed by the last `qk_rope_dim` elements of the cached latent, which
    all heads share.

    Args:
        kv_params: The parameters of the cache.
        input: The queries ``[total_seq_len, n_heads, k's size + qk_rope_dim]``.
        k: ``[buffer_size, n_heads, size]``.
        v: ``[buffer_size, n_heads, value_size]``.
        input_row_offsets: The first row of each sequence.
        buffer_row_offsets: The first row of each sequence in the buffer, uint32 ``[batch + 1]``.
        cache_offsets: The first token of each sequence in the buffer, uint32 ``[batch]``.
        kv_collection: The cache.
        layer_idx: The index of the layer in the cache.
        mask_variant: ``CAUSAL_MASK`` or ``NULL_MASK``.
        scale: The scale of the attention scores.
        qk_rope_dim: The size of the rotated part of a key.
        prev_output: The output of the previous chunks; None for the first chunk.
        prev_softmax_info: The maxima and totals of their softmax.

    Returns:
        The output ``[total_seq_len, n_heads, value_size]``, of the queries' dtype, and the maximum and total of each
        row's softmax, float32 ``[total_seq_len, n_heads, 2]``.

    Raises:
        ValueError: A shape does not fit, or one of the previous results is missing.
    """
    op = "flare_mla_prefill_ragged"
    causal = _check_causal(op, mask_variant)
    if input.shape[-1:] != [dim + qk_rope_dim for dim in k.shape[-1:]]:
        raise ValueError(
            f"{op}: queries {input!r}, keys {k!r} and {qk_rope_dim} rotated elements do not fit"
        )
    if (prev_output is None) != (prev_softmax_info is None):
        raise ValueError(f"{op}: prev_output and prev_softmax_info go together")
    kv = kv_collection
    previous = (
        [] if prev_output is None or prev_softmax_info is None else [prev_output, prev_softmax_info]
    )
    out, info = stage_declared(
        "mla.prefill.ragged.paged",
        [
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
        {"causal": causal},
    )
    return out, info


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
    """Attention over cached latents. All heads share them: a latent is a key and, without its rotated part, a value.

    Args:
        kv_params: The parameters of the cache: one head, of the latent's size plus `qk_rope_dim`.
        input: The queries ``[total_seq_len, n_heads, head_dim]``, in the space of the latents.
        input_row_offsets: The first row of each sequence.
        kv_collection: The cache, with the new latents stored.
        layer_idx: The index of the layer in the cache.
        mask_variant: ``CAUSAL_MASK`` or ``NULL_MASK``.
        scale: The scale of the attention scores.
        qk_rope_dim: The size of the rotated part of a latent.

    Returns:
        ``[total_seq_len, n_heads, head_dim - qk_rope_dim]``, of the queries' dtype.

    Raises:
        ValueError: A shape does not fit.
    """
    op = "flare_mla_decode_ragged"
    mask = "causal" if _check_causal(op, mask_variant) else "null"
    # a value is the latent, the head of the key without its RoPE part: one cache serves both
    size = kv_params.head_dim - qk_rope_dim
    if size < 1:
        raise ValueError(
            f"{op}: heads of {kv_params.head_dim} elements with {qk_rope_dim} rotated ones; a value needs one or more"
        )
    return stage_declared(
        "attention.ragged.paged",
        [
            input,
            input_row_offsets,
            *kv_collection,
            layer_idx,
            ops.constant(np.array(scale, np.float32), DType.float32, DeviceRef.CPU()),
        ],
        {"mask": mask, "local_window_size": -1, "value_size": size},
        [TensorType(input.dtype, [*input.shape[:2], size], input.device)],
    )[0]


LEAST_ROWS = 64
"""The fewest new tokens of a batch for which keys and values are expanded (docs/log/2026-11-23-latents.md)."""


MOST_CACHED = 3
"""The maximum number of cached tokens per new token; bounds the memory of expanded keys."""


@dataclass(frozen=True)
class Expansion:
    """The savings and the cost of expanding latents to keys and values, in multiplications per head.

    Args:
        rank: The size of a latent.
        plain: The size of the part of an expanded key without positions.
        value: The size of an expanded value.
    """

    rank: int
    plain: int
    value: int

    @property
    def products_saved(self) -> int:
        """The multiplications saved per pair of a query and a token."""
        # over latents, score and value take `rank` each; the rotated part costs the same both ways
        return 2 * self.rank - self.plain - self.value

    @property
    def products_spent(self) -> int:
        """The multiplications per expanded token; a query projected into the latent space costs the same."""
        return self.rank * (self.plain + self.value)


def plan_latents(
    input_row_offsets: TensorValue,
    kv_collection: PagedCacheValues,
    *,
    expansion: Expansion | None = None,
    count: int = 0,
) -> tuple[TensorValue, TensorValue]:
    """Decides for a batch, when the graph runs, how it attends to latents.

    With batch-invariant kernels nothing is expanded, and tokens are always selected.

    Args:
        input_row_offsets: The first row of each sequence.
        kv_collection: The cache.
        expansion: The savings and the cost of expansion; None: keys and values are never expanded.
        count: The maximum number of tokens that a token attends to; 0: all.

    Returns:
        Whether keys and values are expanded, and whether tokens are selected: bool, rank 0.
    """
    # with a negative saving the absorbed form is cheaper for any number of tokens
    pays = expansion if expansion is not None and expansion.products_saved > 0 else None
    plan = stage_declared(
        "latents.plan.ragged",
        [input_row_offsets, kv_collection.cache_lengths],
        {
            "least_rows": LEAST_ROWS if pays else 0,
            "most_cached": MOST_CACHED,
            "saved": pays.products_saved if pays else 0,
            "spent": pays.products_spent if pays else 0,
            "count": count,
        },
    )[0]
    return plan[0] != 0, plan[1] != 0


def select_tokens(
    kv_params: KVCacheParams,
    queries: TensorValue,
    weights: TensorValue,
    count: int,
    input_row_offsets: TensorValue,
    kv_collection: PagedCacheValues,
    layer_idx: TensorValue,
) -> TensorValue:
    """Selects the cached tokens that each new token attends to: those with the greatest scores; ties keep the earliest.

    The score of a token is the sum over heads of ``weight * max(query · key, 0)``; candidates are the new token itself
    and all tokens before it.

    Args:
        kv_params: The parameters of the cache of index keys: one head, with `is_mla`.
        queries: ``[total_seq_len, heads, head_dim]``.
        weights: The weight of each head, ``[total_seq_len, heads]``.
        count: The maximum number of tokens to select.
        input_row_offsets: The first row of each sequence.
        kv_collection: The cache, with the keys of the new tokens stored.
        layer_idx: The index of the layer in the cache.

    Returns:
        int32 ``[total_seq_len, count]``: positions in the sequence in ascending order, padded with -1.

    Raises:
        ValueError: A shape does not fit.
        TypeError: A dtype does not fit.
    """
    kv = kv_collection
    return stage_declared(
        "tokens.select.ragged.paged",
        [
            queries,
            weights,
            input_row_offsets,
            kv.kv_blocks,
            kv.cache_lengths,
            kv.lookup_table,
            layer_idx,
        ],
        {"count": count},
    )[0]


def attend_selected(
    kv_params: KVCacheParams,
    queries: TensorValue,
    selected: TensorValue,
    value_size: int,
    input_row_offsets: TensorValue,
    kv_collection: PagedCacheValues,
    layer_idx: TensorValue,
    scale: float,
) -> TensorValue:
    """Attention over selected latents, shared by all heads: a latent is a key, its first `value_size` elements a value.

    Args:
        kv_params: The parameters of the cache of latents.
        queries: ``[total_seq_len, n_heads, head_dim]``, in the space of the latents.
        selected: The tokens of each row, as `select_tokens` returns them.
        value_size: The size of a value.
        input_row_offsets: The first row of each sequence.
        kv_collection: The cache, with the latents of the new tokens stored.
        layer_idx: The index of the layer in the cache.
        scale: The scale of the attention scores.

    Returns:
        ``[total_seq_len, n_heads, value_size]``, of the queries' dtype.

    Raises:
        ValueError: A shape does not fit.
        TypeError: A dtype does not fit.
    """
    kv = kv_collection
    return stage_declared(
        "attention.selected.paged",
        [
            queries,
            selected,
            input_row_offsets,
            kv.kv_blocks,
            kv.cache_lengths,
            kv.lookup_table,
            layer_idx,
            ops.constant(np.array(scale, np.float32), DType.float32, DeviceRef.CPU()),
        ],
        {"value_size": value_size},
    )[0]
