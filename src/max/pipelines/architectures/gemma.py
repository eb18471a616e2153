"""Gemma: norms whose weights are offsets from 1, scaled embeddings, a gated GELU."""

from __future__ import annotations

from typing import Any

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.models.config_fields import Fields, base_fields, biases
from max.pipelines.models.norms import NormForm

__all__ = ["ARCHITECTURES", "gemma_fields"]


def gemma_fields(config: Any, keys: ConfigKeys, **defaults: Any) -> Fields:
    """The fields of a Gemma's config; `defaults` are arguments of `base_fields`."""
    fields = base_fields(
        config,
        keys,
        {"hidden_act": ""},
        head_dim=256,
        tied=True,
        eps=1e-6,
        longest=8192,
        **defaults,
    )
    # files say gelu, and mean its approximation by tanh
    names = ("gelu", "gelu_pytorch_tanh", "gelu_new")
    for key in ("hidden_act", "hidden_activation"):
        keys.choice(key, names, names[1])
    return (
        fields
        | biases(keys)
        | {
            "activation": "gelu_tanh",
            "norm": NormForm(offset=1.0),
            "embedding_multiplier": fields["hidden_size"] ** 0.5,
        }
    )


ARCHITECTURES = [decoder_family("GemmaForCausalLM", ["google/gemma-2b-it"], gemma_fields)]
"""The architectures of this module, for the registry."""
