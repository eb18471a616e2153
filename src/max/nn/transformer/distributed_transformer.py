"""Decoder-only transformers over several devices; each has a part of the heads and of the features."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np

from max.dtype import DType
from max.graph import (
    BufferValue,
    DeviceRef,
    Graph,
    ShardingStrategy,
    TensorType,
    TensorValue,
    Value,
    ops,
)
from max.nn.attention.attention_with_rope import distribute_value
from max.nn.attention.interfaces import DistributedAttentionImpl
from max.nn.comm import Allreduce
from max.nn.kv_cache.cache_params import KVCacheParams
from max.nn.kv_cache.cache_values import PagedCacheValues
from max.nn.layer import LayerList, Module, Shardable
from max.nn.layers.embedding import VocabParallelEmbedding
from max.nn.layers.linear import ColumnParallelLinear, DistributedGemmConfig
from max.nn.layers.sharding import check_per_device
from max.nn.rotary_embedding import RotaryEmbedding
from max.nn.transformer._same_form import groups_of_same_form
from max.nn.transformer.transformer import ReturnLogits, last_rows, weight_prefix

__all__ = [
    "DistributedTransformer",
    "DistributedTransformerBlock",
    "ShardableCallable",
    "distribute_value",
    "forward_sharded_layers",
    "take",
]


@runtime_checkable
class ShardableCallable(Shardable, Protocol):
    """A layer of one tensor that can be split over devices."""

    def __call__(self, x: TensorValue) -> TensorValue:
        """The layer's output.

        Args:
            x: The input.
        """
        ...


def take(it: Iterable[Value[Any]], n: int) -> list[Value[Any]]:
    """The next `n` values as a list; fewer at the end of the iterator.

    Args:
        it: The values; an iterator continues after the consumed ones.
        n: The number of values.
    """
    return list(islice(it, n))


def forward_sharded_layers(
    layers: Sequence[Callable[[TensorValue], TensorValue]], xs: Sequence[TensorValue]
) -> list[TensorValue]:
    """The output of each layer for its input.

    Args:
        layers: The shards of a layer, one per device.
        xs: One input per layer.

    Raises:
        AssertionError: The numbers of layers and inputs differ.
    """
    if len(layers) != len(xs):
        raise AssertionError(f"forward_sharded_layers: {len(layers)} layers, {len(xs)} inputs")
    return [layer(x) for layer, x in zip(layers, xs, strict=True)]


def _shards_of(layer: Any, strategy: ShardingStrategy, devices: Sequence[DeviceRef]) -> list[Any]:
    """Sets the strategy of a layer and returns its shards."""
    if not isinstance(layer, Shardable):
        raise TypeError(
            f"{type(layer).__name__} cannot be split over devices; expected a layer with "
            "sharding_strategy and shard()"
        )
    layer.sharding_strategy = strategy
    return list(cast("Any", layer).shard(devices))


def _caches(values: Sequence[PagedCacheValues | Value[Any]]) -> list[PagedCacheValues]:
    """The caches of the devices, given as caches or as a flat list of their values."""
    if all(isinstance(value, PagedCacheValues) for value in values):
        return cast("list[PagedCacheValues]", list(values))
    remaining = iter(cast("Sequence[Value[Any]]", values))
    caches: list[PagedCacheValues] = []
    # a cache is four values; see `PagedCacheValues`
    while four := take(remaining, 4):
        caches.append(PagedCacheValues.of(four))
    return caches


class DistributedTransformerBlock(Module):
    """``h = x + attention(attention_norm(x))``, then ``h + mlp(mlp_norm(h))``, over several devices.

    Each device holds the whole of ``x`` and ``h``, the norms, and a part of attention and mlp, whose results are
    summed. Weights: those of `TransformerBlock`.

    Args:
        attention: The attention layer: a shardable layer, or a layer over several devices.
        mlp: The feed-forward layer.
        attention_norm: The norm before the attention.
        mlp_norm: The norm before the feed-forward layer.
        devices: The devices.
        distributed_gemm_config: Options of matrix products over several devices.

    Raises:
        ValueError: There is no device, or a layer cannot be split over them.
        TypeError: A layer does not support sharding.
    """

    def __init__(
        self,
        attention: Module,
        mlp: ShardableCallable,
        attention_norm: ShardableCallable,
        mlp_norm: ShardableCallable,
        devices: list[DeviceRef],
        distributed_gemm_config: DistributedGemmConfig | None = None,
    ) -> None:
        if not devices:
            raise ValueError("DistributedTransformerBlock: no device is given")
        count = len(devices)
        self.devices = list(devices)
        self.self_attn = attention
        self.mlp = mlp
        self.input_layernorm = attention_norm
        self.post_attention_layernorm = mlp_norm
        self.distributed_gemm_config = distributed_gemm_config
        split, replicated = (
            ShardingStrategy.tensor_parallel(count),
            ShardingStrategy.replicate(count),
        )
        over_devices = isinstance(attention, DistributedAttentionImpl)
        self._attention_parts = [] if over_devices else _shards_of(attention, split, devices)
        self._mlp_parts = _shards_of(mlp, split, devices)
        self._attention_norms = _shards_of(attention_norm, replicated, devices)
        self._mlp_norms = _shards_of(mlp_norm, replicated, devices)
        self.allreduce = Allreduce(count)

    def __call__(
        self,
        layer_idx: TensorValue,
        xs: Sequence[TensorValue],
        signal_buffers: Sequence[BufferValue],
        kv_collections: Sequence[PagedCacheValues | Value[Any]],
        freqs_cis: Sequence[TensorValue],
        input_row_offsets: Sequence[TensorValue],
    ) -> list[TensorValue]:
        """The block's output, on each device.

        Args:
            layer_idx: The index of the layer in the caches, uint32, rank 0.
            xs: The same ``[total_seq_len, dim]`` on each device.
            signal_buffers: One signal buffer per device; see `max.nn.comm.Signals`.
            kv_collections: The cache of each device, or the four values of each cache as a flat list.
            freqs_cis: The rope's table, on each device.
            input_row_offsets: The first row of each sequence, uint32 ``[batch + 1]``, on each device.

        Raises:
            ValueError: The number of values differs from the number of devices, or a shape does not fit.
        """
        caches = _caches(kv_collections)
        check_per_device(
            "DistributedTransformerBlock",
            len(self.devices),
            xs=xs,
            kv_collections=caches,
            freqs_cis=freqs_cis,
            input_row_offsets=input_row_offsets,
        )
        normed = forward_sharded_layers(self._attention_norms, xs)
        if isinstance(self.self_attn, DistributedAttentionImpl):
            attended = self.self_attn(
                layer_idx, normed, signal_buffers, caches, freqs_cis, input_row_offsets
            )
        else:
            parts = [
                part(layer_idx, *values)
                for part, *values in zip(
                    self._attention_parts, normed, caches, freqs_cis, input_row_offsets, strict=True
                )
            ]
            # a part is the output of some heads: that of all heads is the sum
            attended = self.allreduce(parts, signal_buffers)
        # x is whole on each device, so residual sums need no exchange
        hs = [x + y for x, y in zip(xs, attended, strict=True)]
        outputs = forward_sharded_layers(
            self._mlp_parts, forward_sharded_layers(self._mlp_norms, hs)
        )
        return [h + y for h, y in zip(hs, self.allreduce(outputs, signal_buffers), strict=True)]


class DistributedTransformer(Module):
    """Embedding, blocks, norm, and the output layer, over several devices.

    Weights: those of `Transformer`. Between the blocks the hidden states are float32.

    Args:
        dim: The hidden size.
        n_heads: The number of query heads.
        layers: The blocks.
        norm: The norm after the last block.
        output: The output layer, from hidden size to vocabulary.
        embedding: The token embedding.
        kv_params: The parameters of the cache.
        devices: The devices.
        rope: The rotary embedding.
        return_logits: The tokens whose logits are returned.
        use_subgraphs: Whether blocks of the same form are staged once.
        subgraph_layer_groups: Groups of blocks that may be staged once, as lists of indices; by default all blocks of
            the same form.
        logits_scaling: The divisor of the logits.

    Raises:
        ValueError: There is no device, or the norm cannot be replicated on them.
    """

    def __init__(
        self,
        dim: int,
        n_heads: int,
        layers: list[DistributedTransformerBlock],
        norm: ShardableCallable,
        output: ColumnParallelLinear,
        embedding: VocabParallelEmbedding,
        kv_params: KVCacheParams,
        devices: list[DeviceRef],
        rope: RotaryEmbedding,
        return_logits: ReturnLogits = ReturnLogits.LAST_TOKEN,
        use_subgraphs: bool = False,
        subgraph_layer_groups: list[list[int]] | None = None,
        logits_scaling: float = 1.0,
    ) -> None:
        if not devices:
            raise ValueError("DistributedTransformer: no device is given")
        for index in (i for group in subgraph_layer_groups or () for i in group):
            if not 0 <= index < len(layers):
                raise ValueError(
                    f"DistributedTransformer: subgraph_layer_groups has layer {index} of "
                    f"{len(layers)}"
                )
        self.dim, self.n_heads = dim, n_heads
        self.embed_tokens = embedding
        self.layers = LayerList(layers)
        self.norm = norm
        self.lm_head = output
        self.kv_params = kv_params
        self.devices = list(devices)
        self.rope = rope
        self.return_logits = return_logits
        self.use_subgraphs = use_subgraphs
        self.subgraph_layer_groups = subgraph_layer_groups
        self.logits_scaling = logits_scaling
        self._norms = _shards_of(norm, ShardingStrategy.replicate(len(devices)), devices)

    def __call__(
        self,
        tokens: TensorValue,
        signal_buffers: Sequence[BufferValue],
        kv_collections: Sequence[PagedCacheValues],
        return_n_logits: TensorValue,
        input_row_offsets: TensorValue | Sequence[TensorValue],
    ) -> tuple[TensorValue, ...]:
        """The logits, on the first device.

        Args:
            tokens: Integers ``[total_seq_len]``.
            signal_buffers: One signal buffer per device; see `max.nn.comm.Signals`.
            kv_collections: The cache of each device.
            return_n_logits: For `ReturnLogits.VARIABLE`, the number of last tokens whose logits are returned, at least
                1, int64 ``[1]``.
            input_row_offsets: The first row of each sequence, uint32 ``[batch + 1]``; or one tensor per device.

        Returns:
            The results of `Transformer`.

        Raises:
            ValueError: The number of values differs from the number of devices.
        """
        one = isinstance(input_row_offsets, TensorValue)
        offsets = distribute_value(input_row_offsets, self.devices) if one else list(input_row_offsets)  # fmt: skip
        if len(kv_collections) != len(self.devices):
            raise ValueError(
                f"DistributedTransformer: {len(kv_collections)} caches for {len(self.devices)} "
                "devices"
            )
        signals = list(signal_buffers)
        hs = [ops.cast(h, DType.float32) for h in self.embed_tokens(tokens, signals)]
        freqs = distribute_value(self.rope.freqs_cis, self.devices)
        hs = self._blocks(hs, signals, list(kv_collections), freqs, offsets)
        first = offsets[0]
        if self.return_logits is ReturnLogits.VARIABLE:
            rows, starts = last_rows(first, return_n_logits)
            logits = self._logits(hs, rows, signals)
            return ops.gather(logits, ops.cast(starts[1:], DType.int64) - 1, axis=0), logits, starts
        # the last row of each sequence
        ends = ops.cast(first[1:], DType.int64) - 1
        last = self._logits(hs, ends, signals)
        if self.return_logits is ReturnLogits.ALL:
            return last, self._logits(hs, None, signals), first
        return (last,)

    def _groups(self) -> list[int]:
        """For each block, the index of the first block with the same subgraph."""
        indices = list(range(len(self.layers)))
        if not self.use_subgraphs:
            return indices
        if self.subgraph_layer_groups is None:
            return groups_of_same_form(list(self.layers))
        for group in self.subgraph_layer_groups:
            same = groups_of_same_form([self.layers[i] for i in group])
            for place, index in enumerate(group):
                indices[index] = group[same[place]]
        return indices

    def _blocks(
        self,
        hs: list[TensorValue],
        signals: list[BufferValue],
        caches: list[PagedCacheValues],
        freqs: list[TensorValue],
        input_row_offsets: list[TensorValue],
    ) -> list[TensorValue]:
        first_of = self._groups()
        values = [value for cache in caches for value in cache]
        subgraphs: dict[int, Graph] = {}
        for index, layer in enumerate(self.layers):
            layer_idx = ops.constant(np.array(index, np.uint32), DType.uint32, DeviceRef.CPU())
            first = first_of[index]
            # a subgraph of one call saves no staging
            if first_of.count(first) == 1:
                hs = layer(layer_idx, hs, signals, caches, freqs, input_row_offsets)
                continue
            prefix = weight_prefix(layer, f"layers.{index}.")
            groups: list[list[Any]] = [hs, signals, values, freqs, input_row_offsets]
            if first not in subgraphs:
                subgraphs[first] = layer.build_subgraph(
                    f"distributed_transformer_block_{first}",
                    [
                        TensorType(DType.uint32, [], DeviceRef.CPU()),
                        *([value.type for value in group] for group in groups),
                    ],
                    weight_prefix=prefix,
                )
            flat = [value for group in groups for value in group]
            outputs = ops.call(subgraphs[first], layer_idx, *flat, prefix=prefix)
            hs = [value.tensor for value in outputs]
        return hs

    def _logits(
        self, hs: list[TensorValue], rows: TensorValue | None, signals: list[BufferValue]
    ) -> TensorValue:
        """The logits of the given rows; None: of all."""
        if rows is not None:
            hs = [ops.gather(h, rows.to(h.device), axis=0) for h in hs]
        normed = forward_sharded_layers(self._norms, hs)
        logits = ops.cast(self.lm_head(normed, signals)[0], DType.float32)
        return logits if self.logits_scaling == 1.0 else logits / self.logits_scaling
