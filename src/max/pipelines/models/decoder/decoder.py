"""A decoder-only model as layers, described by its config; the base class of architectures.

An architecture describes its blocks. If a model computes something that no form describes, it adds a form of a mixer
or of a block beside the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from max._lazy import lazy_module
from max.dtype import DType
from max.graph import DeviceRef, Dim, Graph, TensorValue, ops
from max.nn.kernels.cache import store_rows
from max.nn.kv_cache import KVCacheParams
from max.nn.kv_cache.cache_values import PagedCacheValues
from max.nn.layer import Layer, Module
from max.nn.layers.embedding import Embedding
from max.nn.layers.linear import Linear
from max.nn.transformer import ReturnLogits, Transformer
from max.nn.transformer._same_form import groups_of_same_form
from max.nn.transformer.transformer import rows_of_places, weight_prefix
from max.pipelines.models.blocks.attention import AttentionForm
from max.pipelines.models.blocks.block import Block, DecoderBlock
from max.pipelines.models.blocks.mixer import Mixer, Site
from max.pipelines.models.blocks.norms import norm_layer
from max.pipelines.models.blocks.rope import RopeConfig
from max.pipelines.models.decoder.config import NORMED_STATE, DecoderConfig

if TYPE_CHECKING:
    from max.pipelines.adapters import layout as adapter_layout
    from max.pipelines.adapters import sites
    from max.pipelines.models.blocks import alternating, per_layer
else:
    sites = lazy_module("max.pipelines.adapters.sites")
    alternating = lazy_module("max.pipelines.models.blocks.alternating")
    per_layer = lazy_module("max.pipelines.models.blocks.per_layer")
    adapter_layout = lazy_module("max.pipelines.adapters.layout")

__all__ = ["Decoder"]

Cache = TypeVar("Cache", KVCacheParams, PagedCacheValues)


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
        self._layout = config.cache
        self._site = config.site(kv_params, dtype, self.device, linear_cls)
        width = config.embedding_size or config.hidden_size
        # embeddings of another size than the hidden states have projections on both sides
        embedding = Embedding(config.vocab_size, width, dtype, self.device)
        output = Linear(width, config.vocab_size, dtype, self.device, has_bias=config.output_bias)
        if config.tie_word_embeddings:
            output.set_shared_weight("weight", embedding.weight)
        factor = config.embedding_multiplier
        if config.rounds_multiplier:
            factor = per_layer.rounded_factor(factor, dtype)
        # the base takes heads, which a model without attention lacks
        attention = config.first_form(AttentionForm) or AttentionForm(1, 1, 2)
        super().__init__(
            dim=config.hidden_size,
            n_heads=attention.num_attention_heads,
            layers=[
                self.block(block, site)
                for block, site in zip(config.blocks, self._sites(kv_params), strict=True)
            ],
            norm=self.make_norm() if config.final_norm else _Identity(),
            output=output,
            embedding=embedding,
            kv_params=kv_params,
            # of no use here: mixers make their own tables
            rope=RopeConfig().layer(
                dim=config.hidden_size, n_heads=1, head_dim=2, max_seq_len=1, interleaved=False
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
            self.per_layer = per_layer.PerLayerEmbeddings(
                config.per_layer_inputs, config.num_layers, config.hidden_size, config.norm_eps, dtype, self.device
            )  # fmt: skip
        if config.alternating is not None:
            self.states = alternating.AlternatingStates(
                config.alternating, config.hidden_size, dtype, self.device
            )
        if config.joins_states:
            count = len(config.stored_states)
            self.state_projection = Linear(
                count * config.hidden_size, config.hidden_size, dtype, self.device
            )
        if config.embedding_size is not None:
            self.project_in = Linear(width, config.hidden_size, dtype, self.device)
            self.project_out = Linear(config.hidden_size, width, dtype, self.device)
        self._output: Callable[[TensorValue], TensorValue] | None = None
        self._adapters: sites.AdapterSites | None = None

    def take_adapters(self, shape: adapter_layout.AdapterShape) -> sites.AdapterSites:
        """Makes the products of the model take adapters; its calls then need them.

        Args:
            shape: The memory for adapters.
        """
        self._adapters = sites.AdapterSites(self, shape)
        return self._adapters

    def _sites(self, kv_params: KVCacheParams) -> list[Site]:
        """What each block needs from the model."""
        return [
            replace(self._site, kv_params=self._cache_of(block, group, kv_params))
            for block, (group, _) in zip(self.config.blocks, self._layout.places, strict=True)
        ]

    def _cache_of(self, block: Block, group: int, cache: Cache) -> Cache:
        """The part of the cache that a block uses: its group, or all groups if it stores data in each."""
        keys = None if block.mixer is None else block.mixer.keys
        if keys is None or keys.index_dim is None:
            return cache.group(group)
        # all groups but that of stored states
        return replace(cache, groups=cache.groups[: -1 if self.config.stored_states else None])

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

    def block(self, block: Block, site: Site) -> DecoderBlock:
        """The layers of a block; a model whose blocks compute what no form says overrides it.

        Args:
            block: The form of the block.
            site: What the layers need from the model.
        """
        return block.layer(site)

    def __call__(
        self,
        tokens: TensorValue,
        kv_collection: PagedCacheValues,
        return_n_logits: TensorValue,
        input_row_offsets: TensorValue,
        embedded: tuple[TensorValue, TensorValue] | None = None,
        adapters: Sequence[TensorValue] = (),
    ) -> tuple[TensorValue, ...]:
        """The logits; see `Transformer`.

        Args:
            tokens: Integers ``[total_seq_len]``.
            kv_collection: The cache; keys and values of the tokens are written to it.
            return_n_logits: For `ReturnLogits.VARIABLE` the numbers 0, 1, …, as many as last tokens of each sequence
                have logits, int64 ``[n]``.
            input_row_offsets: The first row of each sequence, uint32 ``[batch + 1]``.
            embedded: Hidden states float32 ``[n, hidden_size]`` in place of those of some tokens, and their rows int64
                ``[n]``; None: all are those of the tokens.
            adapters: The values of `adapter_types`, if the model takes adapters.
        """
        blocks = self.config.blocks
        if self._adapters is not None:
            self._adapters.begin(adapters, input_row_offsets, tokens.shape[0])
        positions: TensorValue | None = None
        if self.config.learned_positions or any(
            block.mixer is not None and block.mixer.reads_positions for block in blocks
        ):
            positions = _positions(tokens, kv_collection, input_row_offsets)
        h = self._embedded_tokens(tokens, positions)
        if embedded is not None:
            states, rows = embedded
            # [rows, hidden_size]: they replace the embeddings of some tokens
            h = ops.scatter_nd(h, states, ops.unsqueeze(rows, -1))
        # mixers with equal position-dependent inputs share them
        mixers = [block.mixer or Mixer() for block in blocks]
        keys = [mixer.positional_key for mixer in mixers]
        tables: list[list[TensorValue]] = []
        for index, (key, mixer) in enumerate(zip(keys, mixers, strict=True)):
            first = keys.index(key)
            shared = (
                tables[first] if first < index else mixer.position_inputs(self._site, positions)
            )
            tables.append(shared)
        if self.config.per_layer_inputs is not None:
            vectors = self.per_layer(tokens, h)
            # last, where the blocks take them off
            tables = [[*table, own] for table, own in zip(tables, vectors, strict=True)]
        several = self.config.alternating is not None
        h = self.states(h) if several else h
        h = self._decode(h, kv_collection, tables, input_row_offsets)
        h = self.states.joined_states(h) if several else h
        if NORMED_STATE in self.config.stored_states:
            self._store_state(self.norm(h), kv_collection, input_row_offsets)
        return self._outputs(h, return_n_logits, input_row_offsets)

    def _last_rows(
        self, input_row_offsets: TensorValue, return_n_logits: TensorValue
    ) -> tuple[TensorValue, TensorValue]:
        return rows_of_places(input_row_offsets, return_n_logits)

    def _embedded_tokens(self, tokens: TensorValue, positions: TensorValue | None) -> TensorValue:
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
        tables: list[list[TensorValue]],
        input_row_offsets: TensorValue,
    ) -> TensorValue:
        """The hidden states after all blocks; blocks with equal staging share one subgraph."""
        indices = list(range(len(self.layers)))
        first_of = groups_of_same_form(list(self.layers)) if self.use_subgraphs else indices
        subgraphs: dict[int, Graph] = {}
        states: dict[int, TensorValue] = {}
        for index, layer in enumerate(self.layers):
            if index in self.config.stored_states:
                states[index] = h  # what the block reads
            group, place = self._layout.places[index]
            layer_idx = ops.constant(np.array(place, np.uint32), DType.uint32, h.device)
            cache = self._cache_of(self.config.blocks[index], group, kv_collection)
            first, position_inputs = first_of[index], tables[index]
            block: Module = layer
            adapters = list[TensorValue]()
            if self._adapters is not None:
                block = sites.AdaptedBlock(layer, self._adapters)
                adapters = self._adapters.of_block(index)
            further = [adapters] if adapters else list[list[TensorValue]]()
            # a subgraph that is called once saves no staging
            if first_of.count(first) == 1:
                h = block(layer_idx, h, cache, position_inputs, input_row_offsets, *further)
                continue
            prefix = weight_prefix(layer, f"layers.{index}.")
            if first not in subgraphs:
                types: list[Any] = [
                    layer_idx.type,
                    h.type,
                    cache.types,
                    [value.type for value in position_inputs],
                    input_row_offsets.type,
                    *([value.type for value in values] for values in further),
                ]
                subgraphs[first] = block.build_subgraph(
                    f"transformer_block_{first}",
                    types,
                    weight_prefix=prefix,
                )
            h = ops.call(
                subgraphs[first],
                layer_idx,
                h,
                *cache.values,
                *position_inputs,
                input_row_offsets,
                *adapters,
                prefix=prefix,
            )[0].tensor
        if self.config.joins_states:
            parts = [states[index] for index in self.config.stored_states]
            joined = self.state_projection(ops.concat(parts, axis=1))
            self._store_state(joined, kv_collection, input_row_offsets)
        return h

    def _store_state(
        self, h: TensorValue, kv_collection: PagedCacheValues, input_row_offsets: TensorValue
    ) -> None:
        """Writes a hidden state of the new tokens to the cache, for a head that drafts.

        Args:
            h: The hidden states ``[total_seq_len, hidden_size]``.
            kv_collection: The cache.
            input_row_offsets: The first row of each sequence, uint32 ``[batch + 1]``.
        """
        group = len(self.kv_params.groups)  # the last one
        store_rows(
            self.kv_params.group(group),
            h,
            input_row_offsets,
            kv_collection.group(group),
            ops.constant(0, DType.uint32, h.device),
        )

    def _logits(self, h: TensorValue) -> TensorValue:
        """The logits of hidden states in float32."""
        adapters = self._adapters
        # rows are no longer those of all tokens
        with nullcontext() if adapters is None else adapters.equal_rows(h.shape[0]):
            h = self.norm(h)
            if self.config.embedding_size is not None:
                h = self.project_out(h)
            y = (self._output or self.lm_head)(h)
        logits = ops.cast(y, DType.float32)
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
    # [batch]: from a row of the batch to the position in its sequence
    shift = ops.cast(kv_collection.cache_lengths, DType.int64) - bounds[:-1].rebind([batch])
    return rows + ops.gather(shift, sequence, axis=0)
