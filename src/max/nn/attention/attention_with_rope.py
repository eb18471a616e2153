"""Attention with rotary position embedding over a paged KV cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from max.dtype import DType
from max.graph import DeviceRef, TensorValue, ops
from max.nn.attention._projections import QKVProjections
from max.nn.attention.mask_config import MHAMaskVariant
from max.nn.float8_config import Float8Config
from max.nn.kernels import flash_attention_ragged, fused_qk_ragged_rope, store_kv_cache_ragged
from max.nn.kv_cache.cache_params import KVCacheParams
from max.nn.kv_cache.cache_values import PagedCacheValues
from max.nn.linear import Linear
from max.nn.norm import RMSNorm
from max.nn.rotary_embedding import RotaryEmbedding

__all__ = ["AttentionWithRope"]


class AttentionWithRope(QKVProjections):
    """Causal self-attention of a ragged batch, with rotated queries and keys.

    Weights: ``q_proj``, ``k_proj``, ``v_proj``, ``o_proj`` (`Linear`), or ``qkv_proj.weight`` instead of
    the first three; with `use_qk_norm` ``q_norm`` and ``k_norm`` over heads.

    Args:
        rope: Gives the scale of the scores, and how pairs lie.
        sharding_strategy: How the weights are split over devices; one device needs none.
        num_attention_heads: The number of query heads.
        num_key_value_heads: The number of key heads, a divisor of it.
        hidden_size: The size of the input's last dimension.
        kv_params: The form of the cache.
        devices: Where it is computed: the first of them; the CPU by default.
        dtype: The dtype of the weights.
        linear_cls: Makes the projections.
        stacked_qkv: Whether one weight has the rows of queries, keys and values.
        scale: What scores are multiplied by; by default what `rope` says.
        has_bias: Whether queries, keys and values have biases.
        float8_config: How float8 is scaled; there is no kernel for it yet.
        clip_qkv: The weights of queries, keys and values are clamped to ``[-clip_qkv, clip_qkv]``.
        use_qk_norm: Whether query and key heads are normalised before they are rotated.
        rms_norm_eps: For these norms.

    Raises:
        ValueError: The options do not go together.
        NotImplementedError: `float8_config` or `sharding_strategy` is given.
    """

    rope: RotaryEmbedding
    """Gives the scale of the scores, and how pairs lie."""

    def __init__(
        self,
        *,
        rope: RotaryEmbedding,
        sharding_strategy: object | None = None,
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
        if float8_config is not None or sharding_strategy is not None:
            raise NotImplementedError(
                "AttentionWithRope: float8 and sharded weights have no kernels yet; use float32, "
                "float16 or bfloat16 on one device"
            )
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
        # borrowed: the table is the model's, not a part of each layer
        vars(self)["rope"] = rope
        self.scale = rope.compute_scale(scale)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if use_qk_norm:
            self.q_norm = RMSNorm(kv_params.head_dim, dtype, rms_norm_eps)
            self.k_norm = RMSNorm(kv_params.head_dim, dtype, rms_norm_eps)

    def __call__(
        self,
        layer_idx: TensorValue,
        x: TensorValue,
        kv_collection: PagedCacheValues,
        freqs_cis: TensorValue,
        input_row_offsets: TensorValue,
    ) -> TensorValue:
        """The attended input.

        Args:
            layer_idx: Which layer of the cache, uint32, rank 0.
            x: ``[total_seq_len, hidden_size]``.
            kv_collection: The cache; keys and values of the new tokens are written to it.
            freqs_cis: The rope's table ``[positions, head_dim]``.
            input_row_offsets: Where each sequence begins, uint32 ``[batch + 1]``.

        Returns:
            ``[total_seq_len, hidden_size]``, of x's dtype.

        Raises:
            ValueError: A shape does not fit.
            TypeError: A dtype does not fit.
        """
        params = self.kv_params
        q, k, v = self.project_qkv(x)
        queries = self.per_head(q)
        if self.q_norm is not None and self.k_norm is not None:
            queries = self.q_norm(queries)
            per_head = [k.shape[0], self.num_key_value_heads, params.head_dim]
            k = ops.reshape(self.k_norm(ops.reshape(k, per_head)), k.shape)
        store_kv_cache_ragged(params, k, v, input_row_offsets, kv_collection, layer_idx)
        queries = fused_qk_ragged_rope(
            params,
            queries,
            input_row_offsets,
            kv_collection,
            freqs_cis,
            layer_idx,
            interleaved=self.rope.interleaved,
        )
        attended = flash_attention_ragged(
            params,
            queries,
            input_row_offsets,
            kv_collection,
            layer_idx,
            MHAMaskVariant.CAUSAL_MASK,
            self.scale,
            out_dtype=self.attended_dtype(queries),
        )
        return self.project_out(attended, x)
