"""Apertus: MLPs of xIELU, without a gate; QK norm."""

from __future__ import annotations

import math

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.models.config_fields import Fields, base_fields, biases
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

ARCHITECTURES = [
    decoder_family(
        "ApertusForCausalLM", ["swiss-ai/Apertus-8B-Instruct-2509"], apertus_fields, names=NAMES
    )
]
"""The architectures of this module, for the registry."""
