"""Granite: factors on embeddings, scores, residual sums and logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.config_values import nonzero
from max.pipelines.models.decoder.read_config import read_decoder, with_biases

__all__ = ["ARCHITECTURES", "granite_decoder", "granite_metadata", "with_factors"]


def granite_decoder(keys: ConfigKeys) -> DecoderConfig:
    """A Granite."""
    return with_factors(read_decoder(keys), keys)


def with_factors(config: DecoderConfig, keys: ConfigKeys) -> DecoderConfig:
    """The biases and factors of all Granites.

    Args:
        config: The decoder without.
        keys: The keys of config.json.
    """
    config = with_biases(config, keys, mlp="mlp_bias")
    # null: that of other families
    default = None if keys.states("attention_multiplier") else 1.0
    config = config.with_attention(scale=keys.number("attention_multiplier", default=default))
    config = config.with_blocks(residual_multiplier=keys.number("residual_multiplier", default=1.0))
    return replace(
        config,
        embedding_multiplier=keys.number("embedding_multiplier", default=1.0),
        logits_scaling=nonzero(keys, "logits_scaling", 1.0),
    )


def granite_metadata(config: DecoderConfig) -> dict[str, Any]:
    """The factors in the metadata of GGUF files.

    Args:
        config: The shape of the model.
    """
    attention = config.attention
    return {
        "embedding_scale": float(config.embedding_multiplier),
        "residual_scale": float(config.blocks[0].residual_multiplier),
        "logit_scale": float(config.logits_scaling),
        "attention.scale": float(attention.score_factor),
    }


GGUF = GGUFForm(
    "granite",
    "granite",
    keys={"logit_scale": "logits_scaling"},
    permuted=True,
    write=granite_metadata,
)

ARCHITECTURES = [
    decoder_family(
        "GraniteForCausalLM",
        ["ibm-granite/granite-3.3-2b-instruct"],
        granite_decoder,
        gguf=GGUF,
    )
]
"""The architectures of this module, for the registry."""
