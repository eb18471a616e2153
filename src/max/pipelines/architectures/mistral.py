"""Mistral: a Llama with an optional sliding window."""

from __future__ import annotations

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.models.config_fields import Fields, base_fields, window

__all__ = ["ARCHITECTURES"]


def mistral_fields(keys: ConfigKeys) -> Fields:
    """The fields of a Mistral's config."""
    # transformers' default for a file without the key is 4096
    return base_fields(keys) | {"sliding_window": window(keys, 4096)}


GGUF = GGUFForm(
    "llama",
    "mistral",
    marks={"attention.sliding_window": None},
    lacks=("attention.sliding_window_pattern", "expert_count"),
    permuted=True,
)

ARCHITECTURES = [
    decoder_family(
        "MistralForCausalLM",
        ["mistralai/Mistral-7B-Instruct-v0.3"],
        mistral_fields,
        gguf=GGUF,
    )
]
"""The architectures of this module, for the registry."""
