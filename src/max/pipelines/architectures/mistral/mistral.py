"""Mistral: a Llama with an optional sliding window."""

from __future__ import annotations

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.config_values import window
from max.pipelines.models.decoder.read_config import read_decoder, with_windows

__all__ = ["ARCHITECTURES"]


def mistral_decoder(keys: ConfigKeys) -> DecoderConfig:
    """A Mistral."""
    # transformers' default for a file without the key is 4096
    return with_windows(read_decoder(keys), window(keys, 4096))


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
        mistral_decoder,
        gguf=GGUF,
    )
]
"""The architectures of this module, for the registry."""
