"""Nemotron: layer norms whose weights are offsets from 1, MLPs of a squared ReLU."""

from __future__ import annotations

from dataclasses import replace

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.models.blocks.norms import NormForm
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.read_config import read_decoder, with_biases

__all__ = ["ARCHITECTURES"]


def nemotron_decoder(keys: ConfigKeys) -> DecoderConfig:
    """A Nemotron."""
    config = read_decoder(
        keys,
        {"rms_norm_eps": "norm_eps"},
        gated=False,
        activation="relu2",
        eps=1e-5,
        longest=4096,
        partial_rotation=0.5,
    )
    config = with_biases(config, keys, mlp="mlp_bias")
    return replace(config, norm=NormForm("layer", bias=True, offset=1.0))


GGUF = GGUFForm("nemotron", "nemotron", keys={"layer_norm_eps": "norm_eps"})

ARCHITECTURES = [
    decoder_family("NemotronForCausalLM", ["nvidia/Minitron-4B-Base"], nemotron_decoder, gguf=GGUF)
]
"""The architectures of this module, for the registry."""
