"""Attention with rotary position embedding on one device, and its shards for several devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from max._names import keyword_aliases
from max.dtype import DType
from max.graph import DeviceRef, ShardingStrategy, TensorValue, ops
from max.nn.attention.cached_attention import CachedAttention
from max.nn.attention.mask_config import MHAMaskVariant
from max.nn.float8_config import Float8Config
from max.nn.kv_cache.cache_params import KVCacheParams
from max.nn.kv_cache.cache_values import PagedCacheValues
from max.nn.layers.linear import Linear
from max.nn.layers.norm import RMSNorm
from max.nn.layers.sharding import check_strategy, part_of, shard_devices
from max.nn.rotary_embedding import RotaryEmbedding


def distribute_value(v: TensorValue, devices: list[DeviceRef]) -> list[TensorValue]:
    """Copies a tensor to each device.

    Args:
        v: The tensor.
        devices: The devices.
    """
    return [v.to(device) for device in devices]


class AttentionWithRope(CachedAttention):
    """Causal self-attention of a ragged batch, with rotated queries and keys.

    ``softmax(scale * q kᵀ + mask) v``; sums and softmax are computed in float32. Query head ``i`` reads KV head
    ``i // (num_attention_heads // num_key_value_heads)``.

    Weights: ``q_proj``, ``k_proj``, ``v_proj``, ``o_proj`` (`Linear`), or ``qkv_proj.weight`` instead of
    the first three; with `use_qk_norm`, also ``q_norm`` and ``k_norm`` over each head.

    Args:
        rope: Provides the scale of the attention scores and the layout of rotated pairs.
        sharding_strategy: How the weights are split over devices; see the property.
        num_attention_heads: The number of query heads.
        num_key_value_heads: The number of KV heads, a divisor of `num_attention_heads`.
        hidden_size: The size of the input's last dimension.
        kv_params: The parameters of the cache.
        devices: The devices; the layer runs on the first one. The CPU by default.
        dtype: The dtype of the weights.
        linear_cls: The class of the projections.
        stacked_qkv: Whether one weight has the rows of queries, keys and values.
        scale: The scale of the attention scores; by default that of `rope`.
        has_bias: Whether queries, keys and values have biases.
        float8_config: How float8 projections and their inputs are scaled.
        clip_qkv: The weights of queries, keys and values are clamped to ``[-clip_qkv, clip_qkv]``.
        use_qk_norm: Whether query and key heads are normalized before they are rotated.
        rms_norm_eps: The epsilon of these norms.

    Raises:
        ValueError: The options are incompatible.
    """

    __module__ = "max.nn.attention.attention_with_rope"

    rope: RotaryEmbedding
    """Provides the scale of the attention scores and the layout of rotated pairs."""

    sliding_window: int | None = None
    """The number of tokens that a token attends to, itself included; None: itself and all tokens before it."""

    @keyword_aliases(quant_config="float8_config")
    def __init__(
        self,
        *,
        rope: RotaryEmbedding,
        sharding_strategy: ShardingStrategy | None = None,
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
        if float8_config is not None:
            if stacked_qkv:
                raise ValueError(
                    f"{type(self).__name__}: float8_config and stacked_qkv do not go together"
                )
            linear_cls = partial(linear_cls, float8_config=float8_config)
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
        # not registered as a part: the table belongs to the model, not to each layer
        vars(self)["rope"] = rope
        self.scale = rope.compute_scale(scale)
        self.float8_config = float8_config
        if float8_config is not None:
            # norms of float8 layers have 16-bit weights
            dtype = DType.bfloat16
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if use_qk_norm:
            self.q_norm = RMSNorm(kv_params.head_dim, dtype, rms_norm_eps)
            self.k_norm = RMSNorm(kv_params.head_dim, dtype, rms_norm_eps)

        self._sharding: ShardingStrategy | None = None
        if sharding_strategy is not None:
            self.sharding_strategy = sharding_strategy

    def _scales(self, name: str) -> list[TensorValue]:
        """The scales of the projections to queries, keys and values, float32."""
        scales = (getattr(p, name) for p in (self.q_proj, self.k_proj, self.v_proj))
        return [ops.cast(TensorValue(scale), DType.float32) for scale in scales]

    @property
    def qkv_input_scale(self) -> TensorValue | None:
        """The greatest input scale of queries, keys and values; None if inputs are scaled dynamically."""
        if self.float8_config is None or self.float8_config.is_dynamic:
            return None
        # one product of all three has one scale: the largest holds every activation
        q, k, v = self._scales("input_scale")
        return ops.max(ops.max(q, k), v)

    @property
    def qkv_weight_scale(self) -> TensorValue:
        """The scales of `wqkv`: the greatest per-tensor scale, or the per-row or per-block scales, concatenated.

        Raises:
            ValueError: The layer has no float8 weights.
        """
        if self.float8_config is None:
            raise ValueError(f"{type(self).__name__}: there is no float8_config")
        q, k, v = self._scales("weight_scale")
        if self.float8_config.weight_scale.is_tensor:
            return ops.max(ops.max(q, k), v)
        return ops.concat([q, k, v], axis=0)

    @property
    def sharding_strategy(self) -> ShardingStrategy | None:
        """How `shard` splits the layer; None: not split.

        ``tensor_parallel`` (or ``rowwise``, ``stacked_qkv``) gives each device a part of the heads:
        the results must be summed. ``replicate`` gives each device the whole layer.

        Raises:
            ValueError: It is set to another strategy, or the heads cannot be divided evenly.
        """
        return self._sharding

    @sharding_strategy.setter
    def sharding_strategy(self, strategy: ShardingStrategy | None) -> None:
        name = type(self).__name__
        check_strategy(name, strategy, "tensor_parallel", "rowwise", "stacked_qkv", "replicate")
        rows = stacked = columns = strategy
        if strategy is not None and not strategy.is_replicate:
            count, dim = strategy.num_devices, self.kv_params.head_dim
            if self.n_heads % count or self.num_key_value_heads % count:
                raise ValueError(
                    f"{name}: {self.n_heads} query heads and {self.num_key_value_heads} key heads "
                    f"cannot be divided evenly over {count} devices"
                )
            # each part projects its heads
            rows = ShardingStrategy.rowwise(count)
            stacked = ShardingStrategy.stacked_qkv(
                count, self.n_heads, dim, self.num_key_value_heads
            )
            # outputs of a part are columns of the output projection: results of parts are summed
            columns = ShardingStrategy.head_aware_columnwise(count, self.n_heads, dim)
        if self.stacked_qkv:
            self.qkv_proj.sharding_strategy = stacked
        else:
            for projection in (self.q_proj, self.k_proj, self.v_proj):
                projection.sharding_strategy = rows
        self.o_proj.sharding_strategy = columns
        # all heads share the weights of the norms
        replicated = None if strategy is None else ShardingStrategy.replicate(strategy.num_devices)
        for norm in (self.q_norm, self.k_norm):
            if norm is not None:
                norm.sharding_strategy = replicated
        self._sharding = strategy

    def shard(self, devices: Iterable[DeviceRef]) -> list[AttentionWithRope]:
        """The shards of the layer, one per device; their weights are views of this layer's.

        Each part has its own cache, of ``kv_params.n_kv_heads_per_device`` heads.

        Args:
            devices: The devices of the shards.

        Raises:
            ValueError: There is no sharding strategy, its number of devices differs, or the number of cache heads per
                device differs from that of a shard.
        """
        strategy = self.sharding_strategy
        where = shard_devices(type(self).__name__, strategy, devices)
        assert strategy is not None
        split = 1 if strategy.is_replicate else len(where)
        # whole heads a device: query heads stay with the key head of their group
        heads, kv_heads = self.n_heads // split, self.num_key_value_heads // split
        if self.kv_params.n_kv_heads_per_device != kv_heads:
            raise ValueError(
                f"{type(self).__name__}: a device has {kv_heads} key heads, its cache "
                f"{self.kv_params.n_kv_heads_per_device}; give KVCacheParams n_devices={split}"
            )
        parts: dict[str, Sequence[Any]] = {"o_proj": self.o_proj.shard(where)}
        if self.stacked_qkv:
            parts["qkv_proj"] = self.qkv_proj.shard(where)
        else:
            for name in ("q_proj", "k_proj", "v_proj"):
                parts[name] = getattr(self, name).shard(where)
        for name, norm in (("q_norm", self.q_norm), ("k_norm", self.k_norm)):
            if norm is not None:
                parts[name] = norm.shard(where)
        dim = self.kv_params.head_dim
        sizes: dict[str, Any] = {
            "n_heads": heads,
            "num_key_value_heads": kv_heads,
            "q_width": heads * dim,
            "kv_width": kv_heads * dim,
        }
        return [
            part_of(
                self,
                AttentionWithRope,
                devices=[device],
                **sizes,
                **{name: shards[index] for name, shards in parts.items()},
            )
            for index, device in enumerate(where)
        ]

    def __call__(
        self,
        layer_idx: TensorValue,
        x: TensorValue,
        kv_collection: PagedCacheValues,
        freqs_cis: TensorValue,
        input_row_offsets: TensorValue,
    ) -> TensorValue:
        """The attention output.

        Args:
            layer_idx: The index of the layer in the cache, uint32, rank 0.
            x: ``[total_seq_len, hidden_size]``.
            kv_collection: The cache; keys and values of the new tokens are written to it.
            freqs_cis: The rope's table ``[positions, head_dim]``.
            input_row_offsets: The first row of each sequence, uint32 ``[batch + 1]``.

        Returns:
            ``[total_seq_len, hidden_size]``, of x's dtype.

        Raises:
            ValueError: A shape does not fit.
            TypeError: A dtype does not fit.
        """
        q, k, v = self.project_qkv(x)
        # [rows, heads, head_dim]; keys stay flat unless they are normalized by head, as the cache stores rows
        queries, keys = self.per_head(q), k
        if self.q_norm is not None and self.k_norm is not None:
            queries = self.q_norm(queries)
            keys = self.k_norm(self.per_head(k))
        window = self.sliding_window
        causal, sliding = MHAMaskVariant.CAUSAL_MASK, MHAMaskVariant.SLIDING_WINDOW_CAUSAL_MASK
        return self.attend_tokens(
            layer_idx,
            x,
            kv_collection,
            input_row_offsets,
            queries,
            keys,
            v,
            freqs_cis=freqs_cis,
            interleaved=self.rope.interleaved,
            mask_variant=causal if window is None else sliding,
            scale=self.scale,
            local_window_size=-1 if window is None else window,
        )


class AttentionWithRopeNoOpaque(AttentionWithRope):
    """`AttentionWithRope` that rotates by the table of its own rope.

    The arguments are those of `AttentionWithRope`, without the options of the weights. The cache is passed as its four
    values or as `PagedCacheValues`.
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
        devices: Sequence[DeviceRef] | None = None,
        dtype: DType = DType.float32,
        linear_cls: Callable[..., Linear] = Linear,
        scale: float | None = None,
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
            scale=scale,
        )

    def __call__(  # type: ignore[override]
        self,
        layer_idx: TensorValue,
        x: TensorValue,
        kv_collection: Any,
        input_row_offsets: TensorValue,
    ) -> TensorValue:
        """The attention output.

        Args:
            layer_idx: The index of the layer in the cache, uint32, rank 0.
            x: ``[total_seq_len, hidden_size]``.
            kv_collection: The cache, or its four values.
            input_row_offsets: The first row of each sequence, uint32 ``[batch + 1]``.

        Returns:
            ``[total_seq_len, hidden_size]``, of x's dtype.

        Raises:
            ValueError: A shape does not fit.
        """
        cache = PagedCacheValues.of(kv_collection)
        freqs_cis = self.rope.freqs_cis.to(x.device)
        return super().__call__(layer_idx, x, cache, freqs_cis, input_row_offsets)
