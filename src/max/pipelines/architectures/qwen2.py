"""Qwen2 and Qwen2.5: queries, keys and values have biases; later layers may see a window only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from max.pipelines.architectures.float_decoder import float_decoder
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.models.decoder_config import DecoderConfig, full_attention_layers
from max.pipelines.models.decoder_model import DecoderModel
from max.pipelines.models.rope import LONGEST_SEQUENCE

__all__ = ["ARCHITECTURES", "Qwen2Config", "Qwen2Model"]


@dataclass(frozen=True)
class Qwen2Config(DecoderConfig):
    """The shape of a Qwen2; see `DecoderConfig` for the fields."""

    @classmethod
    def fields_from(cls, config: Any, keys: ConfigKeys) -> dict[str, Any]:
        """The fields by name.

        Args:
            config: The keys of config.json as attributes.
            keys: The same keys, with checks.

        Raises:
            ModelFilesError: A value is missing, or does not fit.
        """
        fields = super().fields_from(config, keys)
        if keys.flag("use_sliding_window"):
            fields["sliding_window"] = keys.integer("sliding_window", 1, LONGEST_SEQUENCE, 4096)
        layers = fields["num_layers"]
        first = min(layers, keys.integer("max_window_layers", 0, LONGEST_SEQUENCE, 28))
        full = full_attention_layers(keys, layers, frozenset(range(first)))
        return fields | {"attention_bias": True, "full_attention_layers": full}


class Qwen2Model(DecoderModel):
    """A Qwen2 that picks the next tokens in its graph."""

    config_class = Qwen2Config


ARCHITECTURES = [
    float_decoder(
        "Qwen2ForCausalLM", Qwen2Model, ["Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-7B-Instruct"]
    )
]
"""The architectures of this module, for the registry."""
