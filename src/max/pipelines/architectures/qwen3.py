"""Qwen3: query and key heads are normalised before RoPE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from max.pipelines.architectures.float_decoder import float_decoder
from max.pipelines.architectures.qwen2 import Qwen2Config
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.models.decoder_model import DecoderModel

__all__ = ["ARCHITECTURES", "Qwen3Config", "Qwen3Model"]


@dataclass(frozen=True)
class Qwen3Config(Qwen2Config):
    """The shape of a Qwen3; see `DecoderConfig` for the fields."""

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
        return super().fields_from(config, keys) | {
            "attention_bias": bias,
            "attention_output_bias": bias,
            "qk_norm": True,
        }


class Qwen3Model(DecoderModel):
    """A Qwen3 that picks the next tokens in its graph."""

    config_class = Qwen3Config


ARCHITECTURES = [
    float_decoder("Qwen3ForCausalLM", Qwen3Model, ["Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B"])
]
"""The architectures of this module, for the registry."""
