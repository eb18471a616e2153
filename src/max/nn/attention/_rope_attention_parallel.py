"""Attention with rotary position embedding over several devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from max._names import keyword_aliases
from max.dtype import DType
from max.graph import BufferValue, DeviceRef, ShardingStrategy, TensorValue
from max.nn.attention._rope_attention import AttentionWithRope
from max.nn.attention.interfaces import DistributedAttentionImpl
from max.nn.comm import Allreduce
from max.nn.float8_config import Float8Config
from max.nn.kv_cache.cache_params import KVCacheParams
from max.nn.kv_cache.cache_values import PagedCacheValues
from max.nn.layers.linear import Linear
from max.nn.layers.sharding import call_parts
from max.nn.rotary_embedding import RotaryEmbedding


class _AttentionOverDevices(AttentionWithRope, DistributedAttentionImpl):
    """Base of attention layers with parts on several devices."""

    _parts: list[AttentionWithRope]

    def _place(self, strategy: ShardingStrategy, devices: Sequence[DeviceRef]) -> None:
        self.sharding_strategy = strategy
        self._parts = self.shard(devices)

    def _each(
        self,
        layer_idx: TensorValue,
        x: Sequence[TensorValue],
        kv_collections: Sequence[PagedCacheValues],
        freqs_cis: Sequence[TensorValue],
        input_row_offsets: Sequence[TensorValue],
    ) -> list[TensorValue]:
        """The outputs of all parts."""
        return call_parts(
            type(self).__name__,
            self._parts,
            layer_idx,
            x=x,
            kv_collections=kv_collections,
            freqs_cis=freqs_cis,
            input_row_offsets=input_row_offsets,
        )


class TensorParallelAttentionWithRope(_AttentionOverDevices):
    """`AttentionWithRope` with a part of the heads on each device; the results are summed.

    The arguments are those of `AttentionWithRope`; weights have the same names.

    Raises:
        ValueError: There are fewer than 2 devices, the heads cannot be divided evenly over them, or the cache's number
            of devices differs.
    """

    __module__ = "max.nn.attention.attention_with_rope"

    @keyword_aliases(quant_config="float8_config")
    def __init__(
        self,
        *,
        rope: RotaryEmbedding,
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
        float8_config: Float8Config | None = None,
        clip_qkv: float | None = None,
        use_qk_norm: bool = False,
        rms_norm_eps: float = 1e-6,
    ) -> None:
        where = list(devices or ())
        if len(where) < 2:
            raise ValueError(
                f"TensorParallelAttentionWithRope: {len(where)} devices, expected 2 or more; use "
                "AttentionWithRope on one"
            )
        super().__init__(
            rope=rope,
            num_attention_heads=num_attention_heads,
            num_key_value_heads=num_key_value_heads,
            hidden_size=hidden_size,
            kv_params=kv_params,
            devices=devices,
            dtype=dtype,
            linear_cls=linear_cls,
            stacked_qkv=stacked_qkv,
            scale=scale,
            has_bias=has_bias,
            float8_config=float8_config,
            clip_qkv=clip_qkv,
            use_qk_norm=use_qk_norm,
            rms_norm_eps=rms_norm_eps,
        )
        self._place(ShardingStrategy.tensor_parallel(len(where)), where)
        self.allreduce = Allreduce(len(where))

    def __call__(  # type: ignore[override]
        self,
        layer_idx: TensorValue,
        x: Sequence[TensorValue],
        signal_buffers: Sequence[BufferValue],
        kv_collections: Sequence[PagedCacheValues],
        freqs_cis: Sequence[TensorValue],
        input_row_offsets: Sequence[TensorValue],
    ) -> list[TensorValue]:
        """The attention output on each device; see `DistributedAttentionImpl`.

        Raises:
            ValueError: The number of values differs from the number of devices, or a shape does not fit.
        """
        attended = self._each(layer_idx, x, kv_collections, freqs_cis, input_row_offsets)
        return self.allreduce(attended, signal_buffers)


class DataParallelAttentionWithRope(_AttentionOverDevices):
    """`AttentionWithRope`, replicated: each device computes a part of the batch, without communication.

    The arguments are those of `AttentionWithRope`; weights have the same names.

    Raises:
        ValueError: There is no device, or the cache's ``data_parallel_degree`` is not the number of devices.
    """

    __module__ = "max.nn.attention.attention_with_rope"

    @keyword_aliases(quant_config="float8_config")
    def __init__(
        self,
        *,
        rope: RotaryEmbedding,
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
        float8_config: Float8Config | None = None,
        clip_qkv: float | None = None,
        use_qk_norm: bool = False,
        rms_norm_eps: float = 1e-6,
    ) -> None:
        super().__init__(
            rope=rope,
            num_attention_heads=num_attention_heads,
            num_key_value_heads=num_key_value_heads,
            hidden_size=hidden_size,
            kv_params=kv_params,
            devices=devices,
            dtype=dtype,
            linear_cls=linear_cls,
            stacked_qkv=stacked_qkv,
            scale=scale,
            has_bias=has_bias,
            float8_config=float8_config,
            clip_qkv=clip_qkv,
            use_qk_norm=use_qk_norm,
            rms_norm_eps=rms_norm_eps,
        )
        self._place(ShardingStrategy.replicate(len(self.devices)), self.devices)

    def __call__(  # type: ignore[override]
        self,
        layer_idx: TensorValue,
        x: Sequence[TensorValue],
        signal_buffers: Sequence[BufferValue],
        kv_collections: Sequence[PagedCacheValues],
        freqs_cis: Sequence[TensorValue],
        input_row_offsets: Sequence[TensorValue],
    ) -> list[TensorValue]:
        """The attention output on each device; see `DistributedAttentionImpl`.

        Raises:
            ValueError: The number of values differs from the number of devices, or a shape does not fit.
        """
        return self._each(layer_idx, x, kv_collections, freqs_cis, input_row_offsets)
