"""Layers with LoRA adapters (https://arxiv.org/abs/2106.09685): each sequence has an adapter or none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

from max._names import keyword_aliases
from max.dtype import DType
from max.graph import DeviceRef, ShardingStrategy, TensorValue, Weight, ops
from max.graph.quantization import QuantizationEncoding
from max.nn.attention.attention_with_rope import AttentionWithRope
from max.nn.float8_config import Float8Config
from max.nn.kernels.adapters import sgmv_lora_kernel, sgmv_qkv_lora_kernel
from max.nn.kv_cache.cache_params import KVCacheParams
from max.nn.kv_cache.cache_values import PagedCacheValues
from max.nn.layers.linear import Linear
from max.nn.layers.sharding import part_of, parts_of_weight
from max.nn.rotary_embedding import RotaryEmbedding

__all__ = ["AttentionWithRopeAndLoRA", "LinearLoRA", "SupportsLoRA"]


@runtime_checkable
class SupportsLoRA(Protocol):
    """A layer with adapters."""

    def set_lora_batch_info(
        self, lora_ids: TensorValue, lora_ranks: TensorValue, lora_grouped_offsets: TensorValue
    ) -> None:
        """Sets the groups of the batch, before the layer is called.

        Args:
            lora_ids: The adapter of each group, ``[groups]`` or longer; -1: none.
            lora_ranks: The rank of the adapter of each group.
            lora_grouped_offsets: The first row of each group, then the end of the last group.
        """
        ...

    def apply_lora(self, x: TensorValue) -> TensorValue:
        """The terms that the adapters add to the layer's result.

        Args:
            x: The layer's input.
        """
        ...


class LinearLoRA(Linear):
    """``y = x Wᵀ + b + (x Aᵀ) Bᵀ``, with the matrices A and B of the adapter of each group of rows.

    Weights: those of `Linear`, and, prefixed by `name`, ``lora_A.weight`` ``[max_num_loras, max_lora_rank, in_dim]``,
    ``lora_B.weight`` ``[max_num_loras, out_dim, max_lora_rank]`` and ``lora.bias`` ``[max_num_loras, out_dim]``.
    Adapters of lower rank are padded with zeros.

    Args:
        in_dim: The size of the input's last dimension.
        out_dim: The size of the output's last dimension.
        max_num_loras: The number of adapters.
        max_lora_rank: The greatest rank.
        dtype: The dtype of the weights.
        device: The device of the product.
        has_bias: Whether there is a bias.
        has_lora_bias: Whether adapters have biases.
        name: The prefix of the names of the adapters' weights.
        quantization_encoding: The block encoding of the weight.
        float8_config: The scales of a float8 weight.
        clip_weight: The weight is clamped to ``[-clip_weight, clip_weight]``.

    Raises:
        ValueError: `max_num_loras` or `max_lora_rank` is less than 1; or as for `Linear`.
    """

    lora_A: Weight
    """The matrices A of all adapters."""

    lora_B: Weight
    """The matrices B of all adapters."""

    lora_bias: Weight | None
    """The adapters' biases."""

    @keyword_aliases(quant_config="float8_config")
    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        max_num_loras: int,
        max_lora_rank: int,
        dtype: DType,
        device: DeviceRef,
        has_bias: bool = False,
        has_lora_bias: bool = False,
        name: str | None = None,
        quantization_encoding: QuantizationEncoding | None = None,
        float8_config: Float8Config | None = None,
        clip_weight: float | None = None,
    ) -> None:
        super().__init__(
            in_dim, out_dim, dtype, device, has_bias, quantization_encoding, float8_config, clip_weight=clip_weight
        )  # fmt: skip
        if max_num_loras < 1 or max_lora_rank < 1:
            raise ValueError(f"LinearLoRA: {max_num_loras} adapters of rank {max_lora_rank}")
        prefix = f"{name}." if name else ""
        # adapters of quantized weights are not quantized
        plain = dtype if dtype.is_float() and not dtype.is_float8() else DType.bfloat16
        shapes = ((max_num_loras, max_lora_rank, in_dim), (max_num_loras, out_dim, max_lora_rank))
        self.lora_A = Weight(f"{prefix}lora_A.weight", plain, shapes[0], device)
        self.lora_B = Weight(f"{prefix}lora_B.weight", plain, shapes[1], device)
        self.lora_bias = (
            Weight(f"{prefix}lora.bias", plain, (max_num_loras, out_dim), device)
            if has_lora_bias
            else None
        )
        self._groups: tuple[TensorValue, TensorValue, TensorValue] | None = None

    def set_lora_batch_info(
        self, lora_ids: TensorValue, lora_ranks: TensorValue, lora_grouped_offsets: TensorValue
    ) -> None:
        """See `SupportsLoRA`."""
        self._groups = (lora_ids, lora_ranks, lora_grouped_offsets)

    def groups(self) -> tuple[TensorValue, TensorValue, TensorValue]:
        """Adapters, ranks and offsets of the batch's groups.

        Raises:
            ValueError: `set_lora_batch_info` was not called.
        """
        if self._groups is None:
            raise ValueError("LinearLoRA: set_lora_batch_info comes before the layer is called")
        return self._groups

    def apply_lora(self, x: TensorValue) -> TensorValue:
        """The terms that the adapters add: ``(x Aᵀ) Bᵀ``, 0 for rows without an adapter.

        Args:
            x: ``[rows, in_dim]``.

        Raises:
            ValueError: `set_lora_batch_info` was not called, or a shape does not fit.
        """
        bias = None if self.lora_bias is None else TensorValue(self.lora_bias)
        a, b = TensorValue(self.lora_A), TensorValue(self.lora_B)
        return sgmv_lora_kernel(x, a, b, *self.groups(), 1, bias)

    def shard(self, devices: Iterable[DeviceRef]) -> list[Linear]:
        """The shards of the layer, one per device, each a `LinearLoRA`; see `Linear.shard`.

        A split of the outputs divides the rows of B; a split of the inputs divides the columns of A.
        `set_lora_batch_info` is called on each shard.

        Args:
            devices: The devices of the shards.

        Raises:
            ValueError: There is no sharding strategy, its number of devices differs, or the weight cannot be
                split as the strategy requires.
        """
        parts = super().shard(devices)
        where = [part.device for part in parts]
        strategy = self.sharding_strategy
        assert strategy is not None
        a = b = replicated = ShardingStrategy.replicate(len(where))
        if strategy.axis in (0, -2):
            b = replace(strategy, axis=1)
        elif strategy.axis is not None:
            a = replace(strategy, axis=2)
        biases = parts_of_weight(self.lora_bias, b, where)
        if a != replicated:
            # parts of the inputs are summed: only one of them adds the bias
            biases[1:] = [None] * (len(where) - 1)
        matrices = zip(
            parts_of_weight(self.lora_A, a, where),
            parts_of_weight(self.lora_B, b, where),
            biases,
            strict=True,
        )
        return [
            part_of(
                self, LinearLoRA, weight=part.weight, bias=part.bias, device=part.device, input_scale=part.input_scale,
                weight_scale=part.weight_scale, lora_A=first, lora_B=second, lora_bias=bias,
            )
            for part, (first, second, bias) in zip(parts, matrices, strict=True)
        ]  # fmt: skip

    def __call__(self, x: TensorValue) -> TensorValue:
        """The product plus the terms of the adapters.

        Args:
            x: ``[rows, in_dim]``.

        Raises:
            ValueError: `set_lora_batch_info` was not called, or a shape does not fit.
        """
        y = super().__call__(x)
        return y + ops.cast(self.apply_lora(x), y.dtype)


class AttentionWithRopeAndLoRA(AttentionWithRope):
    """`AttentionWithRope` whose projections have adapters.

    The arguments are those of `AttentionWithRope`; `linear_cls` must create `LinearLoRA` layers, for example
    ``functools.partial(LinearLoRA, max_num_loras=8, max_lora_rank=16)``.

    Raises:
        ValueError: `linear_cls` creates other layers, or weights are stacked.
    """

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
        name = type(self).__name__
        if stacked_qkv:
            raise ValueError(f"{name}: adapters do not go with stacked_qkv")
        super().__init__(
            rope=rope,
            sharding_strategy=sharding_strategy,
            num_attention_heads=num_attention_heads,
            num_key_value_heads=num_key_value_heads,
            hidden_size=hidden_size,
            kv_params=kv_params,
            devices=devices,
            dtype=dtype,
            linear_cls=linear_cls,
            scale=scale,
            has_bias=has_bias,
            float8_config=float8_config,
            clip_qkv=clip_qkv,
            use_qk_norm=use_qk_norm,
            rms_norm_eps=rms_norm_eps,
        )
        for layer in (self.q_proj, self.k_proj, self.v_proj, self.o_proj):
            if not isinstance(layer, LinearLoRA):
                raise ValueError(
                    f"{name}: linear_cls makes {type(layer).__name__}, expected LinearLoRA"
                )

    def shard(self, devices: Iterable[DeviceRef]) -> list[AttentionWithRope]:
        """The shards of the layer, one per device, with their parts of the adapters; see `AttentionWithRope.shard`.

        Args:
            devices: The devices of the shards.

        Raises:
            ValueError: As for `AttentionWithRope.shard`.
        """
        return [part_of(part, AttentionWithRopeAndLoRA) for part in super().shard(devices)]

    @property
    def qkv_loras(self) -> list[LinearLoRA]:
        """The projections to queries, keys and values."""
        layers = (self.q_proj, self.k_proj, self.v_proj)
        return [layer for layer in layers if isinstance(layer, LinearLoRA)]

    def set_lora_batch_info(
        self, lora_ids: TensorValue, lora_ranks: TensorValue, lora_grouped_offsets: TensorValue
    ) -> None:
        """See `SupportsLoRA`: for all projections."""
        for layer in (*self.qkv_loras, self.o_proj):
            if isinstance(layer, LinearLoRA):
                layer.set_lora_batch_info(lora_ids, lora_ranks, lora_grouped_offsets)

    def fused_qkv_lora(
        self,
        x: TensorValue,
        kv_collection: PagedCacheValues,
        input_row_offsets: TensorValue,
        layer_idx: TensorValue,
    ) -> TensorValue:
        """The terms that the adapters add to the queries; those of keys and values are added in the cache.

        Use it with queries, keys and values computed without adapters; calling the layer already adds these terms.

        Args:
            x: ``[total_seq_len, hidden_size]``.
            kv_collection: The cache, with keys and values of the new tokens stored.
            input_row_offsets: The first row of each sequence.
            layer_idx: The index of the layer in the cache.

        Returns:
            ``[total_seq_len, n_heads * head_dim]``.

        Raises:
            ValueError: `set_lora_batch_info` was not called.
        """
        layers = self.qkv_loras
        # a: [adapters, 3 * max_rank, hidden_size], b: [adapters, q_width + 2 * kv_width, max_rank]
        a, b = (
            ops.concat([getattr(p, name) for p in layers], axis=1) for name in ("lora_A", "lora_B")
        )
        biases = [TensorValue(p.lora_bias) for p in layers if p.lora_bias is not None]
        ids, ranks, offsets = layers[0].groups()
        return sgmv_qkv_lora_kernel(
            x, a, b, ids, ranks, input_row_offsets, offsets, kv_collection, self.kv_params, layer_idx, 1,
            int(layers[0].lora_A.shape[1]), self.q_width, self.kv_width, ops.concat(biases, axis=1) if biases else None,
        )  # fmt: skip
