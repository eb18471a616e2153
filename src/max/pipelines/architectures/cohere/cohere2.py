"""Cohere 2 (Command R7B, A): windows; layers without one are not rotated."""

from __future__ import annotations

from max.pipelines.architectures.cohere.cohere import cohere_decoder, cohere_metadata
from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.config_values import periodic_windows
from max.pipelines.models.decoder.read_config import with_windows

__all__ = ["ARCHITECTURES"]


def cohere2_decoder(keys: ConfigKeys) -> DecoderConfig:
    """A Cohere 2."""
    config = cohere_decoder(keys)
    window, full = periodic_windows(keys, config.num_layers, 4, 4096)
    return with_windows(config, window, full).with_attention(full, rope=None)


GGUF = GGUFForm("cohere2", "cohere2", window_period=4, write=cohere_metadata)

ARCHITECTURES = [
    decoder_family(
        "Cohere2ForCausalLM", ["CohereForAI/c4ai-command-r7b-12-2024"], cohere2_decoder, gguf=GGUF
    )
]
"""The architectures of this module, for the registry."""
