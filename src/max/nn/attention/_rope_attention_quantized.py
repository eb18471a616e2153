"""Attention with rotary position embedding and quantized weights: GGUF blocks, and GPTQ."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from max.dtype import DType
from max.graph import DeviceRef, TensorValue, ops
from max.graph.quantization import QuantizationConfig, QuantizationEncoding
from max.nn.attention._rope_attention import AttentionWithRope
from max.nn.kv_cache.cache_params import KVCacheParams
from max.nn.layers.gptq_linear import GPTQLinear
from max.nn.layers.linear import Linear
from max.nn.rotary_embedding import RotaryEmbedding


class GGUFQAttentionWithRope(AttentionWithRope):
    """`AttentionWithRope` with weights in GGUF block encodings.

    Args:
        rope: Provides the scale of the attention scores and the layout of rotated pairs.
        num_attention_heads: The number of query heads.
        num_key_value_heads: The number of KV heads.
        hidden_size: The size of the input's last dimension.
        kv_params: The parameters of the cache.
        dtype: The dtype of the encoded weights, uint8.
        quantization_encoding: The encoding of the weights.
        devices: The devices; the layer runs on the first one.
        linear_cls: The class of the projections.
        scale: The scale of the attention scores; by default that of `rope`.
        has_bias: Whether queries, keys and values have biases.
        clip_qkv: Must be None: encoded weights are not clamped.

    Raises:
        ValueError: The dtype is not uint8, the encoding is not a block encoding, or `clip_qkv` is given.
    """

    __module__ = "max.nn.attention.attention_with_rope"

    def __init__(
        self,
        *,
        rope: RotaryEmbedding,
        num_attention_heads: int,
        num_key_value_heads: int,
        hidden_size: int,
        kv_params: KVCacheParams,
        dtype: DType,
        quantization_encoding: QuantizationEncoding,
        devices: list[DeviceRef] | None = None,
        linear_cls: Callable[..., Linear] = Linear,
        scale: float | None = None,
        has_bias: bool = False,
        clip_qkv: float | None = None,
    ) -> None:
        if dtype is not DType.uint8:
            raise ValueError(f"GGUFQAttentionWithRope: the dtype is {dtype.name}, expected uint8")
        if not quantization_encoding.is_gguf:
            raise ValueError(
                f"GGUFQAttentionWithRope: the encoding is {quantization_encoding.value}; use GPTQAttentionWithRope"
            )
        super().__init__(
            rope=rope,
            num_attention_heads=num_attention_heads,
            num_key_value_heads=num_key_value_heads,
            hidden_size=hidden_size,
            kv_params=kv_params,
            devices=devices,
            dtype=dtype,
            linear_cls=partial(linear_cls, quantization_encoding=quantization_encoding),
            scale=scale,
            has_bias=has_bias,
            clip_qkv=clip_qkv,
        )


class GPTQAttentionWithRope(AttentionWithRope):
    """`AttentionWithRope` with GPTQ weights in the layout of checkpoints; see `GPTQLinear`.

    Args:
        quantization_config: How the weights were quantized.
        rope: Provides the scale of the attention scores and the layout of rotated pairs.
        num_attention_heads: The number of query heads.
        num_key_value_heads: The number of KV heads.
        hidden_size: The size of the input's last dimension.
        kv_params: The parameters of the cache.
        devices: The devices; the layer runs on the first one.
        dtype: The dtype of the scales.
        scale: The scale of the attention scores; by default that of `rope`.
        linear_cls: The class of the projections; `Linear` stands for `GPTQLinear`.

    Raises:
        ValueError: The config does not fit the sizes.
    """

    __module__ = "max.nn.attention.attention_with_rope"

    def __init__(
        self,
        quantization_config: QuantizationConfig,
        rope: RotaryEmbedding,
        num_attention_heads: int,
        num_key_value_heads: int,
        hidden_size: int,
        kv_params: KVCacheParams,
        devices: list[DeviceRef] | None = None,
        dtype: DType = DType.float32,
        scale: float | None = None,
        linear_cls: Callable[..., Linear] = Linear,
    ) -> None:
        of_parts = GPTQLinear if linear_cls is Linear else linear_cls

        def linear(
            in_dim: int, out_dim: int, dtype: DType, device: DeviceRef, **options: Any
        ) -> Linear:
            return of_parts(
                in_dim=in_dim,
                out_dim=out_dim,
                dtype=dtype,
                device=device,
                has_bias=options.get("has_bias", False),
                quantization_encoding=QuantizationEncoding.GPTQ,
                quantization_config=quantization_config,
            )

        self.quantization_config = quantization_config
        super().__init__(
            rope=rope,
            num_attention_heads=num_attention_heads,
            num_key_value_heads=num_key_value_heads,
            hidden_size=hidden_size,
            kv_params=kv_params,
            devices=devices,
            dtype=dtype,
            linear_cls=linear,
            scale=scale,
        )

    @property
    def wqkv(self) -> TensorValue:
        """The packed integers of queries, keys, values: int32 ``[hidden_size * bits / 32, q_width + 2 * kv_width]``."""
        parts = [TensorValue(p.weight) for p in (self.q_proj, self.k_proj, self.v_proj)]
        return ops.concat(parts, axis=1)
