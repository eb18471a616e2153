"""The shape of a decoder-only model: one field for each property in which families differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Self

from max.dtype import DType
from max.graph.quantization import QuantizationConfig
from max.nn.kv_cache import CacheGroup, KVCacheParams, RecurrentState
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.core.exceptions import ConfigError
from max.pipelines.models.alternating import Alternating
from max.pipelines.models.config_fields import base_fields
from max.pipelines.models.experts import Experts
from max.pipelines.models.latent_attention import LatentForm
from max.pipelines.models.norms import NormForm, QKNorm
from max.pipelines.models.per_layer import PerLayerInputs
from max.pipelines.models.recurrent_form import LayerKind, RecurrentForm
from max.pipelines.models.rope import RopeConfig
from max.pipelines.models.side_by_side import SideBySide

__all__ = ["DecoderConfig", "QueryGrowth"]


@dataclass(frozen=True)
class QueryGrowth:
    """Scales the queries at position p by ``1 + beta * log(1 + floor((p + first) / length))``.

    Args:
        beta: The weight of the logarithm.
        length: The number of consecutive positions with the same factor.
        first: Added to positions.
        unrotated_only: Whether only the queries of layers without rotation are scaled.
    """

    beta: float
    length: int
    first: int = 0
    unrotated_only: bool = False


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a decoder-only model, and the options of its layers.

    `decoder_family` overrides `fields_from` with a function of the family.

    Args:
        hidden_size: The size of hidden states.
        intermediate_size: The inner size of the MLPs.
        num_layers: The number of blocks.
        num_heads: The number of query heads.
        num_kv_heads: The number of KV heads.
        head_dim: The size of a head.
        vocab_size: The number of tokens.
        norm_eps: The epsilon of the norms.
        max_position_embeddings: The longest sequence that the model supports.
        max_seq_len: The longest sequence to serve, in tokens.
        rope: The rotary embedding; None: heads are not rotated.
        local_rope: The rotary embedding of layers with a window, if it differs.
        unrotated_layers: The layers whose heads are not rotated.
        interleaved_rope: Whether the two elements of a rotated pair are adjacent; in most Hugging Face checkpoints they
            are half a head apart.
        learned_positions: The number of rows of the position embedding that is added to token embeddings; 0: none.
        first_position: The row of position 0 in it.
        tie_word_embeddings: Whether the output layer shares the embedding's weight.
        output_bias: Whether the output layer has a bias.
        embedding_size: The size of embeddings that are projected to hidden states and back; None: hidden_size.
        embedding_multiplier: The factor of the embeddings.
        rounds_multiplier: Whether the factor is rounded to the dtype of 16-bit weights, as in Gemma's training.
        embedding_norm: Whether embeddings are normalised.
        logits_scaling: The divisor of the logits.
        logits_soft_cap: If set, ``cap * tanh(logits / cap)`` replaces the logits.
        norm: The form of the norms.
        norm_places: The places of a block's norms, keys of `max.pipelines.models.decoder_block.NORM_PLACES`.
        final_norm: Whether there is a norm after the last block.
        parallel: Whether attention and MLP read the same hidden states.
        residual_multiplier: The factor of each layer's output before it is added.
        normed_residual: Whether residual sums add the normalised input of a layer instead of its input.
        attention_bias: Whether the projections to queries, keys and values have biases.
        attention_output_bias: Whether the attention's output projection has a bias.
        qkv_layout: How a checkpoint's fused projection stores its rows: all queries, all keys, all values
            (``rows``), or for each KV head its queries, its key and its value (``heads``).
        qk_norm: The norm of queries and keys; None: they are not normalised.
        attention_gate: Whether attended values are multiplied by the sigmoid of gates. The query projection computes
            the gate of a head directly after its query.
        value_norm: Whether the values of each head are normalised, without a weight.
        full_attention_heads: The number of KV heads and the head size in layers without a window, if they differ from
            those of layers with a window.
        keys_as_values: Whether layers without a window use their projected keys as values.
        shared_kv_layers: The number of layers at the end that have no keys and values of their own: each reads those of
            the last earlier layer of its kind (with or without a window).
        clip_qkv: Queries and keys, after their norms, and values are clamped to ``[-clip_qkv, clip_qkv]``.
        attention_multiplier: The factor of the attention scores; None: ``1 / sqrt(head_dim)``.
        score_divisor_by_layer: Whether the scores of layer i are also divided by ``i + 1``.
        scores_soft_cap: If set, ``cap * tanh(score / cap)`` replaces the scores.
        sinks: Whether each head has an attention sink: a learned score without a value.
        alibi_slopes: The decrease of a key's score per token of distance, for each head; None: ALiBi is not used.
        query_growth: The position-dependent factor of queries; None: no factor.
        sliding_window: The number of tokens that a token sees in layers with a window, including itself.
        chunked: Whether the window is a chunk: a token sees itself and the earlier tokens of its chunk of
            `sliding_window`.
        full_attention_layers: The layers without the window.
        gated: Whether the MLPs have a gate.
        mlp_bias: Whether the MLP's projections have biases.
        activation: The MLP's activation, as `max.nn.MLP` or `max.pipelines.models.feed_forward` names it.
        xielu: For each of `XIELU_PARAMETERS` the values by layer, if they are not weights of the checkpoint.
        layer_sizes: The inner size of each layer's MLP, if they differ; intermediate_size is the largest.
        sparsity: For each layer the fraction of the MLP's gates that is set to zero; empty: none.
        per_layer_inputs: The per-token vectors of each layer; None: there are none.
        alternating: The number of hidden states of a token, if there are several; None: there is one.
        latent: The sizes of multi-head latent attention; None: keys and values are cached directly.
        experts: The experts of the layers that have experts; None: all layers have an MLP.
        gated_blocks: Whether blocks are `max.pipelines.models.gated_block.GatedBlock`.
        experts_beside: The experts that run beside the MLPs of such blocks; None: there are none.
        layer_kinds: The kind of each layer; empty: all have attention.
        recurrence: The form of the recurrent layers; None: there are none.
        side_by_side: The factors of blocks with attention and a recurrent layer in parallel; None: there are none.
        mixers_alone: Whether blocks with attention or a recurrent layer have no feed-forward layer.
        quantization: The format of a GPTQ checkpoint's projections.
        prediction_layers: The number of further layers that a checkpoint stores for multi-token prediction; they are
            not used.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    max_position_embeddings: int
    max_seq_len: int
    rope: RopeConfig | None = RopeConfig()
    local_rope: RopeConfig | None = None
    unrotated_layers: frozenset[int] = frozenset()
    interleaved_rope: bool = False
    learned_positions: int = 0
    first_position: int = 0
    tie_word_embeddings: bool = False
    output_bias: bool = False
    embedding_size: int | None = None
    embedding_multiplier: float = 1.0
    rounds_multiplier: bool = False
    embedding_norm: bool = False
    logits_scaling: float = 1.0
    logits_soft_cap: float | None = None
    norm: NormForm = NormForm()
    norm_places: tuple[str, ...] = ("attention_input", "mlp_input")
    final_norm: bool = True
    parallel: bool = False
    residual_multiplier: float = 1.0
    normed_residual: bool = False
    attention_bias: bool = False
    attention_output_bias: bool = False
    qkv_layout: Literal["rows", "heads"] = "rows"
    qk_norm: QKNorm | None = None
    attention_gate: bool = False
    value_norm: bool = False
    full_attention_heads: tuple[int, int] | None = None
    keys_as_values: bool = False
    shared_kv_layers: int = 0
    clip_qkv: float | None = None
    attention_multiplier: float | None = None
    score_divisor_by_layer: bool = False
    scores_soft_cap: float | None = None
    sinks: bool = False
    alibi_slopes: tuple[float, ...] | None = None
    query_growth: QueryGrowth | None = None
    sliding_window: int | None = None
    chunked: bool = False
    full_attention_layers: frozenset[int] = frozenset()
    gated: bool = True
    mlp_bias: bool = False
    activation: str = "silu"
    xielu: tuple[tuple[float, ...], ...] = ()
    layer_sizes: tuple[int, ...] = ()
    sparsity: tuple[float, ...] = ()
    per_layer_inputs: PerLayerInputs | None = None
    alternating: Alternating | None = None
    latent: LatentForm | None = None
    experts: Experts | None = None
    gated_blocks: bool = False
    experts_beside: Experts | None = None
    layer_kinds: tuple[LayerKind, ...] = ()
    recurrence: RecurrentForm | None = None
    mixers_alone: bool = False
    side_by_side: SideBySide | None = None
    quantization: QuantizationConfig | None = None
    prediction_layers: int = 0

    def kind_of(self, index: int) -> LayerKind:
        """The kind of a layer.

        Args:
            index: The layer's index.
        """
        return self.layer_kinds[index] if self.layer_kinds else "attention"

    def feeds_forward(self, index: int) -> bool:
        """Whether a layer has a feed-forward layer.

        Args:
            index: The layer's index.
        """
        return not self.mixers_alone or self.kind_of(index) == "feed_forward"

    def places_of(self, index: int) -> tuple[str, ...]:
        """The places of a layer's norms; a layer with only a feed-forward layer uses the norm names of attention.

        Args:
            index: The layer's index.
        """
        if not self.mixers_alone and self.kind_of(index) != "feed_forward":
            return self.norm_places
        return tuple(place for place in self.norm_places if place.startswith("attention"))

    def _layers_of(self, kind: LayerKind, end: int | None = None) -> int:
        """The number of layers of `kind` (or both kinds) among the first `end` ones.

        Layers that read the keys and values of another layer do not count.
        """
        own = self.num_layers - self.shared_kv_layers
        kinds = [self.kind_of(index) for index in range(own if end is None else min(end, own))]
        return sum(one in (kind, "both") for one in kinds)

    @property
    def num_attention_layers(self) -> int:
        """The number of layers that have keys and values in the cache."""
        return self._layers_of("attention")

    @property
    def states(self) -> tuple[RecurrentState, ...]:
        """The states of the recurrent layers."""
        layers = self._layers_of("recurrent")
        return self.recurrence.states(layers) if self.recurrence is not None and layers else ()

    def cache_layer(self, index: int) -> int:
        """The index of a layer in the cache: in its group if it has attention, else among the layers with states.

        In models with layers of kind ``both``, all layers are of that kind, so both indices are equal.

        Args:
            index: The layer's index.
        """
        source = self.kv_layer_of(index)
        kind = self.kind_of(source)
        if kind not in ("attention", "both"):
            return self._layers_of("recurrent" if kind == "recurrent" else "attention", source)
        return self.cache_groups[self.cache_group(index)].index(source)

    @property
    def cache_groups(self) -> list[list[int]]:
        """The layers of each cache group: those without a window, then those with one, split further if head shapes
        differ.

        The grouping ignores the longest served sequence, so that the cache of a model always has the same layout.
        """
        own = range(self.num_layers - self.shared_kv_layers)
        groups: dict[tuple[bool, tuple[int, int]], list[int]] = {}
        for index in own:
            if self.kind_of(index) in ("attention", "both"):
                form = not self._is_full(index), self.heads_of(index)
                groups.setdefault(form, []).append(index)
        return [groups[form] for form in sorted(groups)] or [[]]

    def cache_group(self, index: int) -> int:
        """The cache group of a layer's keys and values; 0 if it has none.

        Args:
            index: The layer's index.
        """
        source = self.kv_layer_of(index)
        groups = enumerate(self.cache_groups)
        return next((number for number, layers in groups if source in layers), 0)

    def _is_full(self, index: int) -> bool:
        """Whether a layer has no window, or one that no sequence exceeds."""
        window = self.sliding_window
        unused = window is None or window >= self.max_position_embeddings
        return unused or index in self.full_attention_layers

    @property
    def cache_groups_of_layer(self) -> int:
        """The number of cache groups that a layer uses: 2 if index keys are stored beside latents."""
        return 2 if self.latent is not None and self.latent.index is not None else 1

    @property
    def num_cached_layers(self) -> int:
        """The number of layers in the first group of the cache."""
        return len(self.cache_groups[0])

    def window_of(self, index: int) -> int | None:
        """The window of a layer in tokens; None: it sees all earlier tokens.

        A window that no sequence exceeds is also None.

        Args:
            index: The layer's index.
        """
        window = self.sliding_window
        if window is None or window >= self.max_seq_len or index in self.full_attention_layers:
            return None
        return window

    def kv_layer_of(self, index: int) -> int:
        """The layer whose keys and values a layer reads: itself, or an earlier one.

        Args:
            index: The layer's index.
        """
        own = self.num_layers - self.shared_kv_layers
        full = index in self.full_attention_layers
        sources = (i for i in reversed(range(own)) if (i in self.full_attention_layers) is full)
        return index if index < own else next(sources)

    def rotation_of(self, index: int) -> RopeConfig | None:
        """The rotary embedding of a layer; None: its heads are not rotated.

        Args:
            index: The layer's index.
        """
        if index in self.unrotated_layers or self.kind_of(index) in ("recurrent", "feed_forward"):
            return None
        local = self.sliding_window is not None and index not in self.full_attention_layers
        return self.local_rope if local and self.local_rope is not None else self.rope

    def heads_of(self, index: int) -> tuple[int, int]:
        """The number of KV heads of a layer, and the size of a head.

        Args:
            index: The layer's index.
        """
        if self.full_attention_heads is not None and index in self.full_attention_layers:
            return self.full_attention_heads
        return self.num_kv_heads, self.head_dim

    def score_factor(self, index: int) -> float:
        """The factor of a layer's attention scores.

        Args:
            index: The layer's index.
        """
        factor = self.attention_multiplier
        factor = self.heads_of(index)[1] ** -0.5 if factor is None else factor
        return factor / (index + 1) if self.score_divisor_by_layer else factor

    def cache_params(
        self, dtype: DType, page_size: int, *, n_devices: int = 1, **options: Any
    ) -> KVCacheParams:
        """The shape of the KV cache: keys and values of each head, or one latent for all heads, in one or two groups of
        layers; index keys are a separate group.

        If there are more devices than KV heads, the shape counts each copy of a head.

        Args:
            dtype: The cache's dtype.
            page_size: Tokens per page.
            n_devices: The number of devices that heads are split over.
            options: Further fields of `KVCacheParams`.

        Raises:
            ConfigError: The model caches latents and the dtype has 8 bits, or heads cannot be split over the devices.
        """
        self.check_split(n_devices)
        forms = [self.heads_of(group[0] if group else 0) for group in self.cache_groups]
        if not self.num_attention_layers:
            forms = [(n_devices, dim) for _, dim in forms]
        forms = [(max(heads, n_devices), dim) for heads, dim in forms]
        if self.latent is not None:
            forms = [(1, self.latent.cached_dim) for _ in forms]
            if dtype.size_in_bytes < 2:
                raise ConfigError(
                    f"the KV cache's format is {dtype.name}; this model caches latents, which have 16 or 32 bits",
                    "Give --kv-cache-format bfloat16, float16 or float32.",
                )
        latent, windows = self.latent is not None, map(self._group_window, self.cache_groups)
        groups = [
            CacheGroup(len(layers), *form, window, latent)
            for layers, form, window in zip(self.cache_groups, forms, windows, strict=True)
        ]
        if self.latent is not None and self.latent.index is not None:
            groups.append(
                CacheGroup(len(self.cache_groups[0]), 1, self.latent.index.dim, None, True)
            )
        first = groups[0]
        return KVCacheParams(
            dtype,
            first.n_kv_heads,
            first.head_dim,
            page_size=page_size,
            is_mla=latent,
            states=self.states,
            window=first.window,
            groups=tuple(groups[1:]),
            n_devices=n_devices,
            **options,
        )

    def _group_window(self, group: list[int]) -> int | None:
        """The window of a group's layers."""
        return self.sliding_window if group and not self._is_full(group[0]) else None

    def check_split(self, count: int) -> None:
        """Checks that the layers can be split over devices.

        Args:
            count: The number of devices.

        Raises:
            ConfigError: A number of heads or features cannot be split; the message names the device counts that work.
        """
        problem = self._split_problem(count)
        if problem is not None:
            counts = [n for n in range(2, self.num_heads + 1) if self._split_problem(n) is None]
            remedy = f"This model can be split over {' or '.join(map(str, counts))} devices."
            raise ConfigError(
                f"{problem} cannot be split over {count} devices",
                remedy if counts else "This model runs on one device.",
            )

    def _split_problem(self, count: int) -> str | None:
        """The reason why the model cannot be split over `count` devices; None if it can."""
        if count == 1 or not self.num_attention_layers:
            return None
        if self.num_heads % count:
            return f"{self.num_heads} heads"
        for kv_heads, _ in {self.heads_of(index) for index in range(self.num_layers)}:
            if self.latent is None and kv_heads % count and count % kv_heads:
                return f"{kv_heads} KV heads"
        sizes = [self.intermediate_size, *self.layer_sizes]
        if self.experts is not None:
            sizes = [self.experts.size, self.experts.shared_size]
            sizes += [self.intermediate_size] if self.experts.dense_layers else []
        if self.experts_beside is not None:
            sizes += [self.experts_beside.size]
        smaller_size = next((size for size in sizes if 0 < size < count), None)
        return None if smaller_size is None else f"{smaller_size} features of a feed-forward layer"

    @classmethod
    def from_huggingface(cls, config: object, max_seq_len: int | None = None) -> Self:
        """Reads a config.json.

        Args:
            config: The file's keys as attributes.
            max_seq_len: The longest sequence to serve; by default the longest that the model supports.

        Raises:
            ModelFilesError: A value is missing, or the architecture does not support it.
        """
        fields = cls.fields_from(ConfigKeys(config))
        if max_seq_len is not None:
            fields["max_seq_len"] = max_seq_len
        return cls(**fields)

    @classmethod
    def fields_from(cls, keys: ConfigKeys) -> dict[str, Any]:
        """The fields by name; architectures extend the result.

        Args:
            keys: The keys of config.json.

        Raises:
            ModelFilesError: A value is missing, or does not fit.
        """
        return base_fields(keys)
