"""The head that drafts the tokens of a model, according to its configuration and its files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from max._lazy import lazy_module
from max.graph.weights import WeightData
from max.pipelines.config.enums import SpeculativeMethod
from max.pipelines.config.pipeline_config import PipelineConfig
from max.pipelines.models.decoder.config import DecoderConfig

if TYPE_CHECKING:
    from max.pipelines.models.heads import eagle, head, prediction
else:
    eagle = lazy_module("max.pipelines.models.heads.eagle")
    prediction = lazy_module("max.pipelines.models.heads.prediction")
    head = lazy_module("max.pipelines.models.heads.head")

__all__ = ["HeadSource", "config_with_head", "head_source"]


@dataclass(frozen=True)
class HeadSource:
    """What a head is loaded from.

    Args:
        kind: The class of its layers.
        config: Its shape.
        weights: Its weights by its names.
    """

    kind: type[head.DraftingHead]
    config: DecoderConfig
    weights: Mapping[str, WeightData]


def config_with_head(config: DecoderConfig, pipeline: PipelineConfig) -> DecoderConfig:
    """The shape of a model that stores what a head reads, if one drafts its tokens.

    Args:
        config: The shape of the model.
        pipeline: The configuration.

    Raises:
        ConfigError: The configuration names a head, and there is none, or it does not fit the model.
    """
    if pipeline.speculative_method is SpeculativeMethod.eagle3:
        return eagle.with_eagle(config, pipeline)
    if not pipeline.drafts_tokens:
        return config
    return prediction.with_head(config) if prediction.drafts_by_head(config, pipeline) else config


def head_source(
    config: DecoderConfig, pipeline: PipelineConfig, weights: Mapping[str, WeightData]
) -> tuple[HeadSource, dict[str, WeightData]]:
    """What the head of a model is loaded from, and the weights that the model itself needs for it.

    Args:
        config: The shape of the model, from `config_with_head`.
        pipeline: The configuration.
        weights: All weights of the checkpoint by the decoder's names.

    Raises:
        ConfigError: The head does not fit the model.
        WeightsError: It lacks a weight.
    """
    if pipeline.speculative_method is SpeculativeMethod.eagle3:
        projection, shape, own = eagle.eagle_weights(config, pipeline, weights)
        source = HeadSource(eagle.EagleHead, shape, own)
        return source, {eagle.STATE_PROJECTION: projection}
    own = prediction.head_weights(config, weights)
    shape = prediction.head_config(config, own)
    return HeadSource(prediction.PredictionHead, shape, own), {}
