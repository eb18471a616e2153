"""SmolLM 3: every fourth layer is not rotated."""

from __future__ import annotations

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.models.config_fields import (
    Fields,
    base_fields,
    biases,
    layers_of_type,
    unrotated_layers,
    window,
)

__all__ = ["ARCHITECTURES"]


def smollm3_fields(keys: ConfigKeys) -> Fields:
    """The fields of a SmolLM 3's config."""
    fields = base_fields(keys, tied=True, eps=1e-6, longest=32768, theta=2e6)
    layers = fields["num_layers"]
    full = layers_of_type(keys, layers, frozenset(range(layers)))
    windowed = keys.flag("use_sliding_window")
    return (
        fields
        | biases(keys, mlp="mlp_bias")
        | {
            "unrotated_layers": unrotated_layers(keys, layers),
            "sliding_window": window(keys) if windowed else None,
            "full_attention_layers": full,
        }
    )


GGUF = GGUFForm("smollm3", "smollm3", permuted=True)

ARCHITECTURES = [
    decoder_family("SmolLM3ForCausalLM", ["HuggingFaceTB/SmolLM3-3B"], smollm3_fields, gguf=GGUF)
]
"""The architectures of this module, for the registry."""
