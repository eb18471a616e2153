"""The base of attention layers over the paged KV cache: projections, rotation, stores, attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from max.dtype import DType
from max.graph import DeviceRef, TensorValue, Weight, ops
from max.nn.clamp import clamp
from max.nn.kernels.attention import flash_attention_ragged
from max.nn.kernels.cache import store_kv_cache_ragged
from max.nn.kernels.products import HALF, project
from max.nn.kernels.rope import fused_qk_ragged_rope, rotate_ragged
from max.nn.kv_cache.cache_params import KVCacheParams
from max.nn.kv_cache.cache_values import PagedCacheValues
from max.nn.layer import Module
from max.nn.layers.linear import Linear

__all__ = ["CachedAttention"]


class CachedAttention(Module):
    """Base of attention layers of ragged batches over the paged KV cache.

    A layer projects its input to queries, keys and values, may change them, and calls `attend_tokens` with its mask:
    keys and values are stored (`store_rotated` or `store`), the new tokens attend to the cache (`attend_cache`), and
    the result is projected (`project_out`).

    Weights: ``q_proj``, ``k_proj``, ``v_proj`` (or ``qkv_proj.weight``, stacked), and ``o_proj``.
    """

    def __init__(
        self,
        *,
        num_attention_heads: int,
        num_key_value_heads: int,
        hidden_size: int,
        kv_params: KVCacheParams,
        devices: Sequence[DeviceRef] | None,
        dtype: DType,
        linear_cls: Callable[..., Linear],
        stacked_qkv: bool,
        has_bias: bool,
        clip_qkv: float | None,
    ) -> None:
        name = type(self).__name__
        if stacked_qkv and has_bias:
            raise ValueError(f"{name}: stacked_qkv has no bias")
        if stacked_qkv and clip_qkv is not None:
            raise ValueError(f"{name}: clip_qkv and stacked_qkv do not go together")
        if num_key_value_heads < 1 or num_attention_heads % num_key_value_heads:
            raise ValueError(
                f"{name}: {num_attention_heads} query heads cannot share {num_key_value_heads} "
                "key heads"
            )
        self.n_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.hidden_size = hidden_size
        self.kv_params = kv_params
        self.devices = list(devices) if devices else [DeviceRef.CPU()]
        self.stacked_qkv, self.has_bias, self.clip_qkv = stacked_qkv, has_bias, clip_qkv
        self.q_width = num_attention_heads * kv_params.head_dim
        self.kv_width = num_key_value_heads * kv_params.head_dim
        device = self.devices[0]

        def linear(in_dim: int, out_dim: int, **kwargs: Any) -> Linear:
            return linear_cls(in_dim=in_dim, out_dim=out_dim, dtype=dtype, device=device, **kwargs)

        if stacked_qkv:
            self.qkv_proj = Weight(
                "qkv_proj.weight", dtype, [self.q_width + 2 * self.kv_width, hidden_size], device
            )
        else:
            for part, width in (("q", self.q_width), ("k", self.kv_width), ("v", self.kv_width)):
                setattr(
                    self,
                    f"{part}_proj",
                    linear(hidden_size, width, has_bias=has_bias, clip_weight=clip_qkv),
                )
        self.o_proj = linear(self.q_width, hidden_size)

    q_proj: Linear
    """The projection to queries; absent if the weights are stacked."""
    k_proj: Linear
    """The projection to keys; absent if the weights are stacked."""
    v_proj: Linear
    """The projection to values; absent if the weights are stacked."""

    @property
    def wqkv(self) -> TensorValue:
        """The weights of queries, keys and values, stacked by rows.

        Raises:
            ValueError: Their encodings differ.
        """
        if self.stacked_qkv:
            return TensorValue(self.qkv_proj)
        parts: list[TensorValue] = []
        encodings = {
            p.weight.quantization_encoding for p in (self.q_proj, self.k_proj, self.v_proj)
        }
        if len(encodings) > 1:
            names = ", ".join(sorted("none" if e is None else e.value for e in encodings))
            raise ValueError(
                f"{type(self).__name__}: queries, keys and values have several encodings ({names}); "
                "use the projections"
            )
        for projection in (self.q_proj, self.k_proj, self.v_proj):
            weight: TensorValue = projection.weight
            if self.clip_qkv is not None:
                weight = clamp(weight, min=-self.clip_qkv, max=self.clip_qkv)
            parts.append(weight)
        return ops.concat(parts, axis=0)

    @property
    def wqkv_bias(self) -> TensorValue | None:
        """The biases of queries, keys and values, concatenated; None without biases."""
        if not self.has_bias:
            return None
        biases = [p.bias for p in (self.q_proj, self.k_proj, self.v_proj)]
        return ops.concat([TensorValue(b) for b in biases if b is not None], axis=0)

    def project_qkv(self, x: TensorValue) -> tuple[TensorValue, TensorValue, TensorValue]:
        """Queries ``[total_seq_len, n_heads * head_dim]``, keys and values, of the input's dtype.

        If the input is float32, they are float32 for weights of any dtype: queries are rotated before they are used,
        and keys and values are rounded to the cache's dtype, so an earlier rounding would only add error.
        """
        if self.stacked_qkv:
            encoding = self.qkv_proj.quantization_encoding
            qkv = project(x, TensorValue(self.qkv_proj), encoding=encoding)
            # each [total_seq_len, width]
            q, k, v = ops.split(qkv, [self.q_width, self.kv_width, self.kv_width], axis=1)
            return q, k, v
        # three products read the weights in place; one product needs them concatenated
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)

    def attended_dtype(self, q: TensorValue) -> DType:
        """The dtype of the attention output that the output projection reads without a cast."""
        weight = self.o_proj.weight.dtype
        return weight if weight in HALF and q.dtype is DType.float32 else q.dtype

    def queries_for(self, q: TensorValue) -> TensorValue:
        """Casts queries for attention: to the 16-bit dtype of the cache if the weights have no more precision."""
        weight = self.o_proj.weight
        # block encodings have fewer than 16 bits per element
        rounded = weight.dtype in HALF or weight.quantization_encoding is not None
        return ops.cast(q, self.kv_params.dtype) if rounded and self.kv_params.dtype in HALF else q

    def store_rotated(
        self,
        queries: TensorValue,
        keys: TensorValue,
        v: TensorValue,
        input_row_offsets: TensorValue,
        kv_collection: PagedCacheValues,
        freqs_cis: TensorValue,
        layer_idx: TensorValue,
        interleaved: bool,
    ) -> TensorValue:
        """Rotates queries and keys by the positions of their tokens, and writes keys and values to the cache.

        Args:
            queries: ``[total_seq_len, n_heads, head_dim]``.
            keys: ``[total_seq_len, num_key_value_heads, head_dim]``, or with these heads concatenated.
            v: The values ``[total_seq_len, num_key_value_heads * head_dim]``.
            input_row_offsets: The first row of each sequence.
            kv_collection: The cache.
            freqs_cis: Interleaved cosines and sines, one row per position.
            layer_idx: The index of the layer in the cache.
            interleaved: Whether the two elements of a rotated pair are adjacent.

        Returns:
            The rotated queries.
        """
        params = self.kv_params
        rotation = (input_row_offsets, kv_collection, freqs_cis, layer_idx, interleaved)
        # a key of an 8-bit cache is rotated before it is stored, so that it is rounded once
        if not params.rotates_stored_keys:
            queries, keys = (
                rotate_ragged(params, y, *rotation) for y in (queries, self.per_head(keys))
            )
        self.store(keys, v, input_row_offsets, kv_collection, layer_idx)
        if params.rotates_stored_keys:
            queries = fused_qk_ragged_rope(params, queries, *rotation)
        return queries

    def store(
        self,
        keys: TensorValue,
        v: TensorValue,
        input_row_offsets: TensorValue,
        kv_collection: PagedCacheValues,
        layer_idx: TensorValue,
    ) -> None:
        """Writes keys and values to the cache as they are.

        Args:
            keys: ``[total_seq_len, num_key_value_heads, head_dim]``, or with these heads concatenated.
            v: The values ``[total_seq_len, num_key_value_heads * head_dim]``.
            input_row_offsets: The first row of each sequence.
            kv_collection: The cache.
            layer_idx: The index of the layer in the cache.
        """
        # the cache's op takes the heads of a token side by side
        k = keys if keys.rank == 2 else ops.reshape(keys, [keys.shape[0], self.kv_width])
        store_kv_cache_ragged(self.kv_params, k, v, input_row_offsets, kv_collection, layer_idx)

    def attend_cache(
        self,
        queries: TensorValue,
        input_row_offsets: TensorValue,
        kv_collection: PagedCacheValues,
        layer_idx: TensorValue,
        **options: Any,
    ) -> TensorValue:
        """Attention of the new tokens, of the dtype that the output projection reads.

        Args:
            queries: ``[total_seq_len, n_heads, head_dim]``.
            input_row_offsets: The first row of each sequence.
            kv_collection: The cache, with the new keys and values stored.
            layer_idx: The index of the layer in the cache.
            options: The mask and the scores: more arguments of `max.nn.kernels.flash_attention_ragged`.
        """
        return flash_attention_ragged(
            self.kv_params,
            self.queries_for(queries),
            input_row_offsets,
            kv_collection,
            layer_idx,
            out_dtype=self.attended_dtype(queries),
            **options,
        )

    def attend_tokens(
        self,
        layer_idx: TensorValue,
        x: TensorValue,
        kv_collection: PagedCacheValues,
        input_row_offsets: TensorValue,
        queries: TensorValue,
        keys: TensorValue | None,
        v: TensorValue | None,
        *,
        freqs_cis: TensorValue | None = None,
        interleaved: bool = False,
        query_factor: TensorValue | None = None,
        gates: TensorValue | None = None,
        **options: Any,
    ) -> TensorValue:
        """The layer's output, of projected queries, keys and values.

        Args:
            layer_idx: The index of the layer in the cache, uint32, rank 0.
            x: The layer's input ``[total_seq_len, hidden_size]``.
            kv_collection: The cache; keys and values of the new tokens are written to it.
            input_row_offsets: The first row of each sequence, uint32 ``[batch + 1]``.
            queries: ``[total_seq_len, n_heads, head_dim]``.
            keys: ``[total_seq_len, num_key_value_heads, head_dim]``, or with these heads concatenated; None: the cache
                has them already.
            v: The values, with their heads concatenated; None: as `keys`.
            freqs_cis: The table that rotates queries and keys by position; None: they are stored as they are.
            interleaved: Whether the two elements of a rotated pair are adjacent.
            query_factor: The factor of each token's queries, after the rotation; None: 1.
            gates: Attended values are multiplied by the sigmoid of these; None: no gates.
            options: The mask and the scores, see `attend_cache`.
        """
        if keys is not None:
            assert v is not None
            if freqs_cis is None:
                self.store(keys, v, input_row_offsets, kv_collection, layer_idx)
            else:
                queries = self.store_rotated(
                    queries,
                    keys,
                    v,
                    input_row_offsets,
                    kv_collection,
                    freqs_cis,
                    layer_idx,
                    interleaved,
                )
        if query_factor is not None:
            queries = queries * ops.cast(query_factor, queries.dtype)
        attended = self.attend_cache(
            queries, input_row_offsets, kv_collection, layer_idx, **options
        )
        if gates is not None:
            attended = attended * ops.cast(ops.sigmoid(gates), attended.dtype)
        return self.project_out(attended, x)

    def project_out(self, attention_output: TensorValue, like: TensorValue) -> TensorValue:
        """The result ``[total_seq_len, hidden_size]``, of the dtype of the layer's input."""
        total = attention_output.shape[0]
        y = self.o_proj(ops.reshape(attention_output, [total, self.q_width]))
        return ops.cast(y, like.dtype)

    def per_head(self, y: TensorValue) -> TensorValue:
        """Queries, keys or values as ``[total_seq_len, heads, head_dim]``."""
        dim = self.kv_params.head_dim
        return y if y.rank == 3 else ops.reshape(y, [y.shape[0], int(y.shape[1]) // dim, dim])
