"""Helium: a Llama whose rotated pairs are adjacent."""

from __future__ import annotations

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.read_config import read_decoder

__all__ = ["ARCHITECTURES"]


def helium_decoder(keys: ConfigKeys) -> DecoderConfig:
    """A Helium."""
    config = read_decoder(keys, head_dim=128, eps=1e-8, longest=4096)
    config = config.with_attention(bias=keys.flag("attention_bias"), interleaved=True)
    return config.with_mlp(bias=keys.flag("mlp_bias"))


ARCHITECTURES = [decoder_family("HeliumForCausalLM", ["kyutai/helium-1-2b"], helium_decoder)]
"""The architectures of this module, for the registry."""
