"""Arcee: MLPs of a squared ReLU, without a gate."""

from __future__ import annotations

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.read_config import read_decoder, with_biases

__all__ = ["ARCHITECTURES"]


def arcee_decoder(keys: ConfigKeys) -> DecoderConfig:
    """An Arcee."""
    config = read_decoder(keys, gated=False, activation="relu2", eps=1e-5)
    return with_biases(config, keys, mlp="mlp_bias")


GGUF = GGUFForm("arcee", "arcee", permuted=True)

ARCHITECTURES = [
    decoder_family("ArceeForCausalLM", ["arcee-ai/AFM-4.5B"], arcee_decoder, gguf=GGUF)
]
"""The architectures of this module, for the registry."""
