"""An encoder as layers, described by its config: ragged texts in, hidden states out.

All texts of a batch are rows of one ``[total, hidden_size]``; row offsets say where each begins. Nothing is
padded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorValue, ops
from max.nn.activation import ACTIVATIONS
from max.nn.kernels.attention import attend_ragged
from max.nn.layer import Layer, LayerList, Module
from max.nn.layers.embedding import Embedding
from max.nn.layers.linear import Linear
from max.nn.layers.norm import LayerNorm, RMSNorm
from max.nn.transformer._same_form import groups_of_same_form
from max.nn.transformer.transformer import weight_prefix
from max.pipelines.encoders.encoder_config import EncoderConfig
from max.pipelines.models.blocks.rope import RopeConfig

__all__ = ["Encoder", "norm_layer"]


def norm_layer(config: EncoderConfig, dtype: DType, size: int | None = None) -> Layer:
    """A norm over the last axis.

    Args:
        config: The shape of the model.
        dtype: The dtype of its weights.
        size: The size of the axis; the hidden size by default.
    """
    size = config.hidden_size if size is None else size
    if config.norm == "rms":
        return RMSNorm(size, dtype, config.norm_eps, config.norm_weight_offset)
    return LayerNorm(size, [DeviceRef.CPU()], dtype, config.norm_eps, config.norm_bias)


class EncoderAttention(Module):
    """``o_proj(softmax(scale * q kᵀ + bias + mask) v)`` of each text.

    Weights: ``q_proj``, ``k_proj``, ``v_proj``, ``o_proj``, and with ``qk_norm`` ``q_norm``, ``k_norm``.

    Args:
        config: The shape of the model.
        index: The layer's index.
        dtype: The dtype of the weights.
        device: Where it runs.
    """

    def __init__(self, config: EncoderConfig, index: int, dtype: DType, device: DeviceRef) -> None:
        self.config, self.dtype, self.window = config, dtype, config.window_of(index)
        width, kv_width = (
            config.num_attention_heads * config.head_dim,
            config.num_key_value_heads * config.head_dim,
        )
        for name, size in (("q_proj", width), ("k_proj", kv_width), ("v_proj", kv_width)):
            bias = config.attention_bias
            setattr(self, name, Linear(config.hidden_size, size, dtype, device, has_bias=bias))
        self.o_proj = Linear(
            width, config.hidden_size, dtype, device, has_bias=config.attention_output_bias
        )
        if config.qk_norm:
            self.q_norm = norm_layer(config, dtype, config.head_dim)
            self.k_norm = norm_layer(config, dtype, config.head_dim)

    q_proj: Linear
    k_proj: Linear
    v_proj: Linear

    def __call__(
        self, x: TensorValue, input_row_offsets: TensorValue, positional: Sequence[TensorValue]
    ) -> TensorValue:
        """The attention output ``[total, hidden_size]``.

        Args:
            x: ``[total, hidden_size]``.
            input_row_offsets: Where each text begins, uint32 ``[batch + 1]``.
            positional: Cosines and sines ``[total, 1, head_dim / 2]``, or the bias of distances, or nothing.
        """
        config = self.config
        q, k, v = (
            ops.reshape(projection(x), [x.shape[0], heads, config.head_dim])
            for projection, heads in (
                (self.q_proj, config.num_attention_heads),
                (self.k_proj, config.num_key_value_heads),
                (self.v_proj, config.num_key_value_heads),
            )
        )
        if config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if config.rope is not None:
            cos, sin = positional
            q, k = _rotated_heads(q, cos, sin), _rotated_heads(k, cos, sin)
        scale = config.attention_scale
        attended = attend_ragged(
            ops.cast(q, self.dtype),
            ops.cast(k, self.dtype),
            ops.cast(v, self.dtype),
            input_row_offsets,
            1 / math.sqrt(config.head_dim) if scale is None else scale,
            mask=self._mask(),
            window=self.window or -1,  # -1: none
            bias=positional[0] if config.relative_buckets else None,
        )
        merged = ops.reshape(attended, [x.shape[0], config.num_attention_heads * config.head_dim])
        return ops.cast(self.o_proj(merged), x.dtype)

    def _mask(self) -> str:
        if self.config.causal:
            return "causal" if self.window is None else "sliding_window"
        return "null" if self.window is None else "symmetric_window"


def _rotated_heads(x: TensorValue, cos: TensorValue, sin: TensorValue) -> TensorValue:
    """Heads ``[total, heads, head_dim]`` whose pairs, half a head apart, are rotated."""
    half = int(x.shape[2]) // 2
    first, second = x[:, :, :half], x[:, :, half:]  # [total, heads, head_dim / 2]
    return ops.concat([first * cos - second * sin, first * sin + second * cos], axis=-1)


class EncoderMLP(Module):
    """``down(activation(up(x)))``, or with a gate ``down(activation(gate(x)) * up(x))``.

    Weights: ``up_proj``, ``down_proj``, and with a gate ``gate_proj``.

    Args:
        config: The shape of the model.
        dtype: The dtype of the weights.
        device: Where it runs.
    """

    def __init__(self, config: EncoderConfig, dtype: DType, device: DeviceRef) -> None:
        size, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.activation = config.activation
        self.gate_proj = None
        if config.gated_mlp:
            self.gate_proj = Linear(size, inner, dtype, device, has_bias=bias)
        self.up_proj = Linear(size, inner, dtype, device, has_bias=bias)
        self.down_proj = Linear(inner, size, dtype, device, has_bias=bias)

    def __call__(self, x: TensorValue) -> TensorValue:
        """The output, of x's shape and dtype.

        Args:
            x: ``[total, hidden_size]``.
        """
        activation = ACTIVATIONS[self.activation]
        if self.gate_proj is None:
            return self.down_proj(activation(self.up_proj(x)))
        return self.down_proj(activation(self.gate_proj(x)) * self.up_proj(x))


class EncoderBlock(Module):
    """Attention and an MLP with residual sums, and norms where the config places them.

    Weights: ``attention``, ``mlp``, ``attention_norm``, ``mlp_norm``; with norms ``around`` besides
    ``attention_output_norm`` and ``mlp_output_norm``.

    Args:
        config: The shape of the model.
        index: The layer's index.
        dtype: The dtype of the weights.
        device: Where it runs.
    """

    def __init__(self, config: EncoderConfig, index: int, dtype: DType, device: DeviceRef) -> None:
        self.placement = config.norm_placement
        self.attention = EncoderAttention(config, index, dtype, device)
        self.mlp = EncoderMLP(config, dtype, device)
        self.attention_norm = None
        if index or config.first_attention_norm:
            self.attention_norm = norm_layer(config, dtype)
        self.mlp_norm = norm_layer(config, dtype)
        if self.placement == "around":
            self.attention_output_norm = norm_layer(config, dtype)
            self.mlp_output_norm = norm_layer(config, dtype)

    def __call__(
        self, x: TensorValue, input_row_offsets: TensorValue, positional: Sequence[TensorValue]
    ) -> TensorValue:
        """The block's output, of x's shape and dtype.

        Args:
            x: ``[total, hidden_size]``.
            input_row_offsets: Where each text begins, uint32 ``[batch + 1]``.
            positional: What the attention takes of positions.
        """

        def normalized_rows(norm: Layer | None, value: TensorValue) -> TensorValue:
            return value if norm is None else norm(value)

        if self.placement == "after":
            h = normalized_rows(
                self.attention_norm, x + self.attention(x, input_row_offsets, positional)
            )
            return self.mlp_norm(h + self.mlp(h))
        attended = self.attention(
            normalized_rows(self.attention_norm, x), input_row_offsets, positional
        )
        if self.placement == "before":
            h = x + attended
            return h + self.mlp(self.mlp_norm(h))
        h = x + self.attention_output_norm(attended)
        return h + self.mlp_output_norm(self.mlp(self.mlp_norm(h)))


class Encoder(Module):
    """Embeddings, blocks, and where the config has it a last norm.

    Weights: ``embeddings.tokens``, ``embeddings.positions``, ``embeddings.token_types``, ``embeddings.norm``,
    ``layers.N.…`` (see `EncoderBlock`), ``relative_attention_bias``, ``norm``; those that the config has.

    Between the blocks the hidden states are float32, whatever the dtype of the weights.

    Args:
        config: The shape of the model.
        dtype: The dtype of the weights.
        device: Where it runs; the CPU by default.
        max_seq_len: The longest text of a batch; the longest that the model supports by default.
    """

    use_subgraphs: bool = True
    """Whether blocks of the same form are staged once."""

    def __init__(
        self,
        config: EncoderConfig,
        dtype: DType,
        device: DeviceRef | None = None,
        max_seq_len: int | None = None,
    ) -> None:
        self.config, self.dtype = config, dtype
        self.device = DeviceRef.CPU() if device is None else device
        self.max_seq_len = max_seq_len or config.max_length
        self.embeddings = EncoderEmbeddings(config, dtype, self.device)
        self.layers = LayerList(
            [EncoderBlock(config, i, dtype, self.device) for i in range(config.num_layers)]
        )
        if config.relative_buckets:
            self.relative_attention_bias = Embedding(
                config.relative_buckets, config.num_attention_heads, dtype, self.device
            )
        self.norm = norm_layer(config, dtype) if config.final_norm else None

    def __call__(
        self,
        tokens: TensorValue,
        positions: TensorValue,
        token_types: TensorValue,
        input_row_offsets: TensorValue,
    ) -> TensorValue:
        """The hidden states of all tokens, float32 ``[total, hidden_size]``.

        Args:
            tokens: int64 ``[total]``.
            positions: The position of each token in its text, from 0, int64 ``[total]``.
            token_types: The type of each token, int64 ``[total]``; unused by models without types.
            input_row_offsets: Where each text begins, and the number of rows, uint32 ``[batch + 1]``.
        """
        h = self.embeddings(tokens, positions, token_types)  # [total, hidden_size]
        positional = self._position_inputs(positions)
        first_of = groups_of_same_form(list(self.layers))
        subgraphs: dict[int, Graph] = {}
        for index, layer in enumerate(self.layers):
            own = positional[self.config.rotates_locally(index)]
            first, prefix = first_of[index], weight_prefix(layer, f"layers.{index}.")
            if first_of.count(first) == 1 or not self.use_subgraphs:
                h = layer(h, input_row_offsets, own)
                continue
            if first not in subgraphs:
                types = [h.type, input_row_offsets.type, [value.type for value in own]]
                subgraphs[first] = layer.build_subgraph(f"encoder_block_{first}", types, prefix)
            h = ops.call(subgraphs[first], h, input_row_offsets, *own, prefix=prefix)[0].tensor
        return h if self.norm is None else self.norm(h)

    def _position_inputs(self, positions: TensorValue) -> dict[bool, list[TensorValue]]:
        """What layers take of positions: those that rotate by ``local_rope``, and the others."""
        config = self.config
        if config.relative_buckets:
            return {False: [self._bias_of_distances()]}
        if config.rope is None:
            return {False: []}
        values = {False: self._rotation(config.rope, positions)}
        if config.local_rope is not None:
            values[True] = self._rotation(config.local_rope, positions)
        return values

    def _rotation(self, rope: RopeConfig, positions: TensorValue) -> list[TensorValue]:
        """Cosines and sines of each token, float32 ``[total, 1, head_dim / 2]``."""
        config = self.config
        table = rope.layer(
            dim=config.hidden_size,
            n_heads=config.num_attention_heads,
            head_dim=config.head_dim,
            max_seq_len=self.max_seq_len,
            interleaved=False,
        ).table()[: self.max_seq_len]  # [positions, head_dim / 2, 2]
        shape = [positions.shape[0], 1, config.head_dim // 2]
        tables = (np.ascontiguousarray(table[..., i]) for i in (0, 1))
        return [
            ops.reshape(
                ops.gather(ops.constant(x, DType.float32, self.device), positions, axis=0), shape
            )
            for x in tables
        ]

    def _bias_of_distances(self) -> TensorValue:
        """The bias of each head and distance, float32 ``[heads, 2 * max_seq_len - 1]``."""
        buckets = relative_buckets(self.max_seq_len, self.config.relative_buckets)
        # [2 * max_seq_len - 1, heads]
        rows = self.relative_attention_bias(ops.constant(buckets, DType.int64, self.device))
        return ops.transpose(ops.cast(rows, DType.float32), 0, 1)


class EncoderEmbeddings(Module):
    """The sum of the rows of tokens, positions and token types, normalized.

    Args:
        config: The shape of the model.
        dtype: The dtype of the weights.
        device: Where it runs.
    """

    def __init__(self, config: EncoderConfig, dtype: DType, device: DeviceRef) -> None:
        self.config = config
        self.tokens = Embedding(config.vocab_size, config.hidden_size, dtype, device)
        if config.position_rows:
            self.positions = Embedding(config.position_rows, config.hidden_size, dtype, device)
        if config.token_types:
            self.token_types = Embedding(config.token_types, config.hidden_size, dtype, device)
        self.norm = norm_layer(config, dtype) if config.embedding_norm else None

    def __call__(
        self, tokens: TensorValue, positions: TensorValue, token_types: TensorValue
    ) -> TensorValue:
        """The embeddings, float32 ``[total, hidden_size]``.

        Args:
            tokens: int64 ``[total]``.
            positions: The position of each token in its text, from 0, int64 ``[total]``.
            token_types: The type of each token, int64 ``[total]``.
        """
        config = self.config
        h = ops.cast(self.tokens(tokens), DType.float32)
        if config.embedding_multiplier != 1.0:
            h = h * config.embedding_multiplier
        if config.position_rows:
            h = h + ops.cast(self.positions(positions + config.first_position), DType.float32)
        if config.token_types:
            h = h + ops.cast(self.token_types(token_types), DType.float32)
        return h if self.norm is None else self.norm(h)


def relative_buckets(
    longest: int, buckets: int, max_distance: int = 128
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The bucket of each distance of a key from its query, ``[2 * longest - 1]``.

    Half of the buckets are for keys after the query. In each half, the first half of the buckets are for
    one distance each, the others for distances that grow logarithmically (https://arxiv.org/abs/1910.10683).

    Args:
        longest: The rows of the longest text.
        buckets: The number of buckets.
        max_distance: Greater distances share a bucket.
    """
    # from the farthest key before a query to the farthest one after it
    distance = np.arange(1 - longest, longest, dtype=np.int64)
    # one half for keys before the query, one for keys after it
    half = buckets // 2
    # near distances have a bucket each, farther ones share theirs
    exact = half // 2
    size = np.abs(distance)
    # in float32, as PyTorch computes it: a bucket's border may lie on an integer
    ratio = np.log(np.maximum(size, 1).astype(np.float32) / np.float32(exact))
    far = exact + (ratio / np.float32(math.log(max_distance / exact)) * (half - exact)).astype(
        np.int64
    )
    return (distance > 0) * half + np.where(size < exact, size, np.minimum(far, half - 1))
