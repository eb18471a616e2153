"""The attention of decoders, over the paged KV cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from max.dtype import DType
from max.graph import DeviceRef, TensorValue, Weight, ops
from max.nn.attention._projections import QKVProjections
from max.nn.attention.mask_config import MHAMaskVariant
from max.nn.clamp import clamp
from max.nn.kernels.attention import flash_attention_ragged
from max.nn.kernels.cache import store_kv_cache_ragged
from max.nn.kernels.rope import fused_qk_ragged_rope, rotate_ragged
from max.nn.kv_cache import KVCacheParams
from max.nn.kv_cache.cache_values import PagedCacheValues
from max.nn.layer import Module
from max.nn.layers.linear import Linear
from max.pipelines.models.decoder_config import DecoderConfig
from max.pipelines.models.norms import HeadNorm, norm_layer, unit_rms

__all__ = ["DecoderAttention"]


class DecoderAttention(QKVProjections):
    """Causal self-attention of a ragged batch, as the config of a decoder describes it.

    Weights: ``q_proj``, ``k_proj``, ``v_proj``, ``o_proj`` (`Linear`); with QK norm ``q_norm`` and ``k_norm``; with
    sinks ``sinks``, float32 ``[num_heads]``. A layer that reads the keys and values of another layer has no weights for
    keys and values; a layer whose values are its keys has no ``v_proj``.

    Args:
        config: The shape of the model.
        index: The index of the layer.
        kv_params: The shape of the KV cache.
        dtype: The dtype of the weights.
        device: Where it runs.
        linear_cls: The constructor of the projections.
    """

    def __init__(
        self,
        config: DecoderConfig,
        index: int,
        kv_params: KVCacheParams,
        dtype: DType,
        device: DeviceRef,
        linear_cls: Callable[..., Linear] = Linear,
    ) -> None:
        super().__init__(
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.heads_of(index)[0],
            hidden_size=config.hidden_size,
            kv_params=kv_params,
            devices=[device],
            dtype=dtype,
            linear_cls=linear_cls,
            stacked_qkv=False,
            has_bias=config.attention_bias,
            clip_qkv=None,
        )
        if config.attention_output_bias:
            self.o_proj = linear_cls(self.q_width, config.hidden_size, dtype, device, has_bias=True)
        self.gated = config.attention_gate
        if config.attention_gate:
            self.q_proj = linear_cls(
                config.hidden_size, 2 * self.q_width, dtype, device, has_bias=config.attention_bias
            )
        self.scale = config.score_factor(index)
        self.clip = config.clip_qkv
        self.rotated = config.rotation_of(index) is not None
        self.interleaved = config.interleaved_rope
        self.window, self.chunked = config.window_of(index), config.chunked
        self.soft_cap, self.slopes = config.scores_soft_cap, config.alibi_slopes
        self.sinks = (
            Weight("sinks", DType.float32, [config.num_heads], device) if config.sinks else None
        )
        self.qk_norm = config.qk_norm
        self.value_eps = config.norm_eps if config.value_norm else None
        self.shares_kv = config.kv_layer_of(index) != index
        self.q_norm: Module | None = None
        self.k_norm: Module | None = None
        if config.qk_norm is not None and (self.rotated or not config.qk_norm.rotated_only):
            self.q_norm = self._head_norm(config, config.num_heads, dtype, device)
            self.k_norm = self._head_norm(config, self.num_key_value_heads, dtype, device)
        self.keys_as_values = config.keys_as_values and index in config.full_attention_layers
        if self.keys_as_values and not self.shares_kv:
            del self.v_proj
        if self.shares_kv:
            del self.k_proj, self.v_proj, self.k_norm

    def _head_norm(
        self, config: DecoderConfig, heads: int, dtype: DType, device: DeviceRef
    ) -> Module:
        """The norm of queries or keys, over each head or over all of them."""
        spec, dim = config.qk_norm, self.kv_params.head_dim
        assert spec is not None
        if spec.over == "each_head":
            return HeadNorm(heads, dim, dtype, config.norm_eps, spec.form, device)
        size = dim * (heads if spec.over == "all" else 1)
        return norm_layer(spec.form, size, dtype, config.norm_eps, device)

    def __call__(
        self,
        layer_idx: TensorValue,
        x: TensorValue,
        kv_collection: PagedCacheValues,
        positional: list[TensorValue],
        input_row_offsets: TensorValue,
    ) -> TensorValue:
        """The attention output.

        Args:
            layer_idx: The index of the layer in the cache, uint32, rank 0.
            x: ``[total_seq_len, hidden_size]``.
            kv_collection: The cache; keys and values of the new tokens are written to it.
            positional: If the layer is rotated, the table of cosines and sines ``[positions, rotated_dim]``, or the
                rows of the batch's tokens if heads are normalised after the rotation or keys are shared. Then, if
                scores depend on the position, the factor of each token's queries ``[total_seq_len, 1, 1]``.
            input_row_offsets: The first row of each sequence, uint32 ``[batch + 1]``.

        Returns:
            ``[total_seq_len, hidden_size]``, of x's dtype.
        """
        projected = self.project(x)
        return self.attend(layer_idx, x, kv_collection, positional, input_row_offsets, *projected)

    def project(self, x: TensorValue) -> tuple[TensorValue, TensorValue | None, TensorValue | None]:
        """The queries, the gates of attended values if the layer has gates, and the keys unless the layer reads those
        of another layer.

        Args:
            x: ``[total_seq_len, hidden_size]``.

        Returns:
            Queries and keys ``[total_seq_len, heads * head_dim]``; with gates, queries and gates are ``[total_seq_len,
            heads, head_dim]``.
        """
        queries, gates = self.q_proj(x), None
        if self.gated:
            both = ops.reshape(queries, [x.shape[0], self.n_heads, 2 * self.kv_params.head_dim])
            queries, gates = ops.split(both, [self.kv_params.head_dim] * 2, axis=2)
        return queries, gates, None if self.shares_kv else self.k_proj(x)

    def attend(
        self,
        layer_idx: TensorValue,
        x: TensorValue,
        kv_collection: PagedCacheValues,
        positional: list[TensorValue],
        input_row_offsets: TensorValue,
        queries: TensorValue,
        gates: TensorValue | None,
        keys: TensorValue | None,
    ) -> TensorValue:
        """The attention output, of projected queries and keys; see `__call__`.

        Args:
            layer_idx: The index of the layer in the cache.
            x: The layer's input.
            kv_collection: The cache.
            positional: The position-dependent inputs.
            input_row_offsets: The first row of each sequence.
            queries: As `project` returns them; likewise `gates` and `keys`.
            gates: The gates.
            keys: The keys.
        """
        remaining = list(positional)
        if keys is None:
            queries = self._normalised(queries, self.q_norm)
            if self.rotated:
                queries = self._rotate(queries, remaining.pop(0))
        else:
            queries = self._store(
                layer_idx, queries, keys, x, kv_collection, remaining, input_row_offsets
            )
        if remaining:
            queries = queries * ops.cast(remaining.pop(0), queries.dtype)
        attended = flash_attention_ragged(
            self.kv_params,
            self.queries_for(queries),
            input_row_offsets,
            kv_collection,
            layer_idx,
            out_dtype=self.attended_dtype(queries),
            **self._mask(),
        )
        if gates is not None:
            attended = attended * ops.cast(ops.sigmoid(gates), attended.dtype)
        return self.project_out(attended, x)

    def _store(
        self,
        layer_idx: TensorValue,
        q: TensorValue,
        k: TensorValue,
        x: TensorValue,
        kv_collection: PagedCacheValues,
        remaining: list[TensorValue],
        input_row_offsets: TensorValue,
    ) -> TensorValue:
        """Writes keys and values of the new tokens to the cache, and returns the queries `q`, normalised and rotated,
        ``[total_seq_len, heads, head_dim]``.

        `remaining` holds the position-dependent inputs; the ones that are used here are removed from it.
        """
        params = self.kv_params
        # a separate product per projection, so that each reads its weights in place
        v = k if self.keys_as_values else self.v_proj(x)
        after = self.qk_norm is not None and self.qk_norm.after_rotation
        if after and self.rotated:
            rows = remaining.pop(0)
            q, k = (self._rotate(self._heads(y), rows) for y in (q, k))
        queries = self._normalised(q, self.q_norm)
        keys = self._normalised(k, self.k_norm)
        if self.value_eps is not None:
            v = ops.reshape(unit_rms(self._heads(v), self.value_eps), v.shape)
        if self.clip is not None:
            queries, keys, v = (clamp(y, min=-self.clip, max=self.clip) for y in (queries, keys, v))
        rotation: tuple[Any, ...] | None = None
        if self.rotated and not after:
            table = remaining.pop(0)
            rotation = (input_row_offsets, kv_collection, table, layer_idx, self.interleaved)
        # rotate before storing, so that a key is rounded to 8 bits only once
        if rotation is not None and not params.rotates_stored_keys:
            queries, keys = (rotate_ragged(params, y, *rotation) for y in (queries, keys))
        flat_keys = ops.reshape(keys, [keys.shape[0], self.kv_width])
        store_kv_cache_ragged(params, flat_keys, v, input_row_offsets, kv_collection, layer_idx)
        if rotation is not None and params.rotates_stored_keys:
            queries = fused_qk_ragged_rope(params, queries, *rotation)
        return queries

    def _mask(self) -> dict[str, Any]:
        """The arguments of the attention op that define the mask and the scores."""
        masks = MHAMaskVariant
        options: dict[str, Any] = {"mask_variant": masks.CAUSAL_MASK, "scale": self.scale}
        if self.window is not None:
            options["mask_variant"] = (
                masks.CHUNKED_CAUSAL_MASK if self.chunked else masks.SLIDING_WINDOW_CAUSAL_MASK
            )
            options["local_window_size"] = self.window
        if self.slopes is not None:
            options["mask_variant"] = masks.CAUSAL_ALIBI_MASK
            slopes = np.array(self.slopes, np.float32)
            options["alibi_slopes"] = ops.constant(slopes, DType.float32, self.devices[0])
        if self.soft_cap is not None:
            options["softcap"] = self.soft_cap
        if self.sinks is not None:
            options["sink_weights"] = self.sinks
        return options

    def _heads(self, y: TensorValue) -> TensorValue:
        """Reshapes to ``[total_seq_len, heads, head_dim]``."""
        dim = self.kv_params.head_dim
        return y if y.rank == 3 else ops.reshape(y, [y.shape[0], int(y.shape[1]) // dim, dim])

    def _normalised(self, y: TensorValue, norm: Module | None) -> TensorValue:
        """Normalises heads ``[total_seq_len, heads, head_dim]``; returns `y` if there is no norm."""
        if norm is None:
            return self._heads(y)
        over_all = self.qk_norm is not None and self.qk_norm.over == "all"
        return self._heads(norm(y)) if over_all else norm(self._heads(y))

    def _rotate(self, y: TensorValue, rows: TensorValue) -> TensorValue:
        """Rotates heads by their tokens' rows of cosines and sines; elements past the rotated ones stay unchanged."""
        total, heads, dim = y.shape
        half = int(rows.shape[1]) // 2
        pairs = ops.reshape(rows, [total, 1, half, 2])
        cos, sin = pairs[..., 0], pairs[..., 1]
        part = y if int(dim) == 2 * half else y[..., : 2 * half]
        if self.interleaved:
            both = ops.reshape(part, [total, heads, half, 2])
            first, second = both[..., 0], both[..., 1]
        else:
            first, second = part[..., :half], part[..., half:]
        turned = first * cos - second * sin, first * sin + second * cos
        if self.interleaved:
            result = ops.reshape(ops.stack(turned, axis=-1), [total, heads, 2 * half])
        else:
            result = ops.concat(turned, axis=-1)
        return result if int(dim) == 2 * half else ops.concat([result, y[..., 2 * half :]], axis=-1)
