"""Apertus: MLPs of xIELU, without a gate; QK norm."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from max.driver import Tensor
from max.graph.weights import WeightData
from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.core.exceptions import ModelFilesError
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.gguf.metadata import Metadata
from max.pipelines.models.config_fields import Fields, base_fields, biases
from max.pipelines.models.decoder_config import DecoderConfig
from max.pipelines.models.feed_forward import XIELU_PARAMETERS
from max.pipelines.models.norms import QKNorm
from max.pipelines.models.weight_names import WeightNames

__all__ = ["ARCHITECTURES"]


def apertus_fields(keys: ConfigKeys) -> Fields:
    """The fields of an Apertus's config."""
    fields = base_fields(keys, gated=False, activation="xielu", eps=1e-5, theta=12e6)
    return fields | biases(keys) | {"qk_norm": QKNorm(), **_xielu(keys, fields["num_layers"])}


def _xielu(keys: ConfigKeys, layers: int) -> Fields:
    """The parameters of the activations, which GGUF files have as metadata."""
    xielu = keys.object("xielu")
    if xielu is None:
        return {}
    values = {part: xielu.numbers(part, over=-math.inf) or [] for part in XIELU_PARAMETERS}
    for part, numbers in values.items():
        if len(numbers) != layers:
            raise xielu.error(part, f"{layers} numbers")
    return {"xielu": tuple(tuple(numbers) for numbers in values.values())}


NAMES = WeightNames(
    layer={
        "attention_layernorm": "input_layernorm",
        "feedforward_layernorm": "post_attention_layernorm",
    },
    vectors=("act_fn.beta", "act_fn.eps"),
)


def _read(metadata: Metadata) -> dict[str, Any]:
    """Files state the parameters of the activations in their metadata."""
    return {"xielu": {key: metadata.floats_by_layer(f"xielu.{key}") for key in XIELU_PARAMETERS}}


def _split_weights(
    config: DecoderConfig, weights: Mapping[str, WeightData]
) -> tuple[dict[str, list[float]], dict[str, WeightData]]:
    """Separates the parameters of the activations from the other weights.

    Raises:
        ModelFilesError: A layer lacks a parameter.
    """
    others, parameters = dict(weights), dict[str, list[float]]()
    for part in XIELU_PARAMETERS if config.activation == "xielu" else ():
        parameters[f"xielu.{part}"] = []
        for index in range(config.num_layers):
            name = f"layers.{index}.mlp.act_fn.{part}"
            if name not in others:
                raise ModelFilesError(f"the weight files lack {name!r}", "Copy the files again.")
            array = Tensor.from_dlpack(others.pop(name).data).to_numpy()
            parameters[f"xielu.{part}"].append(float(array.reshape(-1)[0]))
    return parameters, others


GGUF = GGUFForm("apertus", "apertus", read=_read, split_weights=_split_weights)

ARCHITECTURES = [
    decoder_family(
        "ApertusForCausalLM",
        ["swiss-ai/Apertus-8B-Instruct-2509"],
        apertus_fields,
        names=NAMES,
        gguf=GGUF,
    )
]
"""The architectures of this module, for the registry."""
