"""A decoder-only model as layers, described by its config; the base class of architectures.

An architecture sets the fields of its config. If a model computes something that no field describes, it overrides
`Decoder.attention`, `Decoder.feed_forward` or `Decoder.block`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from max.dtype import DType
from max.graph import DeviceRef, Dim, Graph, TensorType, TensorValue, ops
from max.nn.kv_cache import KVCacheParams
from max.nn.kv_cache.cache_values import PagedCacheValues
from max.nn.layer import Layer, Module
from max.nn.layers.embedding import Embedding
from max.nn.layers.linear import Linear
from max.nn.layers.mlp import MLP
from max.nn.rotary_embedding import RotaryEmbedding
from max.nn.transformer import ReturnLogits, Transformer
from max.nn.transformer._same_form import groups_of_same_form
from max.nn.transformer.transformer import weight_prefix
from max.pipelines.models.alternating import AlternatingBlock, AlternatingStates, SparseMLP
from max.pipelines.models.decoder_attention import DecoderAttention
from max.pipelines.models.decoder_block import DecoderBlock
from max.pipelines.models.decoder_config import DecoderConfig
from max.pipelines.models.experts import DecoderExperts
from max.pipelines.models.feed_forward import PlainMLP
from max.pipelines.models.gated_block import ExpertsBeside, GatedBlock
from max.pipelines.models.latent_attention import DecoderLatentAttention
from max.pipelines.models.norms import norm_layer
from max.pipelines.models.per_layer import PerLayerEmbeddings, PerLayerGate, rounded_factor
from max.pipelines.models.rope import RopeConfig
from max.pipelines.models.side_by_side import ScaledMLP, SideBySide, SideBySideLayer
from max.pipelines.models.sparse_latent_attention import SparseLatentAttention

__all__ = ["Decoder"]

Cache = TypeVar("Cache", KVCacheParams, PagedCacheValues)

_MIXER_NAMES = {
    "attention": "self_attn",
    "recurrent": "mixer",
    "both": "both",
    "feed_forward": "self_attn",
}
"""The names of a block's mixer weights, by the kind of layer: attention, recurrent, or both."""


class _Identity(Module):
    """Takes the place of the norm after the last block in models without one."""

    def __call__(self, x: TensorValue) -> TensorValue:
        return x


class Decoder(Transformer):
    """Embedding, blocks of attention and MLP, a final norm, and the output layer.

    Weights: ``embed_tokens.weight``, ``layers.N.…`` (see `DecoderBlock`), ``norm.weight``, ``lm_head.weight``; and
    according to the config ``embed_positions.weight``, ``embed_norm``, ``project_in.weight``, ``project_out.weight``,
    ``lm_head.bias``.

    Args:
        config: The shape of the model.
        kv_params: The shape of its KV cache.
        dtype: The dtype of the weights.
        device: Where it runs; the CPU by default.
        return_logits: Which tokens' logits are returned.
        linear_cls: The constructor of the projections in the blocks.

    Attributes:
        config: The shape of the model.
        dtype: The dtype of the weights.
        device: Where it runs.
        linear_cls: The constructor of the projections in the blocks.
    """

    def __init__(
        self,
        config: DecoderConfig,
        kv_params: KVCacheParams,
        dtype: DType,
        device: DeviceRef | None = None,
        return_logits: ReturnLogits = ReturnLogits.LAST_TOKEN,
        linear_cls: Callable[..., Linear] = Linear,
    ) -> None:
        self.config, self.dtype, self.linear_cls = config, dtype, linear_cls
        self.device = DeviceRef.CPU() if device is None else device
        rotations = [config.rotation_of(index) for index in range(config.num_layers)]
        self._rotations = rotations
        width = config.embedding_size or config.hidden_size
        embedding = Embedding(config.vocab_size, width, dtype, self.device)
        output = Linear(width, config.vocab_size, dtype, self.device, has_bias=config.output_bias)
        if config.tie_word_embeddings:
            output.set_shared_weight("weight", embedding.weight)
        factor = config.embedding_multiplier
        if config.rounds_multiplier:
            factor = rounded_factor(factor, dtype)
        super().__init__(
            dim=config.hidden_size,
            n_heads=config.num_heads,
            layers=[
                self.block(index, self._cache_of(index, kv_params))
                for index in range(config.num_layers)
            ],
            norm=self.make_norm() if config.final_norm else _Identity(),
            output=output,
            embedding=embedding,
            kv_params=kv_params,
            # heads of an odd size are not rotated
            rope=self._rope(
                next((r for r in rotations if r is not None), RopeConfig()),
                config.head_dim + config.head_dim % 2,
            ),
            return_logits=return_logits,
            embedding_multiplier=factor,
            logits_scaling=config.logits_scaling,
        )
        if config.learned_positions:
            self.embed_positions = Embedding(
                config.learned_positions, config.hidden_size, dtype, self.device
            )
        if config.embedding_norm:
            self.embed_norm = self.make_norm()
        if config.per_layer_inputs is not None:
            self.per_layer = PerLayerEmbeddings(
                config.per_layer_inputs, config.num_layers, config.hidden_size, config.norm_eps, dtype, self.device
            )  # fmt: skip
        if config.alternating is not None:
            self.states = AlternatingStates(
                config.alternating, config.hidden_size, dtype, self.device
            )
        if config.embedding_size is not None:
            self.project_in = Linear(width, config.hidden_size, dtype, self.device)
            self.project_out = Linear(config.hidden_size, width, dtype, self.device)
        self._output: Callable[[TensorValue], TensorValue] | None = None

    def split_output(self, parts: Callable[[TensorValue], TensorValue]) -> None:
        """Replaces the output layer by its parts on several devices.

        Args:
            parts: Maps hidden states to logits.
        """
        self._output = parts

    def make_norm(self) -> Layer:
        """A norm over hidden states: in the blocks, and after the last one."""
        config = self.config
        return norm_layer(config.norm, config.hidden_size, self.dtype, config.norm_eps, self.device)

    def attention(self, index: int, kv_params: KVCacheParams) -> Module:
        """The attention of a block, or the recurrent layer in its place.

        Args:
            index: The block's index.
            kv_params: The shape of the KV cache group that contains the block.
        """
        config, kind = self.config, self.config.kind_of(index)
        if kind in ("recurrent", "both"):
            assert config.recurrence is not None
            recurrent = config.recurrence.layer(
                config, kv_params, self.dtype, self.device, self.linear_cls
            )
            if kind == "recurrent":
                return recurrent
            attention = DecoderAttention(
                config, index, kv_params, self.dtype, self.device, self.linear_cls
            )
            return SideBySideLayer(attention, recurrent, config.side_by_side or SideBySide())
        if config.latent is not None:
            latent_class = (
                DecoderLatentAttention if config.latent.index is None else SparseLatentAttention
            )
            return latent_class(
                config.latent,
                rope=self._rope(config.rotation_of(index) or RopeConfig()),
                num_heads=config.num_heads,
                hidden_size=config.hidden_size,
                scale=config.score_factor(index),
                kv_params=kv_params,
                dtype=self.dtype,
                device=self.device,
                linear_cls=self.linear_cls,
            )
        return DecoderAttention(config, index, kv_params, self.dtype, self.device, self.linear_cls)

    def feed_forward(self, index: int) -> Layer:
        """The feed-forward layer of a block.

        Args:
            index: The block's index.
        """
        config = self.config
        experts = config.experts
        if experts is not None and index not in experts.dense_layers:
            return DecoderExperts(
                experts,
                config.hidden_size,
                self.dtype,
                self.device,
                config.activation,
                config.gated,
            )
        if not config.gated:
            return PlainMLP(
                self.dtype,
                config.hidden_size,
                config.intermediate_size,
                self.device,
                self.linear_cls,
                config.mlp_bias,
                config.activation,
            )
        sizes = config.layer_sizes
        options: dict[str, Any] = {
            "dtype": self.dtype,
            "quantization_encoding": None,
            "hidden_dim": config.hidden_size,
            "feed_forward_length": sizes[index] if sizes else config.intermediate_size,
            "devices": [self.device],
            "linear_cls": self.linear_cls,
            "has_bias": config.mlp_bias,
            "activation_function": config.activation,
        }
        if config.side_by_side is not None:
            return ScaledMLP(config.side_by_side, **options)
        sparsity = config.sparsity[index] if config.sparsity else 0.0
        return SparseMLP(sparsity, **options) if sparsity else MLP(**options)

    def block(self, index: int, kv_params: KVCacheParams) -> Module:
        """A block: attention, a feed-forward layer, norms and residual sums.

        Args:
            index: The block's index.
            kv_params: The shape of the KV cache group that contains the block.
        """
        config = self.config
        kind = config.kind_of(index)
        norms = {place: self.make_norm() for place in config.places_of(index)}
        if config.alternating is not None:
            return AlternatingBlock(
                self.attention(index, kv_params),
                self.feed_forward(index),
                norms,
                config.alternating,
                self.gate(),
                config.hidden_size,
                config.norm_eps,
                self.dtype,
                self.device,
            )
        if config.gated_blocks:
            beside: ExpertsBeside | None = None
            if config.experts_beside is not None:
                beside = ExpertsBeside(
                    config.experts_beside,
                    config.hidden_size,
                    config.norm_eps,
                    self.dtype,
                    self.device,
                    config.activation,
                )
            return GatedBlock(
                self.attention(index, kv_params),
                self.feed_forward(index),
                norms,
                None if config.per_layer_inputs is None else self.gate(),
                beside,
                self.dtype,
                self.device,
            )
        return DecoderBlock(
            self.attention(index, kv_params) if kind != "feed_forward" else None,
            self.feed_forward(index) if config.feeds_forward(index) else None,
            norms,
            config.parallel,
            config.residual_multiplier,
            config.normed_residual,
            mixer=_MIXER_NAMES[kind],
            cache_groups=config.cache_groups_of_layer,
        )

    def gate(self) -> PerLayerGate:
        """The layer that adds a layer's per-token vectors to hidden states."""
        config = self.config
        assert config.per_layer_inputs is not None
        return PerLayerGate(
            config.per_layer_inputs,
            config.hidden_size,
            config.norm_eps,
            config.activation,
            self.dtype,
            self.device,
            self.linear_cls,
        )

    def __call__(
        self,
        tokens: TensorValue,
        kv_collection: PagedCacheValues,
        return_n_logits: TensorValue,
        input_row_offsets: TensorValue,
        embedded: tuple[TensorValue, TensorValue] | None = None,
    ) -> tuple[TensorValue, ...]:
        """The logits; see `Transformer`.

        Args:
            tokens: Integers ``[total_seq_len]``.
            kv_collection: The cache; keys and values of the tokens are written to it.
            return_n_logits: The number of last tokens whose logits are returned for `ReturnLogits.VARIABLE`, int64
                ``[1]``.
            input_row_offsets: The first row of each sequence, uint32 ``[batch + 1]``.
            embedded: Hidden states float32 ``[n, hidden_size]`` in place of those of some tokens, and their rows int64
                ``[n]``; None: all are those of the tokens.
        """
        positions: TensorValue | None = None
        if self._reads_positions():
            positions = _positions(tokens, kv_collection, input_row_offsets)
        h = self._embedded(tokens, positions)
        if embedded is not None:
            states, rows = embedded
            h = ops.scatter_nd(h, states, ops.unsqueeze(rows, -1))
        # layers with equal rotations share a table
        forms = [
            (rotation, self.config.heads_of(index)[1], self.config.kv_layer_of(index) != index)
            for index, rotation in enumerate(self._rotations)
        ]
        tables: dict[int, list[TensorValue]] = {}
        for index, form in enumerate(forms):
            tables[index] = tables.get(forms.index(form)) or self._positional(*form, positions)
        if self.config.per_layer_inputs is not None:
            vectors = self.per_layer(tokens, h)
            tables = {index: [*table, vectors[index]] for index, table in tables.items()}
        several = self.config.alternating is not None
        h = self.states(h) if several else h
        h = self._decode(h, kv_collection, tables, input_row_offsets)
        h = self.states.joined(h) if several else h
        return self._outputs(h, return_n_logits, input_row_offsets)

    def _cache_of(self, index: int, cache: Cache) -> Cache:
        """The part of the cache that a block uses: its group, or all groups if it stores data in each."""
        if self.config.cache_groups_of_layer > 1:
            return cache
        return cache.group(self.config.cache_group(index))

    def _rope(self, rotation: RopeConfig, head_dim: int | None = None) -> RotaryEmbedding:
        """The layer of a rotation, for heads of `head_dim`."""
        config = self.config
        return rotation.layer(
            dim=config.hidden_size,
            n_heads=config.num_heads,
            head_dim=head_dim or config.head_dim,
            max_seq_len=config.max_seq_len,
            interleaved=config.interleaved_rope,
        )

    def _reads_positions(self) -> bool:
        """Whether the graph needs the position of each token; the cache kernels count positions themselves."""
        config = self.config
        after = config.qk_norm is not None and config.qk_norm.after_rotation
        learned, shared = bool(config.learned_positions), bool(config.shared_kv_layers)
        return learned or shared or config.query_growth is not None or after

    def _positional(
        self,
        rotation: RopeConfig | None,
        head_dim: int,
        shares_kv: bool,
        positions: TensorValue | None,
    ) -> list[TensorValue]:
        """The position-dependent inputs of the attention; see `DecoderAttention`."""
        config, values = self.config, list[TensorValue]()
        growth = config.query_growth
        if rotation is not None:
            table = self._rope(rotation, head_dim).freqs_cis.to(self.device)
            after = config.qk_norm is not None and config.qk_norm.after_rotation
            if (after or shares_kv) and positions is not None:
                table = ops.gather(table, positions, axis=0)
            values.append(table)
        grows = growth is not None and not (growth.unrotated_only and rotation is not None)
        if growth is not None and grows and positions is not None:
            steps = (
                np.arange(config.max_seq_len, dtype=np.float64) + growth.first
            ) // growth.length
            factors = (1 + growth.beta * np.log1p(steps)).astype(np.float32)
            table = ops.constant(factors, DType.float32, self.device)
            values.append(
                ops.reshape(ops.gather(table, positions, axis=0), [positions.shape[0], 1, 1])
            )
        return values

    def _embedded(self, tokens: TensorValue, positions: TensorValue | None) -> TensorValue:
        """The hidden states of tokens, float32 ``[total_seq_len, hidden_size]``."""
        config = self.config
        h = ops.cast(self.embed_tokens(tokens), DType.float32)
        if config.embedding_size is not None:
            h = self.project_in(h)
        if self.embedding_multiplier != 1.0:
            h = h * self.embedding_multiplier
        if config.learned_positions and positions is not None:
            rows = positions + config.first_position
            h = h + ops.cast(self.embed_positions(rows), DType.float32)
        return self.embed_norm(h) if config.embedding_norm else h

    def _decode(
        self,
        h: TensorValue,
        kv_collection: PagedCacheValues,
        tables: dict[int, list[TensorValue]],
        input_row_offsets: TensorValue,
    ) -> TensorValue:
        """The hidden states after all blocks; blocks with equal staging share one subgraph."""
        indices = list(range(len(self.layers)))
        first_of = groups_of_same_form(list(self.layers)) if self.use_subgraphs else indices
        subgraphs: dict[int, Graph] = {}
        for index, layer in enumerate(self.layers):
            number = np.array(self.config.cache_layer(index), np.uint32)
            layer_idx = ops.constant(number, DType.uint32, DeviceRef.CPU())
            cache = self._cache_of(index, kv_collection)
            first, positional = first_of[index], tables[index]
            if first_of.count(first) == 1:
                h = layer(layer_idx, h, cache, positional, input_row_offsets)
                continue
            prefix = weight_prefix(layer, f"layers.{index}.")
            if first not in subgraphs:
                subgraphs[first] = layer.build_subgraph(
                    f"transformer_block_{first}",
                    [
                        TensorType(DType.uint32, [], DeviceRef.CPU()),
                        h.type,
                        cache.types,
                        [value.type for value in positional],
                        input_row_offsets.type,
                    ],
                    weight_prefix=prefix,
                )
            h = ops.call(
                subgraphs[first],
                layer_idx,
                h,
                *cache.values,
                *positional,
                input_row_offsets,
                prefix=prefix,
            )[0].tensor
        return h

    def _logits(self, h: TensorValue) -> TensorValue:
        """The logits of hidden states in float32."""
        h = self.norm(h)
        if self.config.embedding_size is not None:
            h = self.project_out(h)
        logits = ops.cast((self._output or self.lm_head)(h), DType.float32)
        if self.logits_scaling != 1.0:
            logits = logits / self.logits_scaling
        cap = self.config.logits_soft_cap
        return logits if cap is None else ops.tanh(logits / cap) * cap


def _positions(
    tokens: TensorValue, kv_collection: PagedCacheValues, input_row_offsets: TensorValue
) -> TensorValue:
    """The position of each token in its sequence, int64 ``[total_seq_len]``."""
    total, device = tokens.shape[0], tokens.device
    batch = Dim(input_row_offsets.shape[0]) - 1
    rows = ops.range(
        0, TensorValue(total), 1, out_dim=total, dtype=DType.int64, device=DeviceRef.CPU()
    ).to(device)
    bounds = ops.cast(input_row_offsets, DType.int64)
    ends = ops.reshape(bounds[1:], [1, batch])
    # the number of sequences that end at or before a row is the index of the row's sequence
    passed = ops.cast(ops.reshape(rows, [total, 1]) >= ends, DType.int64)
    sequence = ops.reshape(ops.sum(passed, axis=1), [total])
    shift = ops.cast(kv_collection.cache_lengths, DType.int64) - bounds[:-1].rebind([batch])
    return rows + ops.gather(shift, sequence, axis=0)
