"""Decoder-only transformers over a paged KV cache."""

from __future__ import annotations

from enum import Enum
from typing import Any

import numpy as np

from max.dtype import DType
from max.graph import DeviceRef, Dim, Graph, TensorType, TensorValue, ops
from max.nn.kv_cache.cache_params import KVCacheParams
from max.nn.kv_cache.cache_values import PagedCacheValues
from max.nn.layer import Layer, LayerList, Module
from max.nn.rotary_embedding import RotaryEmbedding
from max.nn.transformer._same_form import groups_of_same_form

__all__ = ["ReturnHiddenStates", "ReturnLogits", "Transformer", "TransformerBlock"]


class ReturnLogits(str, Enum):
    """The tokens whose logits a model returns."""

    LAST_TOKEN = "last_token"
    """The last token of each sequence."""

    VARIABLE = "variable"
    """The last n tokens of each sequence; n is an input."""

    ALL = "all"
    """All tokens."""


class ReturnHiddenStates(str, Enum):
    """The hidden states that a model returns in addition to its logits."""

    NONE = "none"
    """None."""

    LAST = "last"
    """Those of the last token of each sequence, before the last norm."""

    ALL = "all"
    """Those of all tokens, before the last norm."""

    ALL_NORMALIZED = "all_normalized"
    """Those of all tokens, after the last norm."""


class TransformerBlock(Module):
    """``h = x + attention(attention_norm(x))``, then ``h + mlp(mlp_norm(h))``.

    Weights: those of ``self_attn``, ``mlp``, ``input_layernorm``, ``post_attention_layernorm``.

    Args:
        attention: The attention layer.
        mlp: The feed-forward layer.
        attention_norm: The norm before the attention.
        mlp_norm: The norm before the feed-forward layer.
        residual_multiplier: The factor of the outputs of attention and mlp before they are added.
    """

    def __init__(
        self,
        attention: Module,
        mlp: Layer,
        attention_norm: Layer,
        mlp_norm: Layer,
        residual_multiplier: float = 1.0,
    ) -> None:
        self.self_attn = attention
        self.mlp = mlp
        self.input_layernorm = attention_norm
        self.post_attention_layernorm = mlp_norm
        self.residual_multiplier = residual_multiplier

    def __call__(
        self,
        layer_idx: TensorValue,
        x: TensorValue,
        kv_collection: PagedCacheValues | list[Any],
        freqs_cis: TensorValue,
        input_row_offsets: TensorValue,
        **kwargs: Any,
    ) -> TensorValue:
        """The block's output.

        Args:
            layer_idx: The index of the layer in the cache, uint32, rank 0.
            x: ``[total_seq_len, dim]``.
            kv_collection: The cache, or its four values.
            freqs_cis: The rope's table.
            input_row_offsets: The first row of each sequence, uint32 ``[batch + 1]``.
            kwargs: More arguments of the attention.

        Returns:
            ``[total_seq_len, dim]``, of x's dtype.
        """
        attended = self.self_attn(
            layer_idx,
            self.input_layernorm(x),
            PagedCacheValues.of(kv_collection),
            freqs_cis=freqs_cis,
            input_row_offsets=input_row_offsets,
            **kwargs,
        )
        h = x + self._scale_residual(attended)
        return h + self._scale_residual(self.mlp(self.post_attention_layernorm(h)))

    def _scale_residual(self, x: TensorValue) -> TensorValue:
        return x if self.residual_multiplier == 1.0 else x * self.residual_multiplier


class Transformer(Module):
    """Embedding, blocks, norm, and the output layer.

    Weights: those of ``embed_tokens``, ``layers.0`` …, ``norm``, ``lm_head``.

    Between the blocks the hidden states are float32, for weights of any dtype: the residual sums do not lose precision,
    and the norms, which compute in float32, round only once. Blocks of the same form are staged once, as a subgraph.

    Args:
        dim: The hidden size.
        n_heads: The number of query heads.
        layers: The blocks.
        norm: The norm after the last block.
        output: The output layer, from hidden size to vocabulary.
        embedding: The token embedding.
        kv_params: The parameters of the cache.
        rope: The rotary embedding.
        return_logits: The tokens whose logits are returned.
        embedding_multiplier: The factor of the embeddings.
        logits_scaling: The divisor of the logits.
    """

    def __init__(
        self,
        dim: int,
        n_heads: int,
        layers: list[Any],
        norm: Layer,
        output: Layer,
        embedding: Layer,
        kv_params: KVCacheParams,
        rope: RotaryEmbedding,
        return_logits: ReturnLogits = ReturnLogits.LAST_TOKEN,
        embedding_multiplier: float = 1.0,
        logits_scaling: float = 1.0,
    ) -> None:
        self.dim, self.n_heads = dim, n_heads
        self.embed_tokens = embedding
        self.layers = LayerList(layers)
        self.norm = norm
        self.lm_head = output
        self.kv_params = kv_params
        self.rope = rope
        self.return_logits = return_logits
        self.embedding_multiplier = embedding_multiplier
        self.logits_scaling = logits_scaling
        self.use_subgraphs = True

    use_subgraphs: bool
    """Whether blocks of the same form are staged once."""

    def __call__(
        self,
        tokens: TensorValue,
        kv_collection: PagedCacheValues,
        return_n_logits: TensorValue,
        input_row_offsets: TensorValue,
    ) -> tuple[TensorValue, ...]:
        """The logits.

        Args:
            tokens: Integers ``[total_seq_len]``.
            kv_collection: The cache; keys and values of the tokens are written to it.
            return_n_logits: For `ReturnLogits.VARIABLE`, the number of last tokens whose logits are returned, at least
                1, int64 ``[1]``.
            input_row_offsets: The first row of each sequence, uint32 ``[batch + 1]``.

        Returns:
            The logits of the last tokens, float32 ``[batch, vocab]``. For `ReturnLogits.ALL` and ``VARIABLE`` also the
            logits of all requested tokens, ``[rows, vocab]``, and the first row of each sequence in them,
            ``[batch + 1]``.
        """
        h = ops.cast(self.embed_tokens(tokens), DType.float32)
        if self.embedding_multiplier != 1.0:
            h = h * self.embedding_multiplier
        freqs_cis = self.rope.freqs_cis.to(h.device)
        h = self._blocks(h, kv_collection, freqs_cis, input_row_offsets)
        return self._outputs(h, return_n_logits, input_row_offsets)

    def _blocks(
        self,
        h: TensorValue,
        kv_collection: PagedCacheValues,
        freqs_cis: TensorValue,
        input_row_offsets: TensorValue,
    ) -> TensorValue:
        indices = range(len(self.layers))
        first_of = groups_of_same_form(list(self.layers)) if self.use_subgraphs else list(indices)
        subgraphs: dict[int, Graph] = {}
        for index, layer in enumerate(self.layers):
            layer_idx = ops.constant(np.array(index, np.uint32), DType.uint32, DeviceRef.CPU())
            first = first_of[index]
            if first_of.count(first) == 1:
                h = layer(layer_idx, h, kv_collection, freqs_cis, input_row_offsets)
                continue
            if first not in subgraphs:
                subgraphs[first] = layer.build_subgraph(
                    f"transformer_block_{first}",
                    [
                        TensorType(DType.uint32, [], DeviceRef.CPU()),
                        h.type,
                        kv_collection.types,
                        freqs_cis.type,
                        input_row_offsets.type,
                    ],
                    weight_prefix=weight_prefix(layer, f"layers.{index}."),
                )
            h = ops.call(
                subgraphs[first],
                layer_idx,
                h,
                *kv_collection.values,
                freqs_cis,
                input_row_offsets,
                prefix=weight_prefix(layer, f"layers.{index}."),
            )[0].tensor
        return h

    def _outputs(
        self, h: TensorValue, return_n_logits: TensorValue, input_row_offsets: TensorValue
    ) -> tuple[TensorValue, ...]:
        if self.return_logits is ReturnLogits.VARIABLE:
            rows, offsets = self._last_rows(input_row_offsets, return_n_logits)
            # the output layer is read once: the last row of each sequence is one of these rows
            logits = self._logits(ops.gather(h, rows, axis=0))
            return (
                ops.gather(logits, ops.cast(offsets[1:], DType.int64) - 1, axis=0),
                logits,
                offsets,
            )
        ends = input_row_offsets[1:]
        last = self._logits(ops.gather(h, ops.cast(ends, DType.int64) - 1, axis=0))
        if self.return_logits is ReturnLogits.ALL:
            return last, self._logits(h), input_row_offsets
        return (last,)

    def _last_rows(
        self, input_row_offsets: TensorValue, return_n_logits: TensorValue
    ) -> tuple[TensorValue, TensorValue]:
        """The rows with logits for `ReturnLogits.VARIABLE`, and the first row of each sequence in them."""
        return last_rows(input_row_offsets, return_n_logits)

    def _logits(self, h: TensorValue) -> TensorValue:
        logits = ops.cast(self.lm_head(self.norm(h)), DType.float32)
        return logits if self.logits_scaling == 1.0 else logits / self.logits_scaling


def weight_prefix(block: Module, otherwise: str) -> str:
    """The prefix of the names of a block's weights; `otherwise` if no state dict has named them."""
    # the first weight with a full name tells the prefix of all
    for path, weight in block.raw_state_dict().items():
        if weight.name != path and weight.name.endswith(f".{path}"):
            return weight.name.removesuffix(path)
    return otherwise


def last_rows(
    input_row_offsets: TensorValue, count: TensorValue
) -> tuple[TensorValue, TensorValue]:
    """The rows of the last `count` tokens of each sequence, and the first row of each sequence in them.

    If a sequence has fewer new tokens, its first token is repeated.
    """
    # the count is in the host's memory, as the size of the range
    number = ops.cast(count, DType.int64)[0]
    each = Dim("return_n_logits_range")
    places = ops.range(0, number, 1, out_dim=each, dtype=DType.int64, device=DeviceRef.CPU())
    return rows_of_places(input_row_offsets, ops.transfer_to(places, input_row_offsets.device))


def rows_of_places(
    input_row_offsets: TensorValue, places: TensorValue
) -> tuple[TensorValue, TensorValue]:
    """As `last_rows`, where the count is a size, which is known without a read of the host.

    Args:
        input_row_offsets: The first row of each sequence, uint32 ``[batch + 1]``.
        places: The numbers from 0 on, as many as rows of each sequence, int64 ``[n]``, on the same device.
    """
    device, each = input_row_offsets.device, places.shape[0]
    bounds = ops.cast(input_row_offsets, DType.int64)
    batch = input_row_offsets.shape[0] - 1
    number = TensorValue(each)
    first = ops.reshape(bounds[:-1], [batch, 1])
    ends = ops.reshape(bounds[1:], [batch, 1])
    steps = ops.reshape(places, [1, each])
    rows = ops.max(ends - ops.transfer_to(number, device) + steps, first)  # [batch, each]
    # each sequence has as many rows, so that their offsets are multiples
    sequences = ops.range(
        0, TensorValue(batch) + 1, 1, out_dim=batch + 1, dtype=DType.int64, device=DeviceRef.CPU()
    )
    offsets = ops.cast(sequences * number, DType.uint32)
    return ops.reshape(rows, [batch * each]), ops.transfer_to(offsets, device)
