"""Gemma: norms whose weights are offsets from 1, scaled embeddings, a gated GELU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.models.blocks.feed_forward import MLPForm
from max.pipelines.models.blocks.norms import NormForm
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.read_config import read_decoder, with_biases

__all__ = ["ARCHITECTURES", "read_gemma"]


def read_gemma(keys: ConfigKeys, act: str = "hidden_activation", **defaults: Any) -> DecoderConfig:
    """What Gemma 1 to 3 have in common; `act` names the activation, `defaults` are arguments of `read_decoder`."""
    config = read_decoder(
        keys,
        {"hidden_act": act},
        head_dim=256,
        tied=True,
        activation="gelu_pytorch_tanh",
        eps=1e-6,
        longest=8192,
        **defaults,
    )
    return replace(
        with_biases(config, keys),
        norm=NormForm(offset=1.0),
        embedding_multiplier=config.hidden_size**0.5,
        rounds_multiplier=True,
    )


def gemma1_decoder(keys: ConfigKeys) -> DecoderConfig:
    """A Gemma."""
    config = read_gemma(keys, "hidden_act")
    # the first files state gelu but mean its tanh approximation
    mlp = config.first_form(MLPForm)
    if mlp is not None and mlp.activation == "gelu":
        return config.with_mlp(activation="gelu_tanh")
    return config


GGUF = GGUFForm("gemma", "gemma")

ARCHITECTURES = [
    decoder_family("GemmaForCausalLM", ["google/gemma-2b-it"], gemma1_decoder, gguf=GGUF)
]
"""The architectures of this module, for the registry."""
