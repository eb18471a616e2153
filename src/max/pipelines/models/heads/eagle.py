"""Heads of EAGLE 3 (https://arxiv.org/abs/2503.01840), in folders of their own: one block that reads a projection of
hidden states after three blocks of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import numpy as np

from max.driver import Tensor
from max.dtype import DType
from max.graph import Dim, TensorValue, Weight, ops
from max.graph.weights import WeightData
from max.nn.kv_cache.cache_values import PagedCacheValues
from max.nn.layers.linear import Linear
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.config.pipeline_config import PipelineConfig
from max.pipelines.core.exceptions import ConfigError, WeightsError
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.read_config import read_decoder
from max.pipelines.models.heads.head import DraftingHead, why_no_states

__all__ = ["STATE_PROJECTION", "EagleConfig", "EagleHead", "eagle_weights", "with_eagle"]

STATE_PROJECTION = "state_projection.weight"
"""The model's name of the projection that a head's folder has as ``fc``."""

LEAST_LOGIT = -1e30
"""The logit of tokens that the head does not predict."""

_NAMES = {
    "input_layernorm": "embedding_norm",
    "hidden_norm": "hidden_norm",
}
"""The head's names of the norms before the block's attention."""


@dataclass(frozen=True)
class EagleConfig(DecoderConfig):
    """The shape of a head.

    Args:
        draft_vocabulary: The number of tokens that it predicts.
    """

    draft_vocabulary: int = 0


def eagle_shape(config: DecoderConfig, pipeline: PipelineConfig) -> DecoderConfig:
    """The shape of a head as its folder states it.

    Args:
        config: The shape of the model.
        pipeline: The configuration; its draft model is the folder.

    Raises:
        ConfigError: The folder is of another kind, or does not fit the model.
    """
    draft = pipeline.draft_model_config
    assert draft is not None  # the configuration says so
    own = draft.huggingface_config
    if not any("eagle3" in name.lower() for name in own.architectures):
        raise ConfigError(
            f"speculative_method is 'eagle3', and {draft.model_path} is a {', '.join(own.architectures)}",
            "Give the folder of an EAGLE 3 head with --draft-model.",
        )
    if (why := why_no_states(config, pipeline)) is not None:
        raise ConfigError(
            f"speculative_method is 'eagle3', and {pipeline.model_config.model_path} {why}",
            "Leave --speculative-method and --draft-model out.",
        )
    shape = read_decoder(ConfigKeys(own))
    if shape.num_layers != 1 or shape.hidden_size != config.hidden_size:
        raise ConfigError(
            f"{draft.model_path} has {shape.num_layers} blocks with hidden states of {shape.hidden_size}; "
            f"{pipeline.model_config.model_path} needs one with {config.hidden_size}",
            "Give the head that was trained for this model.",
        )
    return shape


def with_eagle(config: DecoderConfig, pipeline: PipelineConfig) -> DecoderConfig:
    """The shape of a model that stores what a head of EAGLE 3 reads.

    Args:
        config: The shape of the model.
        pipeline: The configuration; its draft model is the head's folder.

    Raises:
        ConfigError: The folder is of another kind, or does not fit the model.
    """
    (block,) = eagle_shape(config, pipeline).blocks
    layers = config.num_layers
    draft = pipeline.draft_model_config
    assert draft is not None
    keys = ConfigKeys(draft.huggingface_config)
    section = keys.object("eagle_config") or keys
    places = section.value("eagle_aux_hidden_state_layer_ids")
    if places is None:
        # a low, a middle and a high block, as vLLM takes them
        places = [2, layers // 2, layers - 3]
    if (
        not isinstance(places, list)
        or not places
        or not all(type(place) is int and 0 <= place < layers for place in places)
    ):
        raise ConfigError(
            f"{draft.model_path}: eagle_aux_hidden_state_layer_ids is {places}, and the model has {layers} layers",
            "Give the head that was trained for this model.",
        )
    return replace(config, stored_states=tuple(places), joins_states=True, head_block=block)


def eagle_weights(
    config: DecoderConfig, pipeline: PipelineConfig, weights: Mapping[str, WeightData]
) -> tuple[WeightData, EagleConfig, dict[str, WeightData]]:
    """The projection of the model's states, the shape of the head, and its weights by its names.

    Args:
        config: The shape of the model, from `with_eagle`.
        pipeline: The configuration; its draft model is the head's folder.
        weights: The weights of the model by the decoder's names.

    Raises:
        ConfigError: The folder does not fit the model.
        WeightsError: The folder lacks a weight.
    """
    shape, draft = eagle_shape(config, pipeline), pipeline.draft_model_config
    assert draft is not None
    stored = {
        name.removeprefix("model."): value.data() for name, value in draft.load_weights().items()
    }
    missing = [name for name in ("fc.weight", "lm_head.weight") if name not in stored]
    if missing:
        raise WeightsError(f"{draft.model_path} lacks {' and '.join(missing)}")
    projection, table = stored.pop("fc.weight"), stored.pop("d2t", None)
    # whether each token of the model is predicted, which d2t says too
    stored.pop("t2d", None)
    # read where the head has no embedding of its own
    own: dict[str, WeightData] = {"embed_tokens.weight": weights["embed_tokens.weight"]}
    for name, value in stored.items():
        part = name.removeprefix("midlayer.").removeprefix("layers.0.")
        stem, _, end = part.rpartition(".")
        if stem in _NAMES:
            part = f"{_NAMES[stem]}.{end}"
        elif part != name:
            part = f"layers.0.{part}"
        own[part] = value
    predicted = int(own["lm_head.weight"].shape[0])
    tokens = np.arange(predicted)
    if table is not None:
        # of each predicted token what is to be added to its number
        tokens = tokens + Tensor.from_dlpack(table.data).to_numpy().astype(np.int64)
    if len(np.unique(tokens)) != predicted or tokens.min() < 0 or tokens.max() >= config.vocab_size:
        raise WeightsError(
            f"{draft.model_path}: d2t names no {predicted} tokens of {config.vocab_size}"
        )
    # [vocab]: the place of each token among the predicted ones; after the last: it is not predicted
    index = np.full(config.vocab_size, predicted, np.int64)
    index[tokens] = np.arange(predicted)
    own["draft_index"] = WeightData.from_numpy(index, "draft_index")
    values = {field.name: getattr(shape, field.name) for field in fields(DecoderConfig)}
    values |= dict(
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        max_seq_len=config.max_seq_len,
        blocks_of_model=config.blocks,
        stored_states=config.stored_states[:1],
        tie_word_embeddings=False,
    )
    return projection, EagleConfig(**values, draft_vocabulary=predicted), own


class EagleHead(DraftingHead):
    """A head of EAGLE 3, as a decoder of one block.

    With the state ``h`` and the embedding ``e`` of the next token: ``y = h + attention([norm(e), norm(h)])``, then
    ``y + mlp(norm(y))``, which is the state for the token after that.

    Weights: those of `Decoder`, ``embedding_norm.weight``, ``hidden_norm.weight``, and ``draft_index``, int64
    ``[vocab]``: the row of each token in the output layer.

    Args as of `DraftingHead`; the shape is that of `eagle_weights`.
    """

    def _add_layers(self) -> None:
        config = self.config
        assert isinstance(config, EagleConfig)
        size, attention = config.hidden_size, config.attention
        self.lm_head = Linear(size, config.draft_vocabulary, self.dtype, self.device)
        self.draft_index = Weight("draft_index", DType.int64, [config.vocab_size], self.device)
        # embeddings and states side by side
        mixer = self.layers[0].self_attn
        kv_heads = attention.num_key_value_heads
        heads_of = {"q_proj": attention.num_attention_heads, "k_proj": kv_heads, "v_proj": kv_heads}
        for name, heads in heads_of.items():
            width = heads * attention.head_dim
            projection = self.linear_cls(
                2 * size, width, self.dtype, self.device, has_bias=attention.bias
            )
            setattr(mixer, name, projection)
        # the block's attention has no norm: its two inputs have their own
        del self.layers[0].input_layernorm

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        tokens: TensorValue,
        kv_collection: PagedCacheValues,
        return_n_logits: TensorValue,
        input_row_offsets: TensorValue,
    ) -> tuple[TensorValue, ...]:
        """The logits of the token after the last one of each sequence, float32 ``[batch, vocab]``.

        Args:
            tokens: The tokens after those of the hidden states, integers ``[total_seq_len]``.
            kv_collection: The cache of the model; its lengths are the first places to compute.
            return_n_logits: Whether a further step follows, which reads the state after the last token: 1 or 0, int64
                ``[1]``.
            input_row_offsets: The first row of each sequence, uint32 ``[batch + 1]``.
        """
        state = self._load_state(0, Dim(tokens.shape[0]), kv_collection, input_row_offsets)
        embedded = self.embedding_norm(self._embedded_tokens(tokens, None))
        x = ops.concat([embedded, self.hidden_norm(state)], axis=1)
        (form,), ((group, place),) = self.config.blocks, self._layout.places
        assert form.mixer is not None
        block = self.layers[0]
        index = ops.constant(np.array(place, np.uint32), DType.uint32, self.device)
        cache = self._cache_of(form, group, kv_collection)
        tables = form.mixer.position_inputs(self._site, None)
        # the residual stream is the state's alone, without the embedding
        h = state + block.self_attn(index, x, cache, tables, input_row_offsets)
        ends = ops.cast(input_row_offsets[1:], DType.int64) - 1
        last = ops.gather(h, ends, axis=0)  # [batch, hidden_size]
        last = last + block.mlp(block.post_attention_layernorm(last))
        self._store_last(last, return_n_logits, kv_collection, input_row_offsets)
        logits = self._logits(last)
        # [batch, draft_vocabulary + 1]
        least = ops.broadcast_to(
            ops.constant(LEAST_LOGIT, DType.float32, self.device), [logits.shape[0], 1]
        )
        return (ops.gather(ops.concat([logits, least], axis=1), self.draft_index, axis=1),)
