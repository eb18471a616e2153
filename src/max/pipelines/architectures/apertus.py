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
from max.pipelines.models.blocks.feed_forward import XIELU_PARAMETERS, MLPForm
from max.pipelines.models.blocks.norms import QKNorm
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.read_config import read_decoder, with_biases
from max.pipelines.models.decoder.weight_names import WeightNames

__all__ = ["ARCHITECTURES"]


def apertus_decoder(keys: ConfigKeys) -> DecoderConfig:
    """An Apertus."""
    config = read_decoder(keys, gated=False, activation="xielu", eps=1e-5, theta=12e6)
    config = with_biases(config, keys).with_attention(qk_norm=QKNorm())
    return _with_xielu(config, keys)


def _with_xielu(config: DecoderConfig, keys: ConfigKeys) -> DecoderConfig:
    """The parameters of the activations, which GGUF files have as metadata."""
    xielu = keys.object("xielu")
    if xielu is None:
        return config
    values = {part: xielu.numbers(part, over=-math.inf) or [] for part in XIELU_PARAMETERS}
    for part, numbers in values.items():
        if len(numbers) != config.num_layers:
            raise xielu.error(part, f"{config.num_layers} numbers")
    for index, parameters in enumerate(zip(*values.values(), strict=True)):
        config = config.with_mlp([index], xielu=parameters)
    return config


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
    mlp = config.first_form(MLPForm)
    for part in XIELU_PARAMETERS if mlp is not None and mlp.activation == "xielu" else ():
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
        apertus_decoder,
        names=NAMES,
        gguf=GGUF,
    )
]
"""The architectures of this module, for the registry."""
