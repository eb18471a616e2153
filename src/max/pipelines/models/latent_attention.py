"""Multi-head latent attention of decoders: the cache stores one latent per token, which all heads share."""

from __future__ import annotations

from collections.abc import Callable

from max._dataclass import dataclass
from max.dtype import DType
from max.graph import DeviceRef, TensorValue
from max.nn.attention.multi_latent_attention import LatentAttentionWithRope
from max.nn.kv_cache import KVCacheParams
from max.nn.kv_cache.cache_values import PagedCacheValues
from max.nn.layers.linear import Linear
from max.nn.rotary_embedding import RotaryEmbedding

__all__ = ["DecoderLatentAttention", "IndexForm", "LatentForm"]


@dataclass(frozen=True)
class IndexForm:
    """The sizes of an indexer, which selects the tokens that attention reads.

    Args:
        heads: The number of index heads.
        dim: The size of an index query and of an index key.
        count: The maximum number of tokens that a token sees.
    """

    heads: int
    dim: int
    count: int


@dataclass(frozen=True)
class LatentForm:
    """The sizes of latent attention (https://arxiv.org/abs/2405.04434).

    Args:
        rank: The size of the latent from which keys and values are expanded.
        query_rank: The size of the query latent; None: queries are projected directly from hidden states.
        plain_dim: The size of the unrotated part of a head's queries and keys.
        rotated_dim: The size of the rotated part; all heads share one rotated key.
        value_dim: The size of a value.
        bias: Whether the projections from and to hidden states have biases, except a direct query projection.
        index: The sizes of the indexer; None: a token sees all earlier tokens.
    """

    rank: int
    query_rank: int | None
    plain_dim: int
    rotated_dim: int
    value_dim: int
    bias: bool = False
    index: IndexForm | None = None

    @property
    def cached_dim(self) -> int:
        """The number of cached elements per token: the latent and the rotated key."""
        return self.rank + self.rotated_dim


class DecoderLatentAttention(LatentAttentionWithRope):
    """Latent attention with the call signature of decoder layers: optional biases, and position-dependent inputs as a
    list.

    Weights: those of `LatentAttentionWithRope`; with biases ``q_a_proj.bias``, ``kv_a_proj_with_mqa.bias`` and
    ``o_proj.bias``.

    Args:
        form: The sizes.
        rope: The rotation of ``form.rotated_dim`` elements.
        num_heads: The number of query heads.
        hidden_size: The size of hidden states.
        scale: The factor of the scores.
        kv_params: The shape of the KV cache.
        dtype: The dtype of the weights.
        device: Where it runs.
        linear_cls: The constructor of the projections.
    """

    def __init__(
        self,
        form: LatentForm,
        rope: RotaryEmbedding,
        num_heads: int,
        hidden_size: int,
        scale: float,
        kv_params: KVCacheParams,
        dtype: DType,
        device: DeviceRef,
        linear_cls: Callable[..., Linear] = Linear,
    ) -> None:
        super().__init__(
            rope=rope,
            num_attention_heads=num_heads,
            num_key_value_heads=1,
            hidden_size=hidden_size,
            kv_params=kv_params,
            dtype=dtype,
            devices=[device],
            linear_cls=linear_cls,
            scale=scale,
            q_lora_rank=form.query_rank,
            kv_lora_rank=form.rank,
            qk_nope_head_dim=form.plain_dim,
            qk_rope_head_dim=form.rotated_dim,
            v_head_dim=form.value_dim,
        )
        if form.bias:

            def biased(in_dim: int, out_dim: int) -> Linear:
                return linear_cls(in_dim, out_dim, dtype, device, has_bias=True)

            if form.query_rank is not None:
                self.q_a_proj = biased(hidden_size, form.query_rank)
            self.kv_a_proj_with_mqa = biased(hidden_size, form.cached_dim)
            self.o_proj = biased(num_heads * form.value_dim, hidden_size)

    def __call__(
        self,
        layer_idx: TensorValue,
        x: TensorValue,
        kv_collection: PagedCacheValues,
        freqs_cis: TensorValue | list[TensorValue],
        input_row_offsets: TensorValue,
    ) -> TensorValue:
        """The attention output; see `LatentAttentionWithRope`.

        Args:
            layer_idx: The index of the layer in the cache, uint32, rank 0.
            x: ``[total_seq_len, hidden_size]``.
            kv_collection: The cache; latents of the new tokens are written to it.
            freqs_cis: The rope's table ``[positions, rotated_dim]``, alone or as the only element of a list.
            input_row_offsets: The first row of each sequence, uint32 ``[batch + 1]``.
        """
        table = freqs_cis[0] if isinstance(freqs_cis, list) else freqs_cis
        return super().__call__(layer_idx, x, kv_collection, table, input_row_offsets)
