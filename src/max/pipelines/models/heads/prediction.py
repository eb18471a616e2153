"""Layers of a checkpoint that predict the token after the next one from a hidden state of the model and the next token
(multi-token prediction, https://arxiv.org/abs/2412.19437).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from max.dtype import DType
from max.graph import Dim, TensorValue, ops
from max.nn.kv_cache.cache_values import PagedCacheValues
from max.pipelines.config.enums import SpeculativeMethod
from max.pipelines.config.pipeline_config import PipelineConfig
from max.pipelines.core.exceptions import ConfigError
from max.pipelines.models.blocks.block import Block
from max.pipelines.models.blocks.mixer import AttentionMixer
from max.pipelines.models.decoder.config import NORMED_STATE, DecoderConfig
from max.pipelines.models.decoder.weight_names import PREDICTION_LAYER
from max.pipelines.models.heads.head import DraftingHead, why_no_states

__all__ = [
    "PROJECTIONS", "PredictionHead", "drafts_by_head", "head_config", "head_weights", "with_head",
]  # fmt: skip

PROJECTIONS = (".eh_proj.weight", "mtp.fc.weight", ".mtp_layers.0.input_proj.weight")
"""The ends of the names, in files, of the weight that each first prediction layer has: its projection."""

_NAMES = {
    "enorm": "embedding_norm",
    "hnorm": "hidden_norm",
    "eh_proj": "projection",
    "shared_head.norm": "norm",
    "shared_head.head": "lm_head",
    "embed_tokens": "embed_tokens",
}
"""The head's names of weights of a prediction layer, besides those of its block."""

T = TypeVar("T")


def prediction_block(config: DecoderConfig) -> Block | None:
    """The block of a model's prediction layers: like the last one with attention; None: it has no attention.

    Args:
        config: The shape of the model.
    """
    own = (block for block in reversed(config.blocks) if isinstance(block.mixer, AttentionMixer))
    return next((block for block in own if block.mixer and block.mixer.source is None), None)


def why_no_head(config: DecoderConfig, pipeline: PipelineConfig) -> str | None:
    """Why no head that a checkpoint brings can draft the tokens of its model; None: one can.

    Args:
        config: The shape of the model.
        pipeline: The configuration.
    """
    if not config.prediction_layers or not pipeline.model_config.has_weight(PROJECTIONS):
        return "has no layers that predict further tokens"
    return why_no_states(config, pipeline)


def drafts_by_head(config: DecoderConfig, pipeline: PipelineConfig) -> bool:
    """Whether a head that the checkpoint brings drafts the tokens of its model.

    Args:
        config: The shape of the model.
        pipeline: The configuration.

    Raises:
        ConfigError: The configuration says that it does, and it cannot.
    """
    method = pipeline.speculative_method
    if method not in (SpeculativeMethod.auto, SpeculativeMethod.mtp):
        return False
    why = why_no_head(config, pipeline)
    if why is not None and method is SpeculativeMethod.mtp:
        raise ConfigError(
            f"speculative_method is 'mtp', and {pipeline.model_config.model_path} {why}",
            "Leave --speculative-method out.",
        )
    return why is None


def with_head(config: DecoderConfig) -> DecoderConfig:
    """The shape of a model that stores what its first prediction layer reads.

    Args:
        config: The shape of the model.
    """
    return replace(config, stored_states=(NORMED_STATE,), head_block=prediction_block(config))


def head_config(config: DecoderConfig, weights: Mapping[str, object]) -> DecoderConfig:
    """The shape of the head of a model.

    Args:
        config: The shape of the model, from `with_head`.
        weights: The head's weights by its names.
    """
    assert config.head_block is not None
    return replace(
        config,
        blocks=(config.head_block,),
        blocks_of_model=config.blocks,
        head_block=None,
        tie_word_embeddings="lm_head.weight" not in weights,
    )


def head_weights(config: DecoderConfig, weights: Mapping[str, T]) -> dict[str, T]:
    """The weights of the head of a model by the head's names.

    Args:
        config: The shape of the model.
        weights: All weights of the checkpoint by the decoder's names.
    """
    own: dict[str, T] = {}
    # what the layer does not have itself, it shares with the model
    for name in ("embed_tokens.weight", "lm_head.weight", "lm_head.bias"):
        if name in weights and not (config.tie_word_embeddings and name == "lm_head.weight"):
            own[name] = weights[name]
    prefixes = (f"layers.{config.num_layers}.", f"{PREDICTION_LAYER}.")
    for name, value in weights.items():
        prefix = next(filter(name.startswith, prefixes), "")
        stem, _, end = name.removeprefix(prefix).rpartition(".")
        if prefix:
            own[f"{_NAMES[stem]}.{end}" if stem in _NAMES else f"layers.0.{stem}.{end}"] = value
    return own


class PredictionHead(DraftingHead):
    """The first prediction layer of a checkpoint, as a decoder of one block.

    ``block(projection([embedding_norm(embedding of token i + 1), hidden_norm(state of token i)]))``, then the norm and
    the output layer. Its graph's inputs are those of a decoder: its tokens are those after the stored hidden states.

    Weights: those of `Decoder`, ``embedding_norm.weight``, ``hidden_norm.weight``, ``projection.weight``.

    Args as of `DraftingHead`; the shape is that of `head_config`.
    """

    def _add_layers(self) -> None:
        size = self.config.hidden_size
        self.projection = self.linear_cls(2 * size, size, self.dtype, self.device)

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
        parts = [
            self.embedding_norm(self._embedded_tokens(tokens, None)),
            self.hidden_norm(
                self._load_state(0, Dim(tokens.shape[0]), kv_collection, input_row_offsets)
            ),
        ]
        if self.config.prediction_reads_state_first:
            parts.reverse()
        h = self.projection(ops.concat(parts, axis=1))
        (block,) = self.config.blocks
        assert block.mixer is not None
        tables = [block.mixer.position_inputs(self._site, None)]
        h = self._decode(h, kv_collection, tables, input_row_offsets)
        ends = ops.cast(input_row_offsets[1:], DType.int64) - 1
        last = ops.gather(h, ends, axis=0)
        self._store_last(self.norm(last), return_n_logits, kv_collection, input_row_offsets)
        return (self._logits(last),)
