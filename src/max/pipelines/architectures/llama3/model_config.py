"""The config.json of a Llama."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.checkpoints.model_types import with_type
from max.pipelines.models.decoder_config import DecoderConfig
from max.pipelines.models.rope import RopeConfig

__all__ = ["Llama3Config", "RopeConfig"]


@dataclass(frozen=True)
class Llama3Config(DecoderConfig):
    """The shape of a Llama; see `DecoderConfig` for the fields."""

    @classmethod
    def fields_from(cls, keys: ConfigKeys) -> dict[str, Any]:
        """The fields by name.

        Args:
            keys: The keys of config.json.

        Raises:
            ModelFilesError: A value is missing, or does not fit.
        """
        keys = with_type(keys, "LlamaForCausalLM")
        # in Hugging Face's Llama, attention_bias adds a bias to the output projection too
        bias, separate = keys.flag("attention_bias"), keys.value("model_type") == "internlm3"
        return super().fields_from(keys) | {
            "attention_bias": bias,
            # InternLM 3 has separate flags for queries, keys and values, and for all others
            "attention_output_bias": keys.flag("mlp_bias") if separate else bias,
            "mlp_bias": keys.flag("mlp_bias"),
        }
