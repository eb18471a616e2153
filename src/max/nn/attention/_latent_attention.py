"""Multi-head latent attention (https://arxiv.org/abs/2405.04434): all heads share one cached latent per token."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from max.dtype import DType
from max.graph import (
    DeviceRef,
    Dim,
    Graph,
    ShardingStrategy,
    TensorType,
    TensorValue,
    ops,
)
from max.nn.attention.mask_config import MHAMaskVariant
from max.nn.kernels.cache import load_rows, store_rows
from max.nn.kernels.latents import (
    Expansion,
    flare_mla_decode_ragged,
    flare_mla_prefill_ragged,
    plan_latents,
)
from max.nn.kernels.ragged import group_of_rows
from max.nn.kernels.rope import rotate_pairs
from max.nn.kv_cache.cache_params import KVCacheParams
from max.nn.kv_cache.cache_values import PagedCacheValues
from max.nn.layer import Module
from max.nn.layers.linear import Linear
from max.nn.layers.norm import RMSNorm
from max.nn.layers.sharding import check_strategy, part_of, shard_devices
from max.nn.rotary_embedding import RotaryEmbedding

__all__ = [
    "ExpansionChange",
    "LatentAttentionWithRope",
    "LatentInputs",
    "rotate_rows",
]

GRAPH_MODES = (None, "prefill", "decode", "auto")


def rotate_rows(x: TensorValue, angles: TensorValue, interleaved: bool) -> TensorValue:
    """Rotates heads by the angles of their rows; computed in float32.

    Args:
        x: ``[rows, heads, size]``.
        angles: Cosines and sines, interleaved, ``[rows, size]``.
        interleaved: Whether the two elements of a rotated pair are adjacent.
    """
    # the axis of size 1 broadcasts over heads
    pairs = ops.reshape(ops.cast(angles, DType.float32), [x.shape[0], 1, int(x.shape[2]) // 2, 2])
    cosine, sine = pairs[:, :, :, 0], pairs[:, :, :, 1]
    # in float32, then rounded once
    rotated = rotate_pairs(ops.cast(x, DType.float32), cosine, sine, interleaved)
    return ops.cast(rotated, x.dtype)


@dataclass(frozen=True)
class LatentInputs:
    """The inputs of attention over cached latents.

    Args:
        layer_idx: The index of the layer in the cache, uint32, rank 0.
        x: The hidden states ``[total_seq_len, hidden_size]``.
        query_latents: The latents of queries ``[total_seq_len, q_lora_rank]``; `x` if queries are projected directly.
        plain: The part of each head's query that is not rotated, ``[total_seq_len, n_heads, qk_nope_head_dim]``.
        rotated: The rotated part of each head's query, ``[total_seq_len, n_heads, qk_rope_head_dim]``.
        angles: Cosines and sines of the tokens' positions, ``[total_seq_len, qk_rope_head_dim]``.
        kv_collection: The cache, with the latents of the new tokens.
        input_row_offsets: The first row of each sequence, uint32 ``[batch + 1]``.
    """

    layer_idx: TensorValue
    x: TensorValue
    query_latents: TensorValue
    plain: TensorValue
    rotated: TensorValue
    angles: TensorValue
    kv_collection: PagedCacheValues
    input_row_offsets: TensorValue


class ExpansionChange(NamedTuple):
    """Changes the products with the weight that expands latents.

    Args:
        expand: Called with the latents of all keys ``[keys, kv_lora_rank]``, their products
            ``[keys, n_heads * (qk_nope_head_dim + v_head_dim)]``, and the first key of each sequence, uint32
            ``[batch + 1]``.
        absorb: Called where keys and values are not expanded, with the number of the product of `head_products`, its
            inputs ``[rows * n_heads, inputs]`` (all heads of a row follow each other) and its outputs. Queries are
            outputs, too, before they are multiplied.
    """

    expand: Callable[[TensorValue, TensorValue, TensorValue], TensorValue]
    absorb: Callable[[int, TensorValue, TensorValue], TensorValue]


class LatentAttentionWithRope(Module):
    """Causal self-attention of a ragged batch over cached latents.

    A token's latent has `kv_lora_rank` normalized elements, from which each head expands its key and value, and a
    rotated part that all heads share. For decoding, queries are projected into the latent space (weight absorption), so
    that the cache is read once for all heads. For prompts, keys and values of all tokens are expanded instead if that
    takes fewer multiplications (`max.nn.kernels.latents.plan_latents`).

    Weights: ``q_proj`` (or ``q_a_proj``, ``q_a_layernorm``, ``q_b_proj``), ``kv_a_proj_with_mqa``, ``kv_a_layernorm``,
    ``kv_b_proj`` and ``o_proj``, each with ``.weight``.

    Args:
        rope: The rotation of `qk_rope_head_dim` elements.
        num_attention_heads: The number of query heads.
        num_key_value_heads: Not used: all heads share a latent.
        hidden_size: The size of the input's last dimension.
        kv_params: The parameters of the cache, with `is_mla`, and heads of ``kv_lora_rank + qk_rope_head_dim``.
        dtype: The dtype of the weights.
        devices: The devices; the layer runs on the first one. The CPU by default.
        linear_cls: The class of the projections.
        scale: The scale of the attention scores; by default that of a head of ``qk_nope_head_dim + qk_rope_head_dim``,
            with the correction of `rope`.
        q_lora_rank: The size of the latent of queries; None: queries are projected directly.
        kv_lora_rank: The size of the latent.
        qk_nope_head_dim: The size of the part of a head that is not rotated.
        qk_rope_head_dim: The size of the rotated part of a head.
        v_head_dim: The size of a value.
        buffer_size: The buffer size of kernels that expand keys; not used.
        graph_mode: Whether keys and values are expanded: always (prefill), never (decode), or if it is cheaper (auto,
            None). In each mode one graph serves both prompts and decoding.
        rms_norm_eps: The epsilon of the norms.

    Raises:
        ValueError: The sizes do not fit the cache or the rotation, or the mode is unknown.
    """

    __module__ = "max.nn.attention.multi_latent_attention"

    rope: RotaryEmbedding
    """The rotation."""

    _expansion_change: ExpansionChange | None = None

    def __init__(
        self,
        *,
        rope: RotaryEmbedding,
        num_attention_heads: int,
        num_key_value_heads: int,
        hidden_size: int,
        kv_params: KVCacheParams,
        dtype: DType,
        devices: Sequence[DeviceRef] | None = None,
        linear_cls: Callable[..., Linear] = Linear,
        scale: float | None = None,
        q_lora_rank: int | None = None,
        kv_lora_rank: int = 512,
        qk_nope_head_dim: int = 128,
        qk_rope_head_dim: int = 64,
        v_head_dim: int = 128,
        buffer_size: int = 16384,
        graph_mode: str | None = None,
        rms_norm_eps: float = 1e-6,
    ) -> None:
        name = type(self).__name__
        if graph_mode not in GRAPH_MODES:
            raise ValueError(
                f"{name}: graph_mode is {graph_mode!r}, expected prefill, decode or auto"
            )
        if (
            kv_params.head_dim != kv_lora_rank + qk_rope_head_dim
            or kv_params.n_kv_heads_per_device != 1
        ):
            raise ValueError(
                f"{name}: the cache has {kv_params.n_kv_heads_per_device} heads of {kv_params.head_dim}, expected one "
                f"of {kv_lora_rank} + {qk_rope_head_dim}"
            )
        if rope.head_dim != qk_rope_head_dim:
            raise ValueError(
                f"{name}: the rotation is of {rope.head_dim} elements, expected {qk_rope_head_dim}"
            )
        # not registered as a part: the table belongs to the model, not to each layer
        vars(self)["rope"] = rope
        self.n_heads, self.hidden_size, self.kv_params = num_attention_heads, hidden_size, kv_params
        self.devices = list(devices) if devices else [DeviceRef.CPU()]
        self.kv_lora_rank, self.qk_nope_head_dim = kv_lora_rank, qk_nope_head_dim
        self.qk_rope_head_dim, self.v_head_dim = qk_rope_head_dim, v_head_dim
        self.q_lora_rank, self.buffer_size, self.graph_mode = q_lora_rank, buffer_size, graph_mode
        self.dtype = dtype
        size = qk_nope_head_dim + qk_rope_head_dim
        self.scale = rope.compute_scale(math.sqrt(1.0 / size) if scale is None else scale)
        self._sharding: ShardingStrategy | None = None
        device = self.devices[0]

        def linear(in_dim: int, out_dim: int) -> Linear:
            return linear_cls(in_dim=in_dim, out_dim=out_dim, dtype=dtype, device=device)

        heads = num_attention_heads
        if q_lora_rank is None:
            self.q_proj = linear(hidden_size, heads * size)
        else:
            self.q_a_proj = linear(hidden_size, q_lora_rank)
            self.q_a_layernorm = RMSNorm(q_lora_rank, dtype, rms_norm_eps)
            self.q_b_proj = linear(q_lora_rank, heads * size)
        self.kv_a_proj_with_mqa = linear(hidden_size, kv_lora_rank + qk_rope_head_dim)
        self.kv_a_layernorm = RMSNorm(kv_lora_rank, dtype, rms_norm_eps)
        self.kv_b_proj = linear(kv_lora_rank, heads * (qk_nope_head_dim + v_head_dim))
        self.o_proj = linear(heads * v_head_dim, hidden_size)

    @property
    def w_uk_uv(self) -> list[TensorValue]:
        """The weights that expand latents to keys and to values.

        Their shapes are ``[n_heads, qk_nope_head_dim, kv_lora_rank]`` and ``[n_heads, v_head_dim, kv_lora_rank]``.
        """
        both = ops.reshape(
            TensorValue(self.kv_b_proj.weight),
            [self.n_heads, self.qk_nope_head_dim + self.v_head_dim, self.kv_lora_rank],
        )
        return [both[:, : self.qk_nope_head_dim], both[:, self.qk_nope_head_dim :]]

    @property
    def head_products(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of the products of a head where keys and values are not expanded.

        A factor of a row of the weight of the keys multiplies an element of the queries, which so have a place here.
        """
        return {
            "queries": (self.qk_nope_head_dim, self.qk_nope_head_dim),
            "keys": (self.qk_nope_head_dim, self.kv_lora_rank),
            "values": (self.kv_lora_rank, self.v_head_dim),
        }

    def change_expansion(self, change: ExpansionChange) -> None:
        """Replaces the products with the weight of `kv_b_proj`, such as by their sum with the terms of an adapter.

        Args:
            change: Changes them where keys and values are expanded, and where they are not.
        """
        self._expansion_change = change

    @property
    def sharding_strategy(self) -> ShardingStrategy | None:
        """How `shard` splits the layer; None: not split.

        ``tensor_parallel`` gives each device a part of the heads and the whole cache; the results must be summed.
        ``replicate`` gives each device the whole layer.

        Raises:
            ValueError: It is set to another strategy, or the heads cannot be divided evenly.
        """
        return self._sharding

    @sharding_strategy.setter
    def sharding_strategy(self, strategy: ShardingStrategy | None) -> None:
        name = type(self).__name__
        check_strategy(name, strategy, "tensor_parallel", "replicate")
        rows = columns = replicated = None
        if strategy is not None:
            count = strategy.num_devices
            rows = columns = replicated = ShardingStrategy.replicate(count)
            if not strategy.is_replicate:
                if self.n_heads % count:
                    raise ValueError(
                        f"{name}: {self.n_heads} heads cannot be divided evenly over {count} devices"
                    )
                rows = ShardingStrategy.rowwise(count)
                columns = ShardingStrategy.head_aware_columnwise(
                    count, self.n_heads, self.v_head_dim
                )
        for part, of_part in self._parts_of(rows, columns, replicated):
            getattr(self, part).sharding_strategy = of_part
        self._sharding = strategy

    def _parts_of(
        self, rows: Any, columns: Any, strategy: Any
    ) -> list[tuple[str, ShardingStrategy | None]]:
        """The strategy of each sublayer."""
        queries = (
            [("q_proj", rows)]
            if self.q_lora_rank is None
            else [("q_a_proj", strategy), ("q_a_layernorm", strategy), ("q_b_proj", rows)]
        )
        latents = [("kv_a_proj_with_mqa", strategy), ("kv_a_layernorm", strategy)]
        return [*queries, *latents, ("kv_b_proj", rows), ("o_proj", columns)]

    def shard(self, devices: Iterable[DeviceRef]) -> list[LatentAttentionWithRope]:
        """The shards of the layer, one per device; their weights are views of this layer's.

        Args:
            devices: The devices of the shards.

        Raises:
            ValueError: There is no sharding strategy, or its number of devices differs.
        """
        strategy = self.sharding_strategy
        where = shard_devices(type(self).__name__, strategy, devices)
        assert strategy is not None
        names = [name for name, _ in self._parts_of(None, None, None)]
        parts = {name: getattr(self, name).shard(where) for name in names}
        heads = self.n_heads if strategy.is_replicate else self.n_heads // len(where)
        return [
            part_of(
                self,
                LatentAttentionWithRope,
                devices=[device],
                n_heads=heads,
                **{name: shards[i] for name, shards in parts.items()},
            )
            for i, device in enumerate(where)
        ]

    def __call__(
        self,
        layer_idx: TensorValue,
        x: TensorValue,
        kv_collection: PagedCacheValues,
        freqs_cis: TensorValue,
        input_row_offsets: TensorValue,
    ) -> TensorValue:
        """The attention output.

        Args:
            layer_idx: The index of the layer in the cache, uint32, rank 0.
            x: ``[total_seq_len, hidden_size]``.
            kv_collection: The cache; latents of the new tokens are written to it.
            freqs_cis: The rope's table ``[positions, qk_rope_head_dim]``.
            input_row_offsets: The first row of each sequence, uint32 ``[batch + 1]``.

        Returns:
            ``[total_seq_len, hidden_size]``, of x's dtype.

        Raises:
            ValueError: A shape does not fit.
        """
        rows, plain = x.shape[0], self.qk_nope_head_dim
        angles = ops.gather(
            freqs_cis, self._positions(rows, kv_collection, input_row_offsets), axis=0
        )
        # [rows, kv_lora_rank + qk_rope_head_dim]: one part is normalized, the other rotated
        latents = self.kv_a_proj_with_mqa(x)
        normalized = self.kv_a_layernorm(latents[:, : self.kv_lora_rank])
        shared = ops.reshape(latents[:, self.kv_lora_rank :], [rows, 1, self.qk_rope_head_dim])
        shared = rotate_rows(shared, angles, self.rope.interleaved)
        shared = ops.reshape(shared, [rows, self.qk_rope_head_dim])
        # one entry serves all heads: the cache holds rank + RoPE numbers a token instead of keys and values
        entry = ops.concat([normalized, ops.cast(shared, normalized.dtype)], axis=1)
        store_rows(self.kv_params, entry, input_row_offsets, kv_collection, layer_idx)

        # after the store: the new tokens attend to themselves through the cache
        query_latents, q = self._queries(x)
        q = ops.reshape(q, [rows, self.n_heads, plain + self.qk_rope_head_dim])
        rotated = rotate_rows(q[:, :, plain:], angles, self.rope.interleaved)
        values = self.attend(
            LatentInputs(
                layer_idx, x, query_latents, q[:, :, :plain], rotated, angles, kv_collection, input_row_offsets
            )
        )  # fmt: skip
        out = ops.reshape(values, [rows, self.n_heads * self.v_head_dim])
        return ops.cast(self.o_proj(out), x.dtype)

    def attend(self, inputs: LatentInputs) -> TensorValue:
        """The values of each head, ``[total_seq_len, n_heads, v_head_dim]``, of the queries' dtype.

        Args:
            inputs: The queries and the cache, with the latents of the new tokens.
        """
        expansion = Expansion(self.kv_lora_rank, self.qk_nope_head_dim, self.v_head_dim)
        if self.graph_mode == "prefill":
            return self.attend_expanded(inputs)
        # few queries: expanding all cached tokens would cost more than it saves
        if self.graph_mode == "decode" or expansion.products_saved <= 0:
            return self._over_latents(inputs)
        # a mixed batch decides when it runs, by its numbers of new and cached tokens
        expands, _ = plan_latents(
            inputs.input_row_offsets, inputs.kv_collection, expansion=expansion
        )
        return ops.cond(
            expands,
            [self.values_type(inputs)],
            lambda: self.attend_expanded(inputs),
            lambda: self._over_latents(inputs),
        )[0]

    def values_type(self, inputs: LatentInputs) -> TensorType:
        """The type of the values of each head.

        Args:
            inputs: The queries.
        """
        q = inputs.plain
        return TensorType(q.dtype, [q.shape[0], self.n_heads, self.v_head_dim], q.device)

    def attend_expanded(self, inputs: LatentInputs) -> TensorValue:
        """The values of each head, computed with keys and values of all cached tokens expanded from latents.

        Args:
            inputs: The queries and the cache, with the latents of the new tokens.
        """
        kv, offsets, layer_idx = inputs.kv_collection, inputs.input_row_offsets, inputs.layer_idx
        device, q = offsets.device, ops.concat([inputs.plain, inputs.rotated], axis=2)
        batch, bounds = kv.cache_lengths.shape[0], ops.cast(offsets, DType.int64)
        lengths = ops.cast(kv.cache_lengths, DType.int64) + ops.rebind(
            bounds[1:] - bounds[:-1], [batch]
        )
        zero = ops.constant(np.zeros(1, np.int64), DType.int64, device)
        # [batch + 1]: the rows of each sequence, cached and new, in the expanded buffer
        ends = ops.concat([zero, ops.cumsum(lengths, axis=0)])
        ends = ops.rebind(ends, [offsets.shape[0]])
        # the range binds the number of cached and new tokens, known only at run time, to a symbol
        symbol, count = Graph.current.new_symbol("latent_rows"), ops.reshape(ends[-1], [])
        numbers = ops.range(0, count, 1, out_dim=symbol, dtype=DType.int64, device=device)
        total = numbers.shape[0]
        key_offsets = ops.cast(ends, DType.uint32)
        starts = ops.cast(ops.broadcast_to(zero, [batch]), DType.uint32)
        rows = load_rows(
            self.kv_params,
            key_offsets,
            starts,
            kv,
            layer_idx,
            total,
            count=ops.sum(numbers * 0 + 1),
        )
        weight = TensorValue(self.kv_b_proj.weight)
        # one product expands keys (without position) and values of all heads
        latents = ops.cast(rows[:, : self.kv_lora_rank], weight.dtype)
        expanded = latents @ ops.transpose(weight, 0, 1)
        if (change := self._expansion_change) is not None:
            expanded = change.expand(latents, expanded, key_offsets)
        both = ops.reshape(
            ops.cast(expanded, q.dtype),
            [total, self.n_heads, self.qk_nope_head_dim + self.v_head_dim],
        )
        return flare_mla_prefill_ragged(
            self.kv_params,
            q,
            both[:, :, : self.qk_nope_head_dim],
            both[:, :, self.qk_nope_head_dim :],
            offsets,
            key_offsets,
            starts,
            kv,
            layer_idx,
            MHAMaskVariant.CAUSAL_MASK,
            self.scale,
            self.qk_rope_head_dim,
        )[0]

    def _over_latents(self, inputs: LatentInputs) -> TensorValue:
        """The values of each head, by attention over the latents of all preceding tokens."""
        return self.attend_absorbed(
            inputs,
            lambda queries: flare_mla_decode_ragged(
                self.kv_params,
                queries,
                inputs.input_row_offsets,
                inputs.kv_collection,
                inputs.layer_idx,
                MHAMaskVariant.CAUSAL_MASK,
                self.scale,
                self.qk_rope_head_dim,
            ),
        )

    def attend_absorbed(
        self, inputs: LatentInputs, attend: Callable[[TensorValue], TensorValue]
    ) -> TensorValue:
        """The values of each head, with queries projected into the latent space; keys and values are not expanded.

        Args:
            inputs: The queries.
            attend: Maps queries ``[total_seq_len, n_heads, kv_lora_rank + qk_rope_head_dim]`` to weighted sums of
                latents ``[total_seq_len, n_heads, kv_lora_rank]``.
        """
        # (q W) k = q (W k): the weight of the keys multiplies the few queries instead of all keys
        w_uk, w_uv = (ops.cast(w, inputs.plain.dtype) for w in self.w_uk_uv)
        # factors of rows of the weight come before the product, what is added to the weight after it
        scaled = self._of_heads(0, inputs.plain, inputs.plain)
        # [n_heads, rows, plain] @ [n_heads, plain, rank]
        plain = ops.permute(ops.matmul(ops.permute(scaled, [1, 0, 2]), w_uk), [1, 0, 2])
        plain = self._of_heads(1, inputs.plain, plain)
        attended = attend(ops.concat([plain, inputs.rotated], axis=2))
        # likewise for the values: sums of latents are expanded instead of each latent
        # [n_heads, rows, rank] @ [n_heads, rank, value]
        values = ops.matmul(ops.permute(attended, [1, 0, 2]), ops.transpose(w_uv, 1, 2))
        return self._of_heads(2, attended, ops.permute(values, [1, 0, 2]))

    def _of_heads(self, number: int, x: TensorValue, y: TensorValue) -> TensorValue:
        """The products y ``[rows, n_heads, …]`` of x as `change_expansion` says."""
        if (change := self._expansion_change) is None:
            return y
        rows = x.shape[0] * self.n_heads
        flat_x, flat_y = (ops.reshape(v, [rows, v.shape[2]]) for v in (x, y))
        return ops.reshape(change.absorb(number, flat_x, flat_y), y.shape)

    def _queries(self, x: TensorValue) -> tuple[TensorValue, TensorValue]:
        """The latents of queries (`x` if queries have none), and the queries."""
        if self.q_lora_rank is None:
            return x, self.q_proj(x)
        latents = self.q_a_layernorm(self.q_a_proj(x))
        return latents, self.q_b_proj(latents)

    @staticmethod
    def _positions(rows: Dim, kv: PagedCacheValues, input_row_offsets: TensorValue) -> TensorValue:
        """The position of each new token, int64 ``[total_seq_len]``."""
        bounds = ops.cast(input_row_offsets, DType.int64)
        batch = kv.cache_lengths.shape[0]
        # position = row + (cached tokens - first row); the shift of each sequence, [batch]
        shifts = ops.cast(kv.cache_lengths, DType.int64) - ops.rebind(bounds[:-1], [batch])
        numbers = ops.range(
            0,
            TensorValue(rows),
            1,
            out_dim=rows,
            dtype=DType.int64,
            device=input_row_offsets.device,
        )
        return numbers + ops.gather(shifts, group_of_rows(rows, input_row_offsets), axis=0)
