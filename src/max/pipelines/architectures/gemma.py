"""Gemma: norms whose weights are offsets from 1, scaled embeddings, a gated GELU."""

from __future__ import annotations

from typing import Any

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.models.config_fields import Fields, base_fields, biases
from max.pipelines.models.norms import NormForm

__all__ = ["ARCHITECTURES", "gemma_fields"]


def gemma_fields(keys: ConfigKeys, act: str = "hidden_activation", **defaults: Any) -> Fields:
    """The fields that Gemma 1 to 3 have in common; `act` names the activation, `defaults` are arguments of
    `base_fields`.
    """
    fields = base_fields(
        keys,
        {"hidden_act": act},
        head_dim=256,
        tied=True,
        activation="gelu_pytorch_tanh",
        eps=1e-6,
        longest=8192,
        **defaults,
    )
    return (
        fields
        | biases(keys)
        | {
            "norm": NormForm(offset=1.0),
            "embedding_multiplier": fields["hidden_size"] ** 0.5,
            "rounds_multiplier": True,
        }
    )


def gemma1_fields(keys: ConfigKeys) -> Fields:
    """The fields of a Gemma's config."""
    fields = gemma_fields(keys, "hidden_act")
    # the first files state gelu but mean its tanh approximation
    return fields | ({"activation": "gelu_tanh"} if fields["activation"] == "gelu" else {})


GGUF = GGUFForm("gemma", "gemma")

ARCHITECTURES = [
    decoder_family("GemmaForCausalLM", ["google/gemma-2b-it"], gemma1_fields, gguf=GGUF)
]
"""The architectures of this module, for the registry."""
