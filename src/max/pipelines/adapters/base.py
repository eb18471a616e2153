"""The base model of adapters, from the class of an architecture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from max.graph.weights import WeightData
from max.pipelines.adapters.terms import AdapterBase
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.gguf.tensor_names import decoder_weights
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.weight_names import WeightNames

__all__ = ["Architecture", "base_of"]


class Architecture(Protocol):
    """What a class of `max.pipelines.models.decoder.model.DecoderModel` states about its weights."""

    weight_names: WeightNames
    gguf: tuple[GGUFForm, ...]

    @classmethod
    def own_weights(cls, weights: Mapping[str, Any]) -> dict[str, Any]:
        """Selects the weights of a checkpoint that belong to the model."""
        ...


def base_of(
    model: type[Architecture],
    config: DecoderConfig,
    weights: Mapping[str, WeightData],
    *,
    is_gguf: bool,
    qkv_layout: str | None = None,
) -> AdapterBase:
    """What adapters need of their base.

    Args:
        model: The class of the architecture.
        config: The shape of the model.
        weights: The weights by the decoder's names, fused projections split.
        is_gguf: Whether the model is a GGUF file.
        qkv_layout: The layout of fused projections in checkpoints; None: that of the config.
    """

    def rename(stored_weights: Mapping[str, WeightData]) -> dict[str, WeightData]:
        return model.weight_names.from_safetensors(
            model.own_weights(stored_weights), others=weights.keys()
        )

    def rename_gguf(stored_weights: Mapping[str, WeightData]) -> dict[str, WeightData]:
        return decoder_weights(model.gguf[0], stored_weights)

    return AdapterBase(
        config,
        model.weight_names,
        rename,
        rename_gguf if model.gguf else None,
        qkv_layout or config.qkv_layout,
        any(form.permuted for form in model.gguf),
        is_gguf,
        weights,
    )
