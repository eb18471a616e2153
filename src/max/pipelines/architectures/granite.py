"""Granite: factors on embeddings, scores, residual sums and logits."""

from __future__ import annotations

from typing import Any

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.models.config_fields import Fields, base_fields, nonzero
from max.pipelines.models.decoder_config import DecoderConfig

__all__ = ["ARCHITECTURES", "granite_fields", "granite_metadata"]

_FACTORS = (
    "embedding_multiplier",
    "residual_multiplier",
)


def granite_fields(keys: ConfigKeys) -> Fields:
    """The fields of a Granite's config."""
    bias = keys.flag("attention_bias")
    return base_fields(keys) | {
        "attention_bias": bias,
        "attention_output_bias": bias,
        "mlp_bias": keys.flag("mlp_bias"),
        **{name: keys.number(name, default=1.0) for name in _FACTORS},
        # null: that of other families
        "attention_multiplier": keys.number(
            "attention_multiplier", default=None if keys.states("attention_multiplier") else 1.0
        ),
        "logits_scaling": nonzero(keys, "logits_scaling", 1.0),
    }


def granite_metadata(config: DecoderConfig) -> dict[str, Any]:
    """The factors in the metadata of GGUF files.

    Args:
        config: The shape of the model.
    """
    multiplier = config.attention_multiplier
    return {
        "embedding_scale": float(config.embedding_multiplier),
        "residual_scale": float(config.residual_multiplier),
        "logit_scale": float(config.logits_scaling),
        "attention.scale": float(config.head_dim**-0.5 if multiplier is None else multiplier),
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
        granite_fields,
        gguf=GGUF,
    )
]
"""The architectures of this module, for the registry."""
