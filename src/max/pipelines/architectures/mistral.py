"""Mistral: a Llama whose tokens may see a sliding window only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from max.pipelines.architectures.float_decoder import float_decoder
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.models.decoder_config import DecoderConfig
from max.pipelines.models.decoder_model import DecoderModel
from max.pipelines.models.rope import LONGEST_SEQUENCE

__all__ = ["ARCHITECTURES", "MistralConfig", "MistralModel"]


@dataclass(frozen=True)
class MistralConfig(DecoderConfig):
    """The shape of a Mistral; see `DecoderConfig` for the fields."""

    @classmethod
    def fields_from(cls, config: Any, keys: ConfigKeys) -> dict[str, Any]:
        """The fields by name.

        Args:
            config: The keys of config.json as attributes.
            keys: The same keys, with checks.

        Raises:
            ModelFilesError: A value is missing, or does not fit.
        """
        # null means no window; transformers' default for a file without the key is 4096
        default = None if hasattr(config, "sliding_window") else 4096
        return super().fields_from(config, keys) | {
            "sliding_window": keys.integer("sliding_window", 1, LONGEST_SEQUENCE, default),
        }


class MistralModel(DecoderModel):
    """A Mistral that picks the next tokens in its graph."""

    config_class = MistralConfig


ARCHITECTURES = [
    float_decoder("MistralForCausalLM", MistralModel, ["mistralai/Mistral-7B-Instruct-v0.3"])
]
"""The architectures of this module, for the registry."""
