"""The shape of a decoder-only model: its blocks, and what surrounds them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from max._lazy import lazy_module
from max.dtype import DType
from max.graph import DeviceRef
from max.graph.quantization import QuantizationConfig
from max.nn.kv_cache import CacheGroup, KVCacheParams, RecurrentState
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.core.exceptions import ConfigError
from max.pipelines.models.blocks.attention import AttentionForm
from max.pipelines.models.blocks.block import Block
from max.pipelines.models.blocks.feed_forward import MLPForm
from max.pipelines.models.blocks.mixer import AttentionMixer, Mixer, Site
from max.pipelines.models.blocks.norms import NormForm
from max.pipelines.models.blocks.rope import RopeConfig
from max.pipelines.models.decoder.cache_layout import CacheLayout, cache_layout

if TYPE_CHECKING:
    from max.pipelines.models.blocks import alternating as alternating_blocks
    from max.pipelines.models.blocks import experts as expert_blocks
    from max.pipelines.models.blocks import per_layer as layer_vectors
else:
    alternating_blocks = lazy_module("max.pipelines.models.blocks.alternating")
    expert_blocks = lazy_module("max.pipelines.models.blocks.experts")
    layer_vectors = lazy_module("max.pipelines.models.blocks.per_layer")

__all__ = ["NORMED_STATE", "DecoderConfig"]

NORMED_STATE = -1
"""Of `DecoderConfig.stored_states`: the hidden state after the norm that follows the last block."""

Form = TypeVar("Form")


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a decoder-only model.

    `decoder_family` overrides `read` with a function of the family. The methods ``with_…`` return changed copies.

    Args:
        hidden_size: The size of hidden states.
        vocab_size: The number of tokens.
        norm_eps: The epsilon of the norms.
        max_position_embeddings: The longest sequence that the model supports.
        max_seq_len: The longest sequence to serve, in tokens.
        blocks: The blocks, in order.
        norm: The form of the norms over hidden states.
        final_norm: Whether there is a norm after the last block.
        learned_positions: The number of rows of the position embedding that is added to token embeddings; 0: none.
        first_position: The row of position 0 in it.
        embedding_size: The size of embeddings that are projected to hidden states and back; None: hidden_size.
        embedding_multiplier: The factor of the embeddings.
        rounds_multiplier: Whether the factor is rounded to the dtype of 16-bit weights, as in Gemma's training.
        embedding_norm: Whether embeddings are normalized.
        per_layer_inputs: The per-token vectors of each layer; None: there are none.
        alternating: The number of hidden states of a token, if there are several; None: there is one.
        tie_word_embeddings: Whether the output layer shares the embedding's weight.
        output_bias: Whether the output layer has a bias.
        logits_scaling: The divisor of the logits.
        logits_soft_cap: If set, ``cap * tanh(logits / cap)`` replaces the logits.
        qkv_layout: How a checkpoint's fused projection stores its rows: all queries, all keys, all values
            (``rows``), or for each KV head its queries, its key and its value (``heads``).
        quantization: The format of a GPTQ checkpoint's projections.
        prediction_layers: The number of further layers that a checkpoint stores for multi-token prediction; the first
            one may draft tokens (`max.pipelines.models.heads`).
        prediction_reads_state_first: Whether such a layer has the hidden state before the embedding.
        stored_states: The hidden states that the cache keeps of each token for a head that drafts: the number of blocks
            after which each is taken, or `NORMED_STATE`.
        joins_states: Whether the cache has one projection of these states instead of each of them.
        head_block: The block of that head, whose keys are in the cache too; None: there is none.
        blocks_of_model: For the config of such a head, the blocks of the model whose cache it shares.
    """

    hidden_size: int
    vocab_size: int
    norm_eps: float
    max_position_embeddings: int
    max_seq_len: int
    blocks: tuple[Block, ...]
    norm: NormForm = NormForm()
    final_norm: bool = True
    learned_positions: int = 0
    first_position: int = 0
    embedding_size: int | None = None
    embedding_multiplier: float = 1.0
    rounds_multiplier: bool = False
    embedding_norm: bool = False
    per_layer_inputs: layer_vectors.PerLayerInputs | None = None
    alternating: alternating_blocks.Alternating | None = None
    tie_word_embeddings: bool = False
    output_bias: bool = False
    logits_scaling: float = 1.0
    logits_soft_cap: float | None = None
    qkv_layout: Literal["rows", "heads"] = "rows"
    quantization: QuantizationConfig | None = None
    prediction_layers: int = 0
    prediction_reads_state_first: bool = False
    stored_states: tuple[int, ...] = ()
    joins_states: bool = False
    head_block: Block | None = None
    blocks_of_model: tuple[Block, ...] = ()

    # the parts of blocks --------------------------------------------------------------------------

    @property
    def num_layers(self) -> int:
        """The number of blocks."""
        return len(self.blocks)

    def every(self, cls: type[Form]) -> list[Form]:
        """All forms of a kind among mixers and feed-forward layers, in the order of the blocks.

        Args:
            cls: The class of the forms.
        """
        return [form for form in self._forms() if isinstance(form, cls)]

    def first_form(self, cls: type[Form]) -> Form | None:
        """The first form of a kind among mixers and feed-forward layers; None: there is none.

        Args:
            cls: The class of the form.
        """
        return next((form for form in self._forms() if isinstance(form, cls)), None)

    def _forms(self) -> Iterator[object]:
        for block in self.blocks:
            if block.mixer is not None:
                yield from block.mixer.mixers
            yield from block.feed_forwards

    @property
    def attention(self) -> AttentionForm:
        """The form of the first attention over keys and values.

        Raises:
            ValueError: There is none.
        """
        form = self.first_form(AttentionForm)
        if form is None:
            raise ValueError("the model has no attention over keys and values")
        return form

    @property
    def recurrence(self) -> Mixer | None:
        """The form of the first recurrent layer; None: there is none."""
        return next((form for form in self.every(Mixer) if form.states(1)), None)

    @property
    def has_latents(self) -> bool:
        """Whether layers cache latents in place of keys and values."""
        return any(form.keys is not None and form.keys.is_latent for form in self.every(Mixer))

    @property
    def ropes(self) -> list[RopeConfig]:
        """The rotations of all layers."""
        ropes = (form.rope for form in self.every(AttentionMixer))
        return [rope for rope in ropes if rope is not None]

    # copies ---------------------------------------------------------------------------------------

    def with_blocks(self, layers: Collection[int] | None = None, **changes: Any) -> Self:
        """A copy with changed fields of blocks.

        Args:
            layers: The blocks; None: all.
            changes: The fields of `Block`.
        """
        return self._with(layers, lambda block: replace(block, **changes))

    def with_attention(self, layers: Collection[int] | None = None, **changes: Any) -> Self:
        """A copy with changed fields of attention layers.

        Args:
            layers: The blocks; None: all.
            changes: The fields of `AttentionForm`, or of `latent_attention.LatentForm` in blocks that have one.
        """

        def changed_block(block: Block) -> Block:
            mixer = block.mixer
            return block if mixer is None else replace(block, mixer=mixer.with_attention(**changes))

        return self._with(layers, changed_block)

    def with_mlp(self, layers: Collection[int] | None = None, **changes: Any) -> Self:
        """A copy with changed fields of MLPs.

        Args:
            layers: The blocks; None: all.
            changes: The fields of `MLPForm`.
        """

        def changed_block(block: Block) -> Block:
            mlp = block.feed_forward
            if not isinstance(mlp, MLPForm):
                return block
            return replace(block, feed_forward=replace(mlp, **changes))

        return self._with(layers, changed_block)

    def with_experts(
        self, experts: expert_blocks.Experts, dense_layers: Collection[int] = ()
    ) -> Self:
        """A copy with experts in place of MLPs; they have the activation and the gates of these.

        Args:
            experts: The experts.
            dense_layers: The blocks that keep their MLPs.
        """

        def changed_block(block: Block) -> Block:
            mlp = block.feed_forward
            if not isinstance(mlp, MLPForm):
                return block
            own = replace(experts, activation=mlp.activation, gated=mlp.gated)
            return replace(block, feed_forward=own)

        layers = [index for index in range(self.num_layers) if index not in dense_layers]
        return self._with(layers, changed_block)

    def with_recurrence(self, form: Mixer, attention_layers: Collection[int]) -> Self:
        """A copy with recurrent layers in place of attention.

        Args:
            form: The form of the recurrent layers.
            attention_layers: The blocks that keep their attention.
        """
        layers = [index for index in range(self.num_layers) if index not in attention_layers]
        return self.with_blocks(layers, mixer=form)

    def _with(self, layers: Collection[int] | None, change: Callable[[Block], Block]) -> Self:
        # most blocks are one object: it is changed once
        changed: dict[int, Block] = {}
        blocks = list(self.blocks)
        for index in range(len(blocks)) if layers is None else layers:
            block = blocks[index]
            if id(block) not in changed:
                changed[id(block)] = change(block)
            blocks[index] = changed[id(block)]
        return replace(self, blocks=tuple(blocks))

    # the cache ------------------------------------------------------------------------------------

    @property
    def cache(self) -> CacheLayout:
        """The places of the blocks in the cache, which a model and the head that drafts for it share."""
        first, head = (
            len(self.blocks_of_model),
            () if self.head_block is None else (self.head_block,),
        )
        # of a model: its blocks, then the head's; of a head: the model's blocks, then its own
        layout = cache_layout(
            (*self.blocks_of_model, *self.blocks, *head), self.max_position_embeddings
        )
        return layout._replace(places=layout.places[first : first + self.num_layers])

    @property
    def state_count(self) -> int:
        """The number of hidden states of a token in the cache."""
        return 1 if self.joins_states else len(self.stored_states)

    @property
    def states(self) -> tuple[RecurrentState, ...]:
        """The states of the recurrent layers."""
        return self.cache.states

    @property
    def num_cached_layers(self) -> int:
        """The number of layers in the first group of the cache."""
        return len(self.cache.groups[0][1])

    @property
    def follows_trees(self) -> bool:
        """Whether new tokens may be a tree of drafted ones. All else drafts single continuations: models with recurrent
        states, latents, windows, learned positions, or heads that read their hidden states from the cache.
        """
        mixers = [block.mixer for block in self.blocks if block.mixer is not None]
        return not self.learned_positions and not self.stored_states and all(
            mixer.follows_trees for mixer in mixers
        )  # fmt: skip

    def site(self, kv_params: KVCacheParams, dtype: DType, device: DeviceRef, linear: Any) -> Site:
        """What the layers of blocks need from this model.

        Args:
            kv_params: The shape of the KV cache.
            dtype: The dtype of the weights.
            device: Where it runs.
            linear: The constructor of the projections.
        """
        size, norm = self.hidden_size, self.norm
        return Site(size, norm, self.norm_eps, self.max_seq_len, kv_params, dtype, device, linear)

    def cache_params(
        self, dtype: DType, page_size: int, *, n_devices: int = 1, **options: Any
    ) -> KVCacheParams:
        """The shape of the KV cache: keys and values of each head, or one latent for all heads, in one or several
        groups of layers; index keys are a separate group, and so are stored hidden states, the last one.

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
        layout, groups = self.cache, list[CacheGroup]()
        for keys, members in layout.groups:
            if keys is None:
                # the paged cache has no layers
                groups.append(CacheGroup(0, n_devices, 2, None, False))
                continue
            # each device has a head, also where there are fewer heads than devices
            heads = 1 if keys.is_latent else max(keys.n_kv_heads, n_devices)
            groups.append(
                CacheGroup(len(members), heads, keys.head_dim, keys.window, keys.is_latent)
            )
        # keys of indexers: one row a token, as of latents
        groups += [
            CacheGroup(len(members), 1, keys.index_dim, None, True)
            for keys, members in layout.groups
            if keys is not None and keys.index_dim is not None
        ]
        if self.stored_states:
            groups.append(CacheGroup(self.state_count, 1, self.hidden_size, None, True))
        latent = any(keys is not None and keys.is_latent for keys, _ in layout.groups)
        if latent and dtype.size_in_bytes < 2:
            raise ConfigError(
                f"the KV cache's format is {dtype.name}; this model caches latents, which have 16 or 32 bits",
                "Give --kv-cache-format bfloat16, float16 or float32.",
            )
        first = groups[0]
        return KVCacheParams(
            dtype,
            first.n_kv_heads,
            first.head_dim,
            page_size=page_size,
            is_mla=latent,
            states=layout.states,
            window=first.window,
            groups=tuple(groups[1:]),
            n_devices=n_devices,
            **options,
        )

    # several devices ------------------------------------------------------------------------------

    def part(self, count: int, index: int) -> Self:
        """The shape of one device's part of the model.

        If the features of a feed-forward layer do not divide evenly, the first devices have one more.

        Args:
            count: The number of devices; `check_split` accepts it.
            index: The index of the device.
        """
        return replace(self, blocks=tuple(block.part(count, index) for block in self.blocks))

    def check_split(self, count: int) -> None:
        """Checks that the layers can be split over devices.

        Args:
            count: The number of devices.

        Raises:
            ConfigError: A number of heads or features cannot be split; the message names the device counts that work.
        """
        problem = self._split_problem(count)
        if problem is not None:
            forms = self.every(AttentionMixer)
            most = max((form.num_attention_heads for form in forms), default=1)
            counts = [n for n in range(2, most + 1) if self._split_problem(n) is None]
            remedy = f"This model can be split over {' or '.join(map(str, counts))} devices."
            raise ConfigError(
                f"{problem} cannot be split over {count} devices",
                remedy if counts else "This model runs on one device.",
            )

    def _split_problem(self, count: int) -> str | None:
        """The reason why the model cannot be split over `count` devices; None if it can."""
        mixers = self.every(Mixer)
        # recurrent models are not split, nor are their MLPs
        if count == 1 or not any(mixer.keys for mixer in mixers):
            return None
        problems = (mixer.split_problem(count) for mixer in mixers)
        problem = next((problem for problem in problems if problem is not None), None)
        sizes = {
            size for block in self.blocks for form in block.feed_forwards for size in form.sizes
        }
        smaller_size = next((size for size in sorted(sizes) if 0 < size < count), None)
        if problem is None and smaller_size is not None:
            return f"{smaller_size} features of a feed-forward layer"
        return problem

    # reading --------------------------------------------------------------------------------------

    @classmethod
    def from_huggingface(cls, config: object, max_seq_len: int | None = None) -> Self:
        """Reads a config.json.

        Args:
            config: The file's keys as attributes.
            max_seq_len: The longest sequence to serve; by default the longest that the model supports.

        Raises:
            ModelFilesError: A value is missing, or the architecture does not support it.
        """
        shape = cls.read(ConfigKeys(config))
        if max_seq_len is not None:
            shape = replace(shape, max_seq_len=max_seq_len)
        return cls(**{field.name: getattr(shape, field.name) for field in fields(shape)})

    @classmethod
    def read(cls, keys: ConfigKeys) -> DecoderConfig:
        """The shape of a model; an architecture defines it.

        Args:
            keys: The keys of config.json.

        Raises:
            ModelFilesError: A value is missing, or does not fit.
        """
        raise NotImplementedError(f"{cls.__name__} does not define read")
