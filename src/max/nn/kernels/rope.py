"""RoPE on ragged batches: by the positions of cached sequences, or by explicit positions."""

from __future__ import annotations

import numpy as np

from max._errors import ArgumentError
from max.dtype import DType
from max.graph import (
    StaticDim,
    TensorValue,
    ops,
)
from max.graph.ops.staging.stage import check_operand, stage_declared
from max.nn.kernels.cache import check_cache, store_kv_cache_ragged
from max.nn.kernels.norms import check_gamma, fused_qk_ragged_rms_norm
from max.nn.kernels.ragged import group_of_rows
from max.nn.kv_cache.cache_params import KVCacheParams
from max.nn.kv_cache.cache_values import PagedCacheValues

__all__ = [
    "fused_qk_ragged_rope",
    "fused_qk_rms_norm_rope_ragged",
    "rope_ragged",
    "rope_ragged_with_position_ids",
    "rope_split_store_ragged",
    "rotate_pairs",
    "rotate_ragged",
]


def fused_qk_ragged_rope(
    kv_params: KVCacheParams,
    input: TensorValue,
    input_row_offsets: TensorValue,
    kv_collection: PagedCacheValues,
    freqs_cis: TensorValue,
    layer_idx: TensorValue,
    interleaved: bool = True,
    position_ids: TensorValue | None = None,
    mrope_section: list[int] | None = None,
) -> TensorValue:
    """Applies RoPE to queries, and in place to the keys of the new tokens in the cache.

    The position of a token is the number of tokens before it in its sequence, in a tree of drafted tokens those that it
    sees (`PagedCacheValues.ancestors`). Keys in an 8-bit cache are rounded a
    second time; to avoid it, rotate them with `rotate_ragged` before they are stored.

    Args:
        kv_params: The parameters of the cache.
        input: The queries ``[total_seq_len, n_heads, head_dim]``.
        input_row_offsets: The first row of each sequence.
        kv_collection: The cache, with the new keys stored.
        freqs_cis: Interleaved cosines and sines, one row per position; cast to float32.
        layer_idx: The index of the layer in the cache.
        interleaved: Whether the two elements of a rotated pair are adjacent.
        position_ids: Explicit positions; not supported yet.
        mrope_section: Sections of positions; not supported yet.

    Returns:
        The rotated queries, of the input's shape and dtype.

    Raises:
        ValueError: A shape does not fit.
        TypeError: A dtype does not fit.
        NotImplementedError: `position_ids` or `mrope_section` is given.
    """
    op = "fused_qk_ragged_rope"
    if position_ids is not None or mrope_section is not None:
        raise NotImplementedError(f"{op}: positions are counted in the cache; position_ids and "
                                  "mrope_section have no kernel yet")  # fmt: skip
    return _rotate(
        op, kv_params, input, input_row_offsets, kv_collection, freqs_cis, layer_idx,
        {"interleaved": interleaved},
    )  # fmt: skip


def rotate_ragged(
    kv_params: KVCacheParams,
    input: TensorValue,
    input_row_offsets: TensorValue,
    kv_collection: PagedCacheValues,
    freqs_cis: TensorValue,
    layer_idx: TensorValue,
    interleaved: bool = True,
) -> TensorValue:
    """Applies RoPE to queries, or to keys that are not stored yet. The cache is not changed.

    Args:
        kv_params: The parameters of the cache.
        input: ``[total_seq_len, heads, head_dim]``.
        input_row_offsets: The first row of each sequence.
        kv_collection: The cache.
        freqs_cis: Interleaved cosines and sines, one row per position; cast to float32.
        layer_idx: The index of the layer in the cache.
        interleaved: Whether the two elements of a rotated pair are adjacent.

    Returns:
        The rotated heads, of the input's shape and dtype.

    Raises:
        ValueError: A shape does not fit.
        TypeError: A dtype does not fit.
    """
    return _rotate(
        "rotate_ragged", kv_params, input, input_row_offsets, kv_collection, freqs_cis, layer_idx,
        {"interleaved": interleaved, "rotates_cache": False},
    )  # fmt: skip


def _rotate(
    op: str, kv_params: KVCacheParams, input: TensorValue, input_row_offsets: TensorValue,
    kv_collection: PagedCacheValues, freqs_cis: TensorValue, layer_idx: TensorValue,
    parameters: dict[str, bool | int | str | DType],
) -> TensorValue:  # fmt: skip
    check_cache(op, kv_params, kv_collection)
    trees = list[TensorValue]()
    if kv_collection.ancestors is not None:
        trees.append(kv_collection.ancestors)
        parameters = {**parameters, "trees": True}
    return stage_declared(
        "rope.ragged.paged",
        [
            input,
            input_row_offsets,
            ops.cast(freqs_cis, DType.float32),
            *kv_collection,
            layer_idx,
            *trees,
        ],
        parameters,
    )[0]


def rotate_pairs(
    x: TensorValue, cosine: TensorValue, sine: TensorValue, interleaved: bool
) -> TensorValue:
    """Rotates the pairs of elements of the last axis, which has a static size.

    Args:
        x: ``[…, size]``.
        cosine: The cosine of each pair, of a shape that broadcasts to ``[…, size / 2]``.
        sine: The sine of each pair.
        interleaved: Whether the two elements of a pair are adjacent; otherwise they are half a row apart.
    """
    # first, second: [..., size / 2], the two elements of each pair
    half = int(x.shape[-1]) // 2
    if interleaved:
        pairs = ops.reshape(x, [*x.shape[:-1], half, 2])
        first, second = pairs[..., 0], pairs[..., 1]
    else:
        first, second = x[..., :half], x[..., half:]
    # the complex product (first + i second) * (cosine + i sine)
    rotated = [first * cosine - second * sine, first * sine + second * cosine]
    if interleaved:
        return ops.reshape(ops.stack(rotated, axis=-1), x.shape)
    return ops.concat(rotated, axis=-1)


def _rotate_at(
    op: str,
    input: TensorValue,
    freqs_cis: TensorValue,
    positions: TensorValue,
    interleaved: bool,
    rope_first: bool,
) -> TensorValue:
    """Rotates heads ``[rows, heads, head_dim]`` by the table rows at int64 positions ``[rows]``."""
    if input.rank != 3 or not isinstance(input.shape[2], StaticDim):
        raise ValueError(
            f"{op}: the input is {input!r}, expected [total_seq_len, n_heads, a number]"
        )
    if freqs_cis.rank != 2 or not isinstance(freqs_cis.shape[1], StaticDim):
        raise ValueError(f"{op}: freqs_cis is {freqs_cis!r}, expected [positions, a number]")
    size, width = int(input.shape[2]), int(freqs_cis.shape[1])
    if width % 2 or not 0 < width <= size:
        raise ValueError(
            f"{op}: freqs_cis is {freqs_cis!r}, expected an even number of columns up to {size}"
        )
    rows, heads, _ = input.shape
    # [rows, width]: cosine and sine of each pair, side by side
    table = ops.gather(ops.cast(freqs_cis, DType.float32), positions, axis=0)
    # the axis of size 1 broadcasts over heads
    pairs = ops.reshape(table, [rows, 1, width // 2, 2])
    cosine, sine = pairs[..., 0], pairs[..., 1]
    # the other elements of a head have no position
    begin = 0 if rope_first else size - width
    # in float32, then rounded once
    x = ops.cast(input[:, :, begin : begin + width], DType.float32)
    rotated = rotate_pairs(x, cosine, sine, interleaved)
    rotated = ops.cast(rotated, input.dtype)
    if width == size:
        return rotated
    unrotated = input[:, :, width:] if rope_first else input[:, :, :begin]
    return ops.concat([rotated, unrotated] if rope_first else [unrotated, rotated], axis=-1)


def rope_ragged(
    input: TensorValue,
    input_row_offsets: TensorValue,
    start_pos: TensorValue,
    freqs_cis: TensorValue,
    *,
    interleaved: bool = True,
    rope_first: bool = False,
    output_dtype: DType | None = None,
) -> TensorValue:
    """Rotates the heads of each token by its position in its sequence; computed in float32.

    Args:
        input: ``[total_seq_len, n_heads, head_dim]``.
        input_row_offsets: The first row of each sequence, uint32 ``[batch + 1]``.
        start_pos: The position of each sequence's first row, uint32 ``[batch]``.
        freqs_cis: Interleaved cosines and sines, one row per position; if it has fewer columns than `head_dim`, that
            number of elements of a head is rotated.
        interleaved: Whether the two elements of a rotated pair are adjacent; otherwise element i is paired with element
            ``i + columns / 2``.
        rope_first: If only a part of a head is rotated: whether it is the first elements instead of the last ones.
        output_dtype: The dtype of the result; by default that of the input. The result is rounded to the dtype of the
            input before the cast.

    Returns:
        The rotated heads, of the shape of the input. Rows past the last offset are undefined.

    Raises:
        ValueError: A shape does not fit. A position past the table raises when the graph runs.
        TypeError: A dtype does not fit.
    """
    op = "rope_ragged"
    check_operand(op, "input_row_offsets", input_row_offsets, DType.uint32, 1)
    check_operand(op, "start_pos", start_pos, DType.uint32, 1)
    rows = input.shape[0]
    # rows past the last offset get positions as if a sequence began there
    starts = ops.cast(start_pos, DType.int64)
    nothing = ops.constant([0], DType.int64, starts.device)
    begins = ops.cast(input_row_offsets, DType.int64)
    # [total_seq_len]: the sequence of each row; its position is that of the first row plus the distance to it
    group = group_of_rows(rows, input_row_offsets)
    first = ops.gather(ops.concat([starts, nothing]), group, axis=0)
    begin = ops.gather(begins, group, axis=0)
    numbers = ops.range(
        0, TensorValue(rows), 1, out_dim=rows, dtype=DType.int64, device=input.device
    )
    rotated = _rotate_at(op, input, freqs_cis, first + numbers - begin, interleaved, rope_first)
    return rotated if output_dtype is None else ops.cast(rotated, output_dtype)


def rope_ragged_with_position_ids(
    input: TensorValue,
    freqs_cis: TensorValue,
    position_ids: TensorValue,
    *,
    mrope_section: list[int] | None = None,
    interleaved: bool = True,
) -> TensorValue:
    """Rotates the heads of each token by an explicit position; computed in float32.

    Args:
        input: ``[total_seq_len, n_heads, head_dim]``.
        freqs_cis: Interleaved cosines and sines, one row of `head_dim` numbers per position.
        position_ids: uint32 ``[total_seq_len]`` or ``[1, total_seq_len]``.
        mrope_section: Sections of positions; not supported yet.
        interleaved: Whether the two elements of a rotated pair are adjacent; otherwise element i is paired with element
            ``i + columns / 2``.

    Returns:
        The rotated heads, of the shape and dtype of the input.

    Raises:
        ValueError: A shape does not fit. A position past the table raises when the graph runs.
        TypeError: The positions are not uint32.
        NotImplementedError: `mrope_section` or positions of several sections are given.
    """
    op = "rope_ragged_with_position_ids"
    sections = position_ids.rank == 2 and position_ids.shape[0] != 1
    if mrope_section is not None or sections:
        raise NotImplementedError(
            f"{op}: a token has one position; mrope_section and position_ids {position_ids!r} have no kernel yet"
        )
    if position_ids.rank == 2:
        position_ids = position_ids[0]
    if position_ids.dtype is not DType.uint32:
        raise ArgumentError(f"{op}: position_ids is {position_ids!r}, expected uint32")
    if position_ids.rank != 1 or position_ids.shape[0] != input.shape[0]:
        raise ValueError(f"{op}: position_ids is {position_ids!r}, expected [{input.shape[0]}]")
    if freqs_cis.rank == 2 and input.rank == 3 and freqs_cis.shape[1] != input.shape[2]:
        raise ValueError(
            f"{op}: freqs_cis is {freqs_cis!r}, expected [positions, {input.shape[2]}]"
        )
    positions = ops.cast(position_ids, DType.int64)
    return _rotate_at(op, input, freqs_cis, positions, interleaved, rope_first=True)


def fused_qk_rms_norm_rope_ragged(
    kv_params: KVCacheParams,
    input: TensorValue,
    input_row_offsets: TensorValue,
    kv_collection: PagedCacheValues,
    q_gamma: TensorValue,
    k_gamma: TensorValue,
    freqs_cis: TensorValue,
    epsilon: float | np.floating,
    layer_idx: TensorValue,
    weight_offset: float | np.floating,
    interleaved: bool = True,
    multiply_before_cast: bool = True,
    q_out_dtype: DType | None = None,
) -> TensorValue:
    """`fused_qk_ragged_rms_norm`, then `max.nn.kernels.fused_qk_ragged_rope`.

    Args:
        kv_params: The parameters of the cache.
        input: The queries ``[total_seq_len, n_heads, head_dim]``.
        input_row_offsets: The first row of each sequence, uint32.
        kv_collection: The cache, with the new keys stored.
        q_gamma: The weight of queries, ``[head_dim]``.
        k_gamma: The weight of keys, ``[head_dim]``.
        freqs_cis: Interleaved cosines and sines, one row per position.
        epsilon: Added to the mean of squares.
        layer_idx: The index of the layer in the cache, uint32.
        weight_offset: Added to the weights.
        interleaved: Whether the two elements of a rotated pair are adjacent.
        multiply_before_cast: Whether the product with the weight is computed in float32, before it is rounded.
        q_out_dtype: The dtype of the result; by default that of the input. The result is rounded to the dtype of the
            input before the cast.

    Returns:
        The normalized and rotated queries, of the shape of the input.

    Raises:
        ValueError: A shape does not fit.
        TypeError: A dtype does not fit.
    """
    queries = fused_qk_ragged_rms_norm(
        kv_params, input, input_row_offsets, kv_collection, q_gamma, k_gamma, epsilon, layer_idx,
        weight_offset, multiply_before_cast,
    )  # fmt: skip
    rotated = fused_qk_ragged_rope(
        kv_params, queries, input_row_offsets, kv_collection, freqs_cis, layer_idx, interleaved
    )
    return rotated if q_out_dtype is None else ops.cast(rotated, q_out_dtype)


def rope_split_store_ragged(
    kv_params: KVCacheParams,
    qkv: TensorValue,
    input_row_offsets: TensorValue,
    freqs_cis: TensorValue,
    kv_collection: PagedCacheValues,
    layer_idx: TensorValue,
    n_heads: int,
    interleaved: bool = True,
    position_ids: TensorValue | None = None,
    mrope_section: list[int] | None = None,
    fuse: bool = True,
    q_out_dtype: DType | None = None,
    q_norm_weight: TensorValue | None = None,
    k_norm_weight: TensorValue | None = None,
    rms_norm_eps: float | None = None,
    k_eq_v: bool = False,
) -> TensorValue:
    """Rotates queries and keys of a joint projection, and writes keys and values to the cache.

    Args:
        kv_params: The parameters of the cache.
        qkv: ``[total_seq_len, (n_heads + 2 * kv_heads) * head_dim]``: queries, then keys, then values.
        input_row_offsets: The first row of each sequence, uint32.
        freqs_cis: Interleaved cosines and sines, one row per position.
        kv_collection: The cache.
        layer_idx: The index of the layer in the cache, uint32.
        n_heads: The number of query heads.
        interleaved: Whether the two elements of a rotated pair are adjacent.
        position_ids: The positions, uint32 ``[1, total_seq_len]``; by default the positions after the cached tokens.
        mrope_section: Sections of positions; not supported yet.
        fuse: A hint to the compiler of MAX; not used.
        q_out_dtype: The dtype of the result; by default that of `qkv`. The result is rounded to the dtype of `qkv`
            before the cast.
        q_norm_weight: The weight of the norm of queries, ``[head_dim]``. If given, all heads are normalized before the
            rotation; those of values are normalized without a weight.
        k_norm_weight: The weight of the norm of keys, ``[head_dim]``.
        rms_norm_eps: Added to the mean of squares; required if the norm weights are given.
        k_eq_v: Whether the values are the keys before rotation; `qkv` then holds queries and keys only. Requires the
            norm weights.

    Returns:
        The rotated queries, ``[total_seq_len, n_heads * head_dim]``.

    Raises:
        ValueError: A shape does not fit, or an argument that another one requires is missing.
        TypeError: A dtype does not fit.
        NotImplementedError: `mrope_section` is given.
    """
    op, size = "rope_split_store_ragged", kv_params.head_dim
    kv_heads = kv_params.n_kv_heads_per_device
    normalized = q_norm_weight is not None
    if normalized != (k_norm_weight is not None) or normalized != (rms_norm_eps is not None):
        raise ValueError(f"{op}: q_norm_weight, k_norm_weight and rms_norm_eps go together")
    if k_eq_v and not normalized:
        raise ValueError(f"{op}: k_eq_v needs q_norm_weight")
    if normalized and position_ids is not None:
        raise ValueError(f"{op}: q_norm_weight and position_ids do not go together")
    heads = [n_heads, kv_heads] if k_eq_v else [n_heads, kv_heads, kv_heads]
    if qkv.rank != 2 or qkv.shape[1] != sum(heads) * size:
        raise ValueError(f"{op}: qkv is {qkv!r}, expected [total_seq_len, {sum(heads) * size}]")
    rows = qkv.shape[0]
    parts = [
        ops.reshape(part, [rows, count, size])
        for part, count in zip(
            ops.split(qkv, [count * size for count in heads], axis=1), heads, strict=True
        )
    ]
    # with k_eq_v there are two parts, and the last one is the keys
    queries, keys, values = parts[0], parts[1], parts[-1]
    if q_norm_weight is not None and k_norm_weight is not None and rms_norm_eps is not None:
        check_gamma(op, "q_norm_weight", q_norm_weight, size)
        check_gamma(op, "k_norm_weight", k_norm_weight, size)
        # the values are normalized without a weight
        ones = ops.constant(np.ones(size, np.float32), DType.float32, qkv.device)
        queries, keys, values = (
            ops.rms_norm(x, ops.cast(gamma, x.dtype), rms_norm_eps)
            for x, gamma in ((queries, q_norm_weight), (keys, k_norm_weight), (values, ones))
        )
    if position_ids is not None or mrope_section is not None:
        if position_ids is None:
            raise ValueError(f"{op}: mrope_section needs position_ids")
        queries, keys = (
            rope_ragged_with_position_ids(
                x, freqs_cis, position_ids, mrope_section=mrope_section, interleaved=interleaved
            )
            for x in (queries, keys)
        )
    else:
        queries, keys = (
            rotate_ragged(
                kv_params, x, input_row_offsets, kv_collection, freqs_cis, layer_idx, interleaved
            )
            for x in (queries, keys)
        )
    k, v = (ops.reshape(x, [rows, kv_heads * size]) for x in (keys, values))
    store_kv_cache_ragged(kv_params, k, v, input_row_offsets, kv_collection, layer_idx)
    queries = ops.reshape(queries, [rows, n_heads * size])
    return queries if q_out_dtype is None else ops.cast(queries, q_out_dtype)
