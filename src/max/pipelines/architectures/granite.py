"""Granite: factors on embeddings, scores, residual sums and logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from max.pipelines.architectures.float_decoder import float_decoder
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.models.decoder_config import DecoderConfig
from max.pipelines.models.decoder_model import DecoderModel

__all__ = ["ARCHITECTURES", "GraniteConfig", "GraniteModel"]


@dataclass(frozen=True)
class GraniteConfig(DecoderConfig):
    """The shape of a Granite; see `DecoderConfig` for the fields."""

    @classmethod
    def fields_from(cls, config: Any, keys: ConfigKeys) -> dict[str, Any]:
        """The fields by name.

        Args:
            config: The keys of config.json as attributes.
            keys: The same keys, with checks.

        Raises:
            ModelFilesError: A value is missing, or does not fit.
        """
        bias = keys.flag("attention_bias")
        factors = (
            "embedding_multiplier",
            "attention_multiplier",
            "residual_multiplier",
            "logits_scaling",
        )
        return super().fields_from(config, keys) | {
            "attention_bias": bias,
            "attention_output_bias": bias,
            "mlp_bias": keys.flag("mlp_bias"),
            **{name: keys.number(name, over=0, default=1.0) for name in factors},
        }


class GraniteModel(DecoderModel):
    """A Granite that picks the next tokens in its graph."""

    config_class = GraniteConfig


ARCHITECTURES = [
    float_decoder("GraniteForCausalLM", GraniteModel, ["ibm-granite/granite-3.3-2b-instruct"])
]
"""The architectures of this module, for the registry."""
