"""Qwen2 and Qwen2.5: queries, keys and values have biases; later layers may have a window."""

from __future__ import annotations

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.models.config_fields import Fields, base_fields, layers_of_type
from max.pipelines.models.rope import LONGEST_SEQUENCE

__all__ = ["ARCHITECTURES", "qwen2_fields"]


def qwen2_fields(keys: ConfigKeys) -> Fields:
    """The fields of a Qwen2's config."""
    fields = base_fields(keys)
    if keys.flag("use_sliding_window"):
        fields["sliding_window"] = keys.integer("sliding_window", 1, LONGEST_SEQUENCE, 4096)
    layers = fields["num_layers"]
    first = min(layers, keys.integer("max_window_layers", 0, LONGEST_SEQUENCE, 28))
    full = layers_of_type(keys, layers, frozenset(range(first)))
    return fields | {"attention_bias": True, "full_attention_layers": full}


GGUF = GGUFForm("qwen2", "qwen2")

ARCHITECTURES = [
    decoder_family(
        "Qwen2ForCausalLM",
        ["Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-7B-Instruct"],
        qwen2_fields,
        gguf=GGUF,
    )
]
"""The architectures of this module, for the registry."""
