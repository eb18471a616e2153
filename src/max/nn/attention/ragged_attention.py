"""Attention without positional encoding over a paged KV cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from max.dtype import DType
from max.graph import DeviceRef, TensorValue
from max.nn.attention.cached_attention import CachedAttention
from max.nn.attention.mask_config import MHAMaskVariant
from max.nn.kv_cache.cache_params import KVCacheParams
from max.nn.kv_cache.cache_values import PagedCacheValues
from max.nn.layers.linear import Linear

__all__ = ["RaggedAttention"]


class RaggedAttention(CachedAttention):
    """Self-attention of a ragged batch, with any mask that the kernel supports.

    ``softmax(scale * q kᵀ + mask) v``; sums and softmax are computed in float32. Query head ``i`` reads KV head
    ``i // (num_attention_heads // num_key_value_heads)``.

    Weights: ``q_proj``, ``k_proj``, ``v_proj``, ``o_proj`` (`Linear`), or ``qkv_proj.weight`` instead of
    the first three.

    Args:
        mask_variant: The mask, which selects the keys that a query attends to.
        num_attention_heads: The number of query heads.
        num_key_value_heads: The number of KV heads, a divisor of `num_attention_heads`.
        hidden_size: The size of the input's last dimension.
        kv_params: The parameters of the cache.
        devices: The devices; the layer runs on the first one. The CPU by default.
        dtype: The dtype of the weights.
        linear_cls: The class of the projections.
        stacked_qkv: Whether one weight has the rows of queries, keys and values.
        scale: The scale of the attention scores; ``1 / sqrt(head_dim)`` by default.
        has_bias: Whether queries, keys and values have biases.
        clip_qkv: The weights of queries, keys and values are clamped to ``[-clip_qkv, clip_qkv]``.

    Raises:
        ValueError: The options are incompatible.
    """

    def __init__(
        self,
        *,
        mask_variant: MHAMaskVariant,
        num_attention_heads: int,
        num_key_value_heads: int,
        hidden_size: int,
        kv_params: KVCacheParams,
        devices: Sequence[DeviceRef] | None = None,
        dtype: DType = DType.float32,
        linear_cls: Callable[..., Linear] = Linear,
        stacked_qkv: bool = False,
        scale: float | None = None,
        has_bias: bool = False,
        clip_qkv: float | None = None,
    ) -> None:
        super().__init__(
            num_attention_heads=num_attention_heads,
            num_key_value_heads=num_key_value_heads,
            hidden_size=hidden_size,
            kv_params=kv_params,
            devices=devices,
            dtype=dtype,
            linear_cls=linear_cls,
            stacked_qkv=stacked_qkv,
            has_bias=has_bias,
            clip_qkv=clip_qkv,
        )
        self.mask_variant = mask_variant
        self.scale = math.sqrt(1.0 / kv_params.head_dim) if scale is None else scale

    def __call__(
        self,
        layer_idx: TensorValue,
        x: TensorValue,
        kv_collection: PagedCacheValues,
        **kwargs: Any,
    ) -> TensorValue:
        """The attention output.

        Args:
            layer_idx: The index of the layer in the cache, uint32, rank 0.
            x: ``[total_seq_len, hidden_size]``.
            kv_collection: The cache; keys and values of the new tokens are written to it.
            kwargs: ``input_row_offsets``, the first row of each sequence, uint32 ``[batch + 1]``; and
                ``local_window_size`` for masks with a window.

        Returns:
            ``[total_seq_len, hidden_size]``, of x's dtype.

        Raises:
            TypeError: ``input_row_offsets`` is missing.
        """
        if "input_row_offsets" not in kwargs:
            raise TypeError("RaggedAttention: input_row_offsets is missing")
        offsets = kwargs["input_row_offsets"]
        q, k, v = self.project_qkv(x)
        return self.attend_tokens(
            layer_idx,
            x,
            kv_collection,
            offsets,
            self.per_head(q),
            k,
            v,
            mask_variant=self.mask_variant,
            scale=self.scale,
            local_window_size=kwargs.get("local_window_size", -1),
        )
