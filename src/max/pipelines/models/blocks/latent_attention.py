"""Multi-head latent attention of decoders: the cache stores one latent per token, which all heads share."""

from __future__ import annotations

from dataclasses import replace
from typing import Self

from max._dataclass import dataclass
from max.graph import TensorValue
from max.nn.attention.multi_latent_attention import LatentAttentionWithRope
from max.nn.kv_cache.cache_values import PagedCacheValues
from max.nn.layer import Module
from max.nn.layers.linear import Linear
from max.nn.rotary_embedding import RotaryEmbedding
from max.pipelines.models.blocks.mixer import AttentionMixer, CachedKeys, Site
from max.pipelines.models.blocks.rope import RopeConfig

__all__ = ["DecoderLatentAttention", "LatentForm"]


@dataclass(frozen=True)
class LatentForm(AttentionMixer):
    """The sizes of latent attention (https://arxiv.org/abs/2405.04434).

    Args:
        num_attention_heads: The number of query heads.
        rank: The size of the latent from which keys and values are expanded.
        query_rank: The size of the query latent; None: queries are projected directly from hidden states.
        plain_dim: The size of the unrotated part of a head's queries and keys.
        rotated_dim: The size of the rotated part; all heads share one rotated key.
        value_dim: The size of a value.
        bias: Whether the projections from and to hidden states have biases, except a direct query projection.
        rope: The rotation of ``rotated_dim`` elements.
        interleaved: Whether the two elements of a rotated pair are adjacent.
        scale: The factor of the scores; None: one over the root of the size of queries.
    """

    weights = "self_attn"

    num_attention_heads: int
    rank: int
    query_rank: int | None
    plain_dim: int
    rotated_dim: int
    value_dim: int
    bias: bool = False
    rope: RopeConfig = RopeConfig()  # pyright: ignore[reportIncompatibleVariableOverride]
    interleaved: bool = True
    scale: float | None = None

    @property
    def head_dim(self) -> int:
        """The size of a head's queries and keys."""
        return self.plain_dim + self.rotated_dim

    @property
    def cached_dim(self) -> int:
        """The number of cached elements per token: the latent and the rotated key."""
        return self.rank + self.rotated_dim

    @property
    def keys(self) -> CachedKeys:
        """See `Mixer.keys`."""
        # one row for all heads: the latent and the rotated key
        return CachedKeys(1, self.cached_dim, is_latent=True)

    def layer(self, site: Site) -> Module:
        """A `DecoderLatentAttention`; see `Mixer.layer`."""
        return DecoderLatentAttention(self, site)

    def part(self, count: int, index: int) -> Self:
        """The heads of one device; each has all latents. See `Mixer.part`."""
        # a latent is of all heads, so each device caches it whole
        return replace(self, num_attention_heads=max(self.num_attention_heads // count, 1))

    def split_problem(self, count: int) -> str | None:
        """See `Mixer.split_problem`."""
        return f"{self.num_attention_heads} heads" if self.num_attention_heads % count else None

    @property
    def positional_key(self) -> object:
        """See `Mixer.positional_key`."""
        # blocks with equal keys share one table of the graph
        return self.rope, self.head_dim, self.interleaved

    def position_inputs(self, site: Site, positions: TensorValue | None) -> list[TensorValue]:
        """The table of the rotation; see `Mixer.position_inputs`."""
        return [self.rotary_embedding(site).freqs_cis.to(site.device)]

    def rotary_embedding(self, site: Site) -> RotaryEmbedding:
        """The layer of the rotation.

        Args:
            site: What it needs from its model.
        """
        return self.rope.layer(
            dim=site.hidden_size,
            n_heads=self.num_attention_heads,
            head_dim=self.head_dim,
            max_seq_len=site.max_seq_len,
            interleaved=self.interleaved,
        )


class DecoderLatentAttention(LatentAttentionWithRope):
    """Latent attention with the call signature of decoder layers: optional biases, and position-dependent inputs as a
    list.

    Weights: those of `LatentAttentionWithRope`; with biases ``q_a_proj.bias``, ``kv_a_proj_with_mqa.bias`` and
    ``o_proj.bias``.

    Args:
        form: The sizes.
        site: What the layer needs from its model.
    """

    def __init__(self, form: LatentForm, site: Site) -> None:
        super().__init__(
            rope=form.rotary_embedding(site),
            num_attention_heads=form.num_attention_heads,
            num_key_value_heads=1,
            hidden_size=site.hidden_size,
            kv_params=site.kv_params,
            dtype=site.dtype,
            devices=[site.device],
            linear_cls=site.linear_cls,
            scale=form.head_dim**-0.5 if form.scale is None else form.scale,
            q_lora_rank=form.query_rank,
            kv_lora_rank=form.rank,
            qk_nope_head_dim=form.plain_dim,
            qk_rope_head_dim=form.rotated_dim,
            v_head_dim=form.value_dim,
        )
        # the base class has no biases: these layers take the place of its own
        if form.bias:

            def biased_linear(in_dim: int, out_dim: int) -> Linear:
                return site.linear_cls(in_dim, out_dim, site.dtype, site.device, has_bias=True)

            if form.query_rank is not None:
                self.q_a_proj = biased_linear(site.hidden_size, form.query_rank)
            self.kv_a_proj_with_mqa = biased_linear(site.hidden_size, form.cached_dim)
            self.o_proj = biased_linear(form.num_attention_heads * form.value_dim, site.hidden_size)

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
