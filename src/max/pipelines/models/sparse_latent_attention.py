"""Latent attention over selected tokens (DeepSeek V3.2): an indexer scores the cached tokens, and the attention heads
read those with the highest scores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from max.dtype import DType
from max.graph import DeviceRef, TensorValue, ops
from max.nn.attention._latent_attention import LatentInputs, rotate_rows
from max.nn.kernels.cache import store_rows
from max.nn.kernels.latents import attend_selected, plan_latents, select_tokens
from max.nn.kv_cache import KVCacheParams
from max.nn.layer import Module
from max.nn.layers.linear import Linear
from max.nn.layers.norm import LayerNorm
from max.pipelines.models.latent_attention import DecoderLatentAttention, LatentForm

__all__ = ["SparseLatentAttention", "TokenIndexer"]


class TokenIndexer(Module):
    """Selects the tokens that attention reads, by scoring index keys in the second cache group.

    Weights: ``wq_b.weight``, ``wk.weight``, ``k_norm.weight``, ``k_norm.bias``, ``weights_proj.weight``.

    Args:
        form: The sizes of the attention, with an `index`.
        hidden_size: The size of hidden states.
        kv_params: The shape of the cache group of index keys.
        dtype: The dtype of the weights.
        device: Where it runs.
        linear_cls: The constructor of the projections.
    """

    def __init__(
        self,
        form: LatentForm,
        hidden_size: int,
        kv_params: KVCacheParams,
        dtype: DType,
        device: DeviceRef,
        linear_cls: Callable[..., Linear] = Linear,
    ) -> None:
        assert form.index is not None and form.query_rank is not None
        self.index, self.rotated_dim = form.index, form.rotated_dim
        self.kv_params = kv_params
        heads, dim = form.index.heads, form.index.dim
        self.wq_b = linear_cls(form.query_rank, heads * dim, dtype, device)
        self.wk = linear_cls(hidden_size, dim, dtype, device)
        self.k_norm = LayerNorm(dim, [device], dtype, eps=1e-6)
        self.weights_proj = Linear(hidden_size, heads, dtype, device)

    def store_keys(self, inputs: LatentInputs) -> None:
        """Writes the index keys of the new tokens to the cache.

        Args:
            inputs: The hidden states and the cache.
        """
        keys = ops.cast(self.k_norm(self.wk(inputs.x)), DType.float32)
        keys = self._rotated(ops.unsqueeze(keys, 1), inputs.angles)
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
        queries = ops.reshape(self.wq_b(inputs.query_latents), [rows, index.heads, index.dim])
        factor = (index.heads * index.dim) ** -0.5
        weights = ops.cast(self.weights_proj(inputs.x), DType.float32) * factor
        return select_tokens(
            self.kv_params,
            self._rotated(queries, inputs.angles),
            weights,
            index.count,
            inputs.input_row_offsets,
            inputs.kv_collection.group(1),
            inputs.layer_idx,
        )

    def _rotated(self, x: TensorValue, angles: TensorValue) -> TensorValue:
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
        form: The sizes, with an `index`.
        hidden_size: The size of hidden states.
        kv_params: The shape of the KV cache, with the group of index keys.
        dtype: The dtype of the weights.
        device: Where it runs.
        linear_cls: The constructor of the projections.
        options: Further arguments of `DecoderLatentAttention`.
    """

    def __init__(
        self,
        form: LatentForm,
        hidden_size: int,
        kv_params: KVCacheParams,
        dtype: DType,
        device: DeviceRef,
        linear_cls: Callable[..., Linear] = Linear,
        **options: Any,
    ) -> None:
        super().__init__(
            form,
            hidden_size=hidden_size,
            kv_params=kv_params.group(0),
            dtype=dtype,
            device=device,
            linear_cls=linear_cls,
            **options,
        )
        self.indexer = TokenIndexer(
            form, hidden_size, kv_params.group(1), dtype, device, linear_cls
        )

    def attend(self, inputs: LatentInputs) -> TensorValue:
        """The values of each head; see `LatentAttentionWithRope.attend`.

        Args:
            inputs: The queries and the cache.
        """
        self.indexer.store_keys(inputs)
        kv = inputs.kv_collection

        def sparse() -> TensorValue:
            """Attention to the tokens that the indexer selects."""
            selected = self.indexer(inputs)
            return self.absorbed(
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
        return ops.cond(selects, [self.values_type(inputs)], sparse, lambda: dense(inputs))[0]
