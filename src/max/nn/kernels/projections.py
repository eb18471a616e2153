"""Projections to queries, keys and values: plain, GPTQ, GGUF and float8 weights; keys and values go to the cache."""

from __future__ import annotations

from max.dtype import DType
from max.graph import TensorValue, ops
from max.graph.quantization import QuantizationConfig, QuantizationEncoding
from max.nn.float8_config import (
    Float8InputScaleSpec,
    Float8ScaleGranularity,
    Float8ScaleOrigin,
    Float8WeightScaleSpec,
)
from max.nn.kernels.cache import (
    KEYS,
    VALUES,
    row_size,
    store_kv_cache_ragged,
    store_rows,
)
from max.nn.kernels.float8 import dynamic_scaled_matmul, matmul_static_scaled_float8
from max.nn.kernels.gptq import gptq_rows
from max.nn.kernels.products import matmul_input, project, with_bias
from max.nn.kernels.ragged import padded_rows, ragged_rows
from max.nn.kv_cache.cache_params import KVCacheParams
from max.nn.kv_cache.cache_values import PagedCacheValues

__all__ = [
    "fused_qkv_padded_matmul",
    "fused_qkv_ragged_matmul",
    "fused_qkv_ragged_matmul_quantized",
    "fused_qkv_ragged_matmul_scaled_float8",
    "matmul_k_cache_ragged",
    "matmul_k_cache_ragged_scaled_float8",
    "matmul_kv_cache_ragged",
    "unfused_qkv_ragged_matmul_gguf_quantized",
]


def fused_qkv_ragged_matmul(
    kv_params: KVCacheParams,
    input: TensorValue,
    input_row_offsets: TensorValue,
    wqkv: TensorValue,
    kv_collection: PagedCacheValues,
    layer_idx: TensorValue,
    n_heads: int,
    bias: TensorValue | None = None,
) -> TensorValue:
    """Projects to queries, keys and values, and writes keys and values to the cache.

    Args:
        kv_params: The parameters of the cache.
        input: ``[total_seq_len, hidden_size]``.
        input_row_offsets: The first row of each sequence.
        wqkv: ``[(n_heads + 2 * kv_heads) * head_dim, hidden_size]``: the rows for queries, then keys, then values.
        kv_collection: The cache.
        layer_idx: The index of the layer in the cache.
        n_heads: The number of query heads.
        bias: ``[(n_heads + 2 * kv_heads) * head_dim]``.

    Returns:
        The queries ``[total_seq_len, n_heads * head_dim]``, of the weight's dtype.

    Raises:
        ValueError: A shape does not fit.
        TypeError: A dtype does not fit.
    """
    op = "fused_qkv_ragged_matmul"
    if input.rank != 2:
        raise ValueError(f"{op}: the input is {input!r}, expected [total_seq_len, hidden_size]")
    q_width = n_heads * kv_params.head_dim
    kv_width = kv_params.n_kv_heads_per_device * kv_params.head_dim
    if wqkv.rank != 2 or wqkv.shape[0] != q_width + 2 * kv_width:
        raise ValueError(
            f"{op}: wqkv is {wqkv!r}; {n_heads} query heads and twice "
            f"{kv_params.n_kv_heads_per_device} key heads of {kv_params.head_dim} need "
            f"{q_width + 2 * kv_width} rows"
        )
    qkv = project(matmul_input(input, wqkv), wqkv, bias)
    # one product for all three: x is read once
    q, k, v = ops.split(qkv, [q_width, kv_width, kv_width], axis=1)
    store_kv_cache_ragged(kv_params, k, v, input_row_offsets, kv_collection, layer_idx)
    return q


def matmul_kv_cache_ragged(
    kv_params: KVCacheParams,
    hidden_states: TensorValue,
    input_row_offsets: TensorValue,
    weight: TensorValue,
    kv_collection: PagedCacheValues,
    layer_idx: TensorValue,
) -> None:
    """Projects to keys and values, and writes them to the cache.

    Args:
        kv_params: The parameters of the cache.
        hidden_states: ``[total_seq_len, hidden_size]``.
        input_row_offsets: The first row of each sequence.
        weight: ``[2 * kv_heads * head_dim, hidden_size]``: the rows for keys, then for values.
        kv_collection: The cache.
        layer_idx: The index of the layer in the cache.

    Raises:
        ValueError: A shape does not fit.
        TypeError: A dtype does not fit.
    """
    width = kv_params.n_kv_heads_per_device * kv_params.head_dim
    if weight.rank != 2 or weight.shape[0] != 2 * width:
        raise ValueError(
            f"matmul_kv_cache_ragged: the weight is {weight!r}, expected {2 * width} rows"
        )
    kv = project(matmul_input(hidden_states, weight), weight)
    k, v = ops.split(kv, [width, width], axis=1)
    store_kv_cache_ragged(kv_params, k, v, input_row_offsets, kv_collection, layer_idx)


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
    if weight.rank != 2 or weight.shape[0] != row_size(kv_params):
        raise ValueError(
            f"matmul_k_cache_ragged: the weight is {weight!r}, expected {row_size(kv_params)} rows"
        )
    keys = project(matmul_input(hidden_states, weight), weight)
    store_rows(kv_params, keys, input_row_offsets, kv_collection, layer_idx)


def fused_qkv_padded_matmul(
    kv_params: KVCacheParams,
    input: TensorValue,
    wqkv: TensorValue,
    kv_collection: PagedCacheValues,
    layer_idx: TensorValue,
    valid_lengths: TensorValue,
    n_heads: int,
) -> TensorValue:
    """Projects a padded batch to queries, keys and values, and writes keys and values to the cache.

    Args:
        kv_params: The parameters of the cache.
        input: ``[batch, seq_len, hidden_size]``.
        wqkv: ``[(n_heads + 2 * kv_heads) * head_dim, hidden_size]``: the rows for queries, then keys, then values.
        kv_collection: The cache.
        layer_idx: The index of the layer in the cache, uint32.
        valid_lengths: The number of new tokens of each sequence, uint32 ``[batch]``; keys and values of tokens past
            this length are not stored, and their queries are 0.
        n_heads: The number of query heads.

    Returns:
        The queries ``[batch, seq_len, n_heads * head_dim]``, of the weight's dtype.

    Raises:
        ValueError: A shape does not fit.
        TypeError: A dtype does not fit.
    """
    op = "fused_qkv_padded_matmul"
    if input.rank != 3:
        raise ValueError(f"{op}: the input is {input!r}, expected [batch, seq_len, hidden_size]")
    rows, offsets = ragged_rows(op, input, valid_lengths)
    queries = fused_qkv_ragged_matmul(
        kv_params, rows, offsets, wqkv, kv_collection, layer_idx, n_heads
    )
    return padded_rows(op, queries, input, valid_lengths)


def _store_qkv(
    kv_params: KVCacheParams,
    qkv: TensorValue,
    n_heads: int,
    input_row_offsets: TensorValue,
    kv_collection: PagedCacheValues,
    layer_idx: TensorValue,
) -> TensorValue:
    """Writes keys and values to the cache; returns the queries."""
    width = n_heads * kv_params.head_dim
    kv_width = kv_params.n_kv_heads_per_device * kv_params.head_dim
    if qkv.shape[1] != width + 2 * kv_width:
        raise ValueError(
            f"wqkv has {qkv.shape[1]} rows; {n_heads} query heads and twice {kv_params.n_kv_heads_per_device} key "
            f"heads of {kv_params.head_dim} need {width + 2 * kv_width}"
        )
    q, k, v = ops.split(qkv, [width, kv_width, kv_width], axis=1)
    store_rows(kv_params, k, input_row_offsets, kv_collection, layer_idx, KEYS)
    store_rows(kv_params, v, input_row_offsets, kv_collection, layer_idx, VALUES)
    return q


def fused_qkv_ragged_matmul_quantized(
    kv_params: KVCacheParams,
    input: TensorValue,
    input_row_offsets: TensorValue,
    wqkv: TensorValue,
    kv_collection: PagedCacheValues,
    layer_idx: TensorValue,
    n_heads: int,
    quantization_config: QuantizationConfig,
    perm_idx: TensorValue | None = None,
    bias: TensorValue | None = None,
) -> TensorValue:
    """`fused_qkv_ragged_matmul` with a GPTQ weight in one tensor, which is decoded when it is loaded.

    Args:
        kv_params: The parameters of the cache.
        input: ``[total_seq_len, hidden_size]``.
        input_row_offsets: The first row of each sequence.
        wqkv: uint8 rows of packed integers and scales; see `gptq_rows`.
        kv_collection: The cache.
        layer_idx: The index of the layer in the cache.
        n_heads: The number of query heads.
        quantization_config: How the weight was quantized.
        perm_idx: The index of the input that each column of the weight multiplies, integers ``[hidden_size]``.
        bias: ``[(n_heads + 2 * kv_heads) * head_dim]``.

    Returns:
        The queries ``[total_seq_len, n_heads * head_dim]``, of the input's dtype.

    Raises:
        ValueError: A shape does not fit.
    """
    # GPTQ with act-order sorts the columns of the weight: x follows them
    x = input if perm_idx is None else ops.gather(input, ops.cast(perm_idx, DType.int64), axis=1)
    weight = gptq_rows(wqkv, int(input.shape[1]), quantization_config)
    qkv = ops.cast(project(x, ops.cast(weight, x.dtype), bias), input.dtype)
    return _store_qkv(kv_params, qkv, n_heads, input_row_offsets, kv_collection, layer_idx)


def unfused_qkv_ragged_matmul_gguf_quantized(
    kv_params: KVCacheParams,
    input: TensorValue,
    input_row_offsets: TensorValue,
    n_heads: int,
    q_weight: TensorValue,
    k_weight: TensorValue,
    v_weight: TensorValue,
    quantization_encoding_q: QuantizationEncoding,
    quantization_encoding_k: QuantizationEncoding,
    quantization_encoding_v: QuantizationEncoding,
    kv_collection: PagedCacheValues,
    layer_idx: TensorValue,
) -> TensorValue:
    """Projects to queries, keys and values with encoded weights, and writes keys and values to the cache.

    Args:
        kv_params: The parameters of the cache.
        input: ``[total_seq_len, hidden_size]``.
        input_row_offsets: The first row of each sequence.
        n_heads: The number of query heads.
        q_weight: Rows of blocks ``[n_heads * head_dim, bytes]``.
        k_weight: Rows of blocks ``[kv_heads * head_dim, bytes]``.
        v_weight: Rows of blocks ``[kv_heads * head_dim, bytes]`` for the values.
        quantization_encoding_q: The encoding of `q_weight`.
        quantization_encoding_k: The encoding of `k_weight`.
        quantization_encoding_v: The encoding of `v_weight`.
        kv_collection: The cache.
        layer_idx: The index of the layer in the cache.

    Returns:
        The queries ``[total_seq_len, n_heads * head_dim]``.

    Raises:
        ValueError: A shape does not fit.
    """
    weights = (q_weight, k_weight, v_weight)
    encodings = (quantization_encoding_q, quantization_encoding_k, quantization_encoding_v)
    # encodings differ, so the weights cannot be one; the compiler merges those that are alike
    parts = [project(input, w, None, e) for w, e in zip(weights, encodings, strict=True)]
    qkv = ops.concat(parts, axis=1)
    return _store_qkv(kv_params, qkv, n_heads, input_row_offsets, kv_collection, layer_idx)


def fused_qkv_ragged_matmul_scaled_float8(
    kv_params: KVCacheParams,
    input: TensorValue,
    input_row_offsets: TensorValue,
    wqkv: TensorValue,
    kv_collection: PagedCacheValues,
    layer_idx: TensorValue,
    n_heads: int,
    input_scale: TensorValue,
    weight_scale: TensorValue,
    bias: TensorValue | None = None,
) -> TensorValue:
    """`fused_qkv_ragged_matmul` of scaled float8 elements.

    Args:
        kv_params: The parameters of the cache.
        input: float8 ``[total_seq_len, hidden_size]``.
        input_row_offsets: The first row of each sequence.
        wqkv: float8 ``[(n_heads + 2 * kv_heads) * head_dim, hidden_size]``.
        kv_collection: The cache.
        layer_idx: The index of the layer in the cache.
        n_heads: The number of query heads.
        input_scale: The input's scale, of one element, or ``[groups, total_seq_len]``.
        weight_scale: The weight's scales.
        bias: ``[(n_heads + 2 * kv_heads) * head_dim]``.

    Returns:
        The queries ``[total_seq_len, n_heads * head_dim]``, bfloat16.

    Raises:
        ValueError: A shape does not fit.
        TypeError: An operand is not a float8 tensor.
    """
    # one scale for the whole input
    if all(dim == 1 for dim in input_scale.shape):
        qkv = matmul_static_scaled_float8(input, wqkv, input_scale, weight_scale)
    else:
        qkv = dynamic_scaled_matmul(input, wqkv, input_scale, weight_scale, *_specs(None))
    qkv = with_bias(qkv, bias)
    return _store_qkv(kv_params, qkv, n_heads, input_row_offsets, kv_collection, layer_idx)


def _specs(
    blocks: tuple[int, int] | None,
) -> tuple[Float8InputScaleSpec, Float8WeightScaleSpec]:
    """Scale specs with the block size, which the shapes of the scales do not determine."""
    kind = Float8ScaleGranularity.TENSOR if blocks is None else Float8ScaleGranularity.BLOCK
    rows = Float8InputScaleSpec(
        Float8ScaleGranularity.COLWISE, Float8ScaleOrigin.DYNAMIC, DType.float32
    )
    return rows, Float8WeightScaleSpec(kind, DType.float32, blocks)


def matmul_k_cache_ragged_scaled_float8(
    kv_params: KVCacheParams,
    hidden_states: TensorValue,
    input_row_offsets: TensorValue,
    weight: TensorValue,
    input_scale: TensorValue,
    weight_scale: TensorValue,
    kv_collection: PagedCacheValues,
    scales_granularity_mnk: tuple[int, int, int],
    layer_idx: TensorValue,
) -> None:
    """Projects scaled float8 elements to keys, and writes them to the cache.

    Args:
        kv_params: The parameters of the cache.
        hidden_states: float8 ``[total_seq_len, hidden_size]``.
        input_row_offsets: The first row of each sequence.
        weight: float8 ``[kv_heads * head_dim, hidden_size]``.
        input_scale: ``[hidden_size / block, total_seq_len]``.
        weight_scale: ``[row blocks, column blocks]``.
        kv_collection: The cache.
        scales_granularity_mnk: The numbers of input rows, weight rows and columns that share a scale; the first is 1.
        layer_idx: The index of the layer in the cache.

    Raises:
        ValueError: A shape does not fit.
        TypeError: An operand is not a float8 tensor.
    """
    # rows of the input, then rows and columns of a block of the weight
    rows, *blocks = scales_granularity_mnk
    if rows != 1:
        raise ValueError(
            f"matmul_k_cache_ragged_scaled_float8: {rows} rows of the input share a scale, expected 1"
        )
    specs = _specs((blocks[0], blocks[1]))
    keys = dynamic_scaled_matmul(
        hidden_states, weight, input_scale, weight_scale, *specs, DType.float32
    )
    store_rows(kv_params, keys, input_row_offsets, kv_collection, layer_idx)
