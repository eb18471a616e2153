"""Latent attention over selected tokens (DeepSeek V3.2): an indexer scores the cached tokens, and the attention heads
read those with the highest scores.
"""

from __future__ import annotations

from dataclasses import replace

from max._dataclass import dataclass
from max.dtype import DType
from max.graph import TensorValue, ops
from max.nn.attention._latent_attention import LatentInputs, rotate_rows
from max.nn.kernels.cache import store_rows
from max.nn.kernels.latents import attend_selected, plan_latents, select_tokens
from max.nn.layer import Module
from max.nn.layers.linear import Linear
from max.nn.layers.norm import LayerNorm
from max.pipelines.models.blocks.latent_attention import DecoderLatentAttention, LatentForm
from max.pipelines.models.blocks.mixer import CachedKeys, Site

__all__ = ["IndexForm", "SparseLatentAttention", "SparseLatentForm", "TokenIndexer"]


@dataclass(frozen=True)
class IndexForm:
    """The sizes of an indexer, which selects the tokens that attention reads.

    Args:
        num_heads: The number of index heads.
        dim: The size of an index query and of an index key.
        count: The maximum number of tokens that a token sees.
    """

    num_heads: int
    dim: int
    count: int


@dataclass(frozen=True)
class SparseLatentForm(LatentForm):
    """The sizes of latent attention over the tokens that an indexer selects.

    Args:
        index: The sizes of the indexer.
    """

    index: IndexForm = IndexForm(64, 128, 2048)

    @property
    def keys(self) -> CachedKeys:
        """See `Mixer.keys`."""
        return super().keys._replace(index_dim=self.index.dim)

    def layer(self, site: Site) -> Module:
        """A `SparseLatentAttention`; see `Mixer.layer`."""
        return SparseLatentAttention(self, site)


class TokenIndexer(Module):
    """Selects the tokens that attention reads, by scoring index keys in the second cache group.

    Weights: ``wq_b.weight``, ``wk.weight``, ``k_norm.weight``, ``k_norm.bias``, ``weights_proj.weight``.

    Args:
        form: The sizes of the attention.
        site: What the layer needs from its model; its cache is the group of index keys.
    """

    def __init__(self, form: SparseLatentForm, site: Site) -> None:
        assert form.query_rank is not None
        dtype, device = site.dtype, site.device
        self.index, self.rotated_dim = form.index, form.rotated_dim
        self.kv_params = site.kv_params
        heads, dim = form.index.num_heads, form.index.dim
        self.wq_b = site.linear_cls(form.query_rank, heads * dim, dtype, device)
        self.wk = site.linear_cls(site.hidden_size, dim, dtype, device)
        self.k_norm = LayerNorm(dim, [device], dtype, eps=1e-6)
        self.weights_proj = Linear(site.hidden_size, heads, dtype, device)

    def store_keys(self, inputs: LatentInputs) -> None:
        """Writes the index keys of the new tokens to the cache.

        Args:
            inputs: The hidden states and the cache.
        """
        # [tokens, dim]: one key for all heads of the indexer
        keys = ops.cast(self.k_norm(self.wk(inputs.x)), DType.float32)
        keys = self._rotated_heads(ops.unsqueeze(keys, 1), inputs.angles)
        store_rows(
            self.kv_params,
            ops.reshape(keys, [inputs.x.shape[0], self.index.dim]),
            inputs.input_row_offsets,
            inputs.kv_collection.group(1),
            inputs.layer_idx,
        )

    def __call__(self, inputs: LatentInputs) -> TensorValue:
        """The indices of the tokens that each new token sees, int32 ``[total_seq_len, index.count]``; see
        `select_tokens`.

        Args:
            inputs: The hidden states, the query latents and the cache, which already has the index keys of the new
                tokens.
        """
        index, rows = self.index, inputs.x.shape[0]
        queries = ops.reshape(self.wq_b(inputs.query_latents), [rows, index.num_heads, index.dim])
        # the factors of both: of the heads' number and of their size
        factor = (index.num_heads * index.dim) ** -0.5
        # [tokens, heads]: how much each head of the indexer counts
        weights = ops.cast(self.weights_proj(inputs.x), DType.float32) * factor
        return select_tokens(
            self.kv_params,
            self._rotated_heads(queries, inputs.angles),
            weights,
            index.count,
            inputs.input_row_offsets,
            inputs.kv_collection.group(1),
            inputs.layer_idx,
        )

    def _rotated_heads(self, x: TensorValue, angles: TensorValue) -> TensorValue:
        """Rotates the first elements of heads; the two elements of a pair are half of these apart."""
        turned = rotate_rows(x[:, :, : self.rotated_dim], angles, interleaved=False)
        if self.rotated_dim == self.index.dim:
            return turned
        return ops.concat([turned, x[:, :, self.rotated_dim :]], axis=2)


class SparseLatentAttention(DecoderLatentAttention):
    """Latent attention in which a token sees the ``form.index.count`` cached tokens that its indexer scores highest.

    Index keys are stored in the second cache group. No scores are computed while no sequence of the batch is longer
    than that count.

    Weights: those of `DecoderLatentAttention`, and ``indexer`` (`TokenIndexer`).

    Args:
        form: The sizes.
        site: What the layer needs from its model; its cache has the group of index keys.
    """

    cache_groups = 2

    def __init__(self, form: SparseLatentForm, site: Site) -> None:
        super().__init__(form, replace(site, kv_params=site.kv_params.group(0)))
        self.indexer = TokenIndexer(form, replace(site, kv_params=site.kv_params.group(1)))

    def attend(self, inputs: LatentInputs) -> TensorValue:
        """The values of each head; see `LatentAttentionWithRope.attend`."""
        # first, as new tokens may select each other
        self.indexer.store_keys(inputs)
        kv = inputs.kv_collection

        def sparse_attention() -> TensorValue:
            """Attention to the tokens that the indexer selects."""
            selected = self.indexer(inputs)
            return self.attend_absorbed(
                inputs,
                lambda queries: attend_selected(
                    self.kv_params,
                    queries,
                    selected,
                    self.kv_lora_rank,
                    inputs.input_row_offsets,
                    kv,
                    inputs.layer_idx,
                    self.scale,
                ),
            )

        dense = super().attend
        count = self.indexer.index.count
        _, selects = plan_latents(inputs.input_row_offsets, kv, count=count)
        return ops.cond(
            selects, [self.values_type(inputs)], sparse_attention, lambda: dense(inputs)
        )[0]
