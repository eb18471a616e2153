"""The attention of decoders, over the paged KV cache."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from max._dataclass import dataclass
from max.dtype import DType
from max.graph import TensorValue, Weight, ops
from max.nn.attention.cached_attention import CachedAttention
from max.nn.attention.mask_config import MHAMaskVariant
from max.nn.clamp import clamp
from max.nn.kernels.rope import rotate_pairs
from max.nn.kv_cache.cache_values import PagedCacheValues
from max.nn.layer import Module
from max.nn.rotary_embedding import RotaryEmbedding
from max.pipelines.models.blocks.mixer import AttentionMixer, CachedKeys, Site
from max.pipelines.models.blocks.norms import HeadNorm, QKNorm, norm_layer, unit_rms
from max.pipelines.models.blocks.rope import RopeConfig

__all__ = ["AttentionForm", "DecoderAttention", "QueryGrowth", "alibi_slopes"]


@dataclass(frozen=True)
class QueryGrowth:
    """Scales the queries at position p by ``1 + beta * log(1 + floor((p + first) / length))``.

    Args:
        beta: The weight of the logarithm.
        length: The number of consecutive positions with the same factor.
        first: Added to positions.
    """

    beta: float
    length: int
    first: int = 0


@dataclass(frozen=True)
class AttentionForm(AttentionMixer):
    """The form of causal self-attention.

    Args:
        num_attention_heads: The number of query heads.
        num_key_value_heads: The number of KV heads.
        head_dim: The size of a head.
        rope: The rotary embedding; None: heads are not rotated.
        interleaved: Whether the two elements of a rotated pair are adjacent; in most Hugging Face checkpoints they are
            half a head apart.
        bias: Whether the projections to queries, keys and values have biases.
        output_bias: Whether the output projection has a bias.
        qk_norm: The norm of queries and keys; None: they are not normalized.
        gated: Whether attended values are multiplied by the sigmoid of gates. The query projection computes the gate
            of a head directly after its query.
        value_norm: Whether the values of each head are normalized, without a weight.
        keys_as_values: Whether projected keys are also the values.
        shared_with: The earlier block whose keys and values the layer reads; None: it has its own.
        clip: Queries and keys, after their norms, and values are clamped to ``[-clip, clip]``.
        scale: The factor of the scores; None: ``1 / sqrt(head_dim)``.
        soft_cap: If set, ``cap * tanh(score / cap)`` replaces the scores.
        sinks: Whether each head has an attention sink: a learned score without a value.
        alibi_slopes: The decrease of a key's score per token of distance, for each head; None: ALiBi is not used.
        query_growth: The position-dependent factor of queries; None: no factor.
        window: The number of tokens that a token sees, including itself; None: all earlier tokens.
        chunked: Whether the window is a chunk: a token sees itself and the earlier tokens of its chunk.
    """

    weights = "self_attn"

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope: RopeConfig | None = None
    interleaved: bool = False
    bias: bool = False
    output_bias: bool = False
    qk_norm: QKNorm | None = None
    gated: bool = False
    value_norm: bool = False
    keys_as_values: bool = False
    shared_with: int | None = None
    clip: float | None = None
    scale: float | None = None
    soft_cap: float | None = None
    sinks: bool = False
    alibi_slopes: tuple[float, ...] | None = None
    query_growth: QueryGrowth | None = None
    window: int | None = None
    chunked: bool = False

    @property
    def score_factor(self) -> float:
        """The factor of the scores."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def keys(self) -> CachedKeys | None:
        """See `Mixer.keys`."""
        if self.shared_with is not None:
            return None
        return CachedKeys(self.num_key_value_heads, self.head_dim, self.window)

    @property
    def source(self) -> int | None:
        """See `Mixer.source`."""
        return self.shared_with

    def layer(self, site: Site) -> Module:
        """A `DecoderAttention`; see `Mixer.layer`."""
        return DecoderAttention(self, site)

    def in_gguf(self) -> AttentionForm:
        """The form of the weights in GGUF files, whose norms have their offsets added; see `Mixer.in_gguf`."""
        if (norm := self.qk_norm) is None:
            return self
        return replace(self, qk_norm=replace(norm, form=replace(norm.form, offset=0.0)))

    def part(self, count: int, index: int) -> AttentionForm:
        """The heads of one device; see `Mixer.part`."""
        heads, slopes = max(self.num_attention_heads // count, 1), self.alibi_slopes
        return replace(
            self,
            num_attention_heads=heads,
            # devices share a KV head if there are fewer heads than devices
            num_key_value_heads=max(self.num_key_value_heads // count, 1),
            alibi_slopes=None if slopes is None else slopes[index * heads : (index + 1) * heads],
        )

    def split_problem(self, count: int) -> str | None:
        """See `Mixer.split_problem`."""
        if self.num_attention_heads % count:
            return f"{self.num_attention_heads} heads"
        # fewer KV heads than devices fit if each head is for equally many devices
        uneven = self.num_key_value_heads % count and count % self.num_key_value_heads
        return f"{self.num_key_value_heads} KV heads" if uneven else None

    @property
    def _needs_rows(self) -> bool:
        """Whether the layer takes the rows of its tokens instead of the table of all positions."""
        after = self.qk_norm is not None and self.qk_norm.after_rotation
        return after or self.shared_with is not None

    @property
    def reads_positions(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """See `Mixer.reads_positions`."""
        return self._needs_rows or self.query_growth is not None

    @property
    def follows_trees(self) -> bool:
        """See `Mixer.follows_trees`: where only the kernels count positions, and each key counts alike."""
        return self.window is None and self.alibi_slopes is None and not self.reads_positions

    @property
    def positional_key(self) -> object:
        """See `Mixer.positional_key`."""
        sizes = self.head_dim, self.interleaved, self._needs_rows
        return None if self.rope is None else (self.rope, sizes), self.query_growth

    def position_inputs(self, site: Site, positions: TensorValue | None) -> list[TensorValue]:
        """See `Mixer.position_inputs`; in the order of `DecoderAttention.__call__`."""
        values, growth = list[TensorValue](), self.query_growth
        if self.rope is not None:
            table = self.rotary_embedding(site).freqs_cis.to(site.device)
            if self._needs_rows and positions is not None:
                # [tokens, rotated elements]: the rows of the tokens
                table = ops.gather(table, positions, axis=0)
            values.append(table)
        # [max_seq_len]: a row per position, so that the graph takes no logarithms
        if growth is not None and positions is not None:
            steps = (np.arange(site.max_seq_len, dtype=np.float64) + growth.first) // growth.length
            factors = (1 + growth.beta * np.log1p(steps)).astype(np.float32)
            table = ops.constant(factors, DType.float32, site.device)
            rows = ops.gather(table, positions, axis=0)
            # [tokens, 1, 1]: one factor for all heads of a token
            values.append(ops.reshape(rows, [positions.shape[0], 1, 1]))
        return values

    def rotary_embedding(self, site: Site) -> RotaryEmbedding:
        """The layer of the rotation.

        Args:
            site: What it needs from its model.
        """
        return (self.rope or RopeConfig()).layer(
            dim=site.hidden_size,
            n_heads=self.num_attention_heads,
            head_dim=self.head_dim,
            max_seq_len=site.max_seq_len,
            interleaved=self.interleaved,
        )


class DecoderAttention(CachedAttention):
    """Causal self-attention of a ragged batch.

    Weights: ``q_proj``, ``k_proj``, ``v_proj``, ``o_proj`` (`Linear`); with QK norm ``q_norm`` and ``k_norm``; with
    sinks ``sinks``, float32 ``[heads]``. A layer that reads the keys and values of another layer has no weights for
    keys and values; a layer whose values are its keys has no ``v_proj``.

    Args:
        form: The form.
        site: What the layer needs from its model.
    """

    def __init__(self, form: AttentionForm, site: Site) -> None:
        super().__init__(
            num_attention_heads=form.num_attention_heads,
            num_key_value_heads=form.num_key_value_heads,
            hidden_size=site.hidden_size,
            kv_params=site.kv_params,
            devices=[site.device],
            dtype=site.dtype,
            linear_cls=site.linear_cls,
            stacked_qkv=False,
            has_bias=form.bias,
            clip_qkv=None,
        )
        if form.output_bias:
            self.o_proj = site.linear_cls(
                self.q_width, site.hidden_size, site.dtype, site.device, has_bias=True
            )
        self.gated = form.gated
        if form.gated:
            # each head's queries and then its gates, as `project` splits them
            self.q_proj = site.linear_cls(
                site.hidden_size, 2 * self.q_width, site.dtype, site.device, has_bias=form.bias
            )
        self.scale, self.clip = form.score_factor, form.clip
        self.rotated, self.interleaved = form.rope is not None, form.interleaved
        # a window that no sequence exceeds hides nothing
        hides = form.window is not None and form.window < site.max_seq_len
        self.window, self.chunked = form.window if hides else None, form.chunked
        self.soft_cap, self.slopes = form.soft_cap, form.alibi_slopes
        self.sinks = (
            Weight("sinks", DType.float32, [form.num_attention_heads], site.device)
            if form.sinks
            else None
        )
        self.qk_norm = form.qk_norm
        self.value_eps = site.norm_eps if form.value_norm else None
        self.shares_kv = form.shared_with is not None
        self.q_norm: Module | None = None
        self.k_norm: Module | None = None
        if form.qk_norm is not None:
            self.q_norm = self._head_norm(form.qk_norm, form.num_attention_heads, site)
            self.k_norm = self._head_norm(form.qk_norm, form.num_key_value_heads, site)
        self.keys_as_values = form.keys_as_values
        if self.keys_as_values and not self.shares_kv:
            # checkpoints of such layers have no weights of values
            del self.v_proj
        if self.shares_kv:
            del self.k_proj, self.v_proj, self.k_norm

    def _head_norm(self, spec: QKNorm, heads: int, site: Site) -> Module:
        """The norm of queries or keys, over each head or over all of them."""
        dim = self.kv_params.head_dim
        if spec.over == "each_head":
            return HeadNorm(heads, dim, site.dtype, site.norm_eps, spec.form, site.device)
        size = dim * (heads if spec.over == "all" else 1)
        return norm_layer(spec.form, size, site.dtype, site.norm_eps, site.device)

    def __call__(
        self,
        layer_idx: TensorValue,
        x: TensorValue,
        kv_collection: PagedCacheValues,
        position_inputs: list[TensorValue],
        input_row_offsets: TensorValue,
    ) -> TensorValue:
        """The attention output.

        Args:
            layer_idx: The index of the layer in the cache, uint32, rank 0.
            x: ``[total_seq_len, hidden_size]``.
            kv_collection: The cache; keys and values of the new tokens are written to it.
            position_inputs: If the layer is rotated, the table of cosines and sines ``[positions, rotated_dim]``, or
                the rows of the batch's tokens if heads are normalized after the rotation or keys are shared. Then, if
                scores depend on the position, the factor of each token's queries ``[total_seq_len, 1, 1]``.
            input_row_offsets: The first row of each sequence, uint32 ``[batch + 1]``.

        Returns:
            ``[total_seq_len, hidden_size]``, of x's dtype.
        """
        projected = self.project(x)
        return self.attend(
            layer_idx, x, kv_collection, position_inputs, input_row_offsets, *projected
        )

    def project(self, x: TensorValue) -> tuple[TensorValue, TensorValue | None, TensorValue | None]:
        """The queries, the gates of attended values if the layer has gates, and the keys unless the layer reads those
        of another layer.

        Args:
            x: ``[total_seq_len, hidden_size]``.

        Returns:
            Queries and keys ``[total_seq_len, heads * head_dim]``; with gates, queries and gates are ``[total_seq_len,
            heads, head_dim]``.
        """
        queries, gates = self.q_proj(x), None
        if self.gated:
            # [tokens, heads, 2 * head_dim]
            both = ops.reshape(queries, [x.shape[0], self.n_heads, 2 * self.kv_params.head_dim])
            queries, gates = ops.split(both, [self.kv_params.head_dim] * 2, axis=2)
        return queries, gates, None if self.shares_kv else self.k_proj(x)

    def attend(
        self,
        layer_idx: TensorValue,
        x: TensorValue,
        kv_collection: PagedCacheValues,
        position_inputs: list[TensorValue],
        input_row_offsets: TensorValue,
        queries: TensorValue,
        gates: TensorValue | None,
        keys: TensorValue | None,
    ) -> TensorValue:
        """The attention output, of projected queries and keys; see `__call__`.

        Args:
            layer_idx: The index of the layer in the cache.
            x: The layer's input.
            kv_collection: The cache.
            position_inputs: The position-dependent inputs.
            input_row_offsets: The first row of each sequence.
            queries: As `project` returns them; likewise `gates` and `keys`.
            gates: The gates.
            keys: The keys.
        """
        remaining = list(position_inputs)
        table = remaining.pop(0) if self.rotated else None
        if keys is None:
            queries = self._normalized_heads(queries, self.q_norm)
            if table is not None:
                queries = self._rotate(queries, table)
            values = None
        else:
            queries, keys, values, table = self._rows_to_store(queries, keys, x, table)
        return self.attend_tokens(
            layer_idx,
            x,
            kv_collection,
            input_row_offsets,
            queries,
            keys,
            values,
            freqs_cis=table,
            interleaved=self.interleaved,
            query_factor=remaining.pop(0) if remaining else None,
            gates=gates,
            **self._mask(),
        )

    def _rows_to_store(
        self, q: TensorValue, k: TensorValue, x: TensorValue, table: TensorValue | None
    ) -> tuple[TensorValue, TensorValue, TensorValue, TensorValue | None]:
        """Queries, keys and values as they are stored, and the table that rotates them then; None: they are rotated.

        Args:
            q: The projected queries; likewise `k` the keys.
            k: The keys.
            x: The layer's input.
            table: The table of cosines and sines, or the rows of the batch's tokens; None: nothing is rotated.
        """
        # a separate product per projection, so that each reads its weights in place
        v = k if self.keys_as_values else self.v_proj(x)
        if table is not None and self.qk_norm is not None and self.qk_norm.after_rotation:
            rows, table = table, None
            # rotated here, before the norms: the op gets no table, so that it does not rotate again
            q, k = (self._rotate(self.per_head(y), rows) for y in (q, k))
        queries = self._normalized_heads(q, self.q_norm)
        keys = self._normalized_heads(k, self.k_norm)
        if self.value_eps is not None:
            v = ops.reshape(unit_rms(self.per_head(v), self.value_eps), v.shape)
        if self.clip is not None:
            queries, keys, v = (clamp(y, min=-self.clip, max=self.clip) for y in (queries, keys, v))
        return queries, keys, v, table

    def _mask(self) -> dict[str, Any]:
        """The arguments of the attention op that define the mask and the scores."""
        masks = MHAMaskVariant
        options: dict[str, Any] = {"mask_variant": masks.CAUSAL_MASK, "scale": self.scale}
        if self.window is not None:
            options["mask_variant"] = (
                masks.CHUNKED_CAUSAL_MASK if self.chunked else masks.SLIDING_WINDOW_CAUSAL_MASK
            )
            options["local_window_size"] = self.window
        if self.slopes is not None:
            options["mask_variant"] = masks.CAUSAL_ALIBI_MASK
            slopes = np.array(self.slopes, np.float32)
            options["alibi_slopes"] = ops.constant(slopes, DType.float32, self.devices[0])
        if self.soft_cap is not None:
            options["softcap"] = self.soft_cap
        if self.sinks is not None:
            options["sink_weights"] = self.sinks
        return options

    def _normalized_heads(self, y: TensorValue, norm: Module | None) -> TensorValue:
        """Normalizes heads ``[total_seq_len, heads, head_dim]``; returns `y` if there is no norm."""
        if norm is None:
            return self.per_head(y)
        over_all = self.qk_norm is not None and self.qk_norm.over == "all"
        return self.per_head(norm(y)) if over_all else norm(self.per_head(y))

    def _rotate(self, y: TensorValue, rows: TensorValue) -> TensorValue:
        """Rotates heads by their tokens' rows of cosines and sines; elements past the rotated ones stay unchanged."""
        total, _, dim = y.shape
        half = int(rows.shape[1]) // 2
        # [tokens, 1, half, 2]: one rotation for all heads of a token
        pairs = ops.reshape(rows, [total, 1, half, 2])
        cos, sin = pairs[..., 0], pairs[..., 1]
        # only the first elements of a head rotate
        part = y if int(dim) == 2 * half else y[..., : 2 * half]
        result = rotate_pairs(part, cos, sin, self.interleaved)
        return result if int(dim) == 2 * half else ops.concat([result, y[..., 2 * half :]], axis=-1)


def alibi_slopes(
    heads: int, largest: float = 8.0, *, interleaved: bool = False, factor: float = 1.0
) -> tuple[float, ...]:
    """The slopes of ALiBi (arxiv.org/abs/2108.12409): ``factor * 2 ** (-largest * (i + 1) / heads)`` for head i.

    This formula holds if the number of heads is a power of 2; see `interleaved` for other numbers.

    Args:
        heads: The number of heads.
        largest: The negated base-2 logarithm of the smallest slope, before `factor`.
        interleaved: How slopes are chosen if the number of heads is not a power of 2. True (MPT): from the series
            of the next power of 2, every second slope first. False (BLOOM, Falcon): the series of the previous power
            of 2, then every second slope of the series of twice as many heads.
        factor: The factor of all slopes; Falcon uses the factor of its scores.
    """
    if interleaved:
        count = 2 ** math.ceil(math.log2(heads))
        series = [2.0 ** (-largest * (i + 1) / count) for i in range(count)]
        picked = series if count == heads else [*series[1::2], *series[::2]][:heads]
        return tuple(slope * factor for slope in picked)
    count = 2 ** math.floor(math.log2(heads))
    series = [2.0 ** (-largest * (i + 1) / count) for i in range(count)]
    # heads that are no power of two: the others get slopes from between those of the series
    more = [2.0 ** (-largest * (i + 1) / (2 * count)) for i in range(0, 2 * count, 2)]
    return tuple(slope * factor for slope in [*series, *more][:heads])
