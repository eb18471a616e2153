"""OLMo: layer norms without parameters, clamped queries, keys and values."""

from __future__ import annotations

from dataclasses import replace

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.models.blocks.norms import NormForm
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.read_config import read_decoder, with_biases

__all__ = ["ARCHITECTURES"]


def olmo_decoder(keys: ConfigKeys) -> DecoderConfig:
    """An OLMo."""
    config = with_biases(read_decoder(keys, {"rms_norm_eps": ""}, eps=1e-5), keys)
    config = config.with_attention(clip=keys.number("clip_qkv", over=0, default=None))
    return replace(config, norm=NormForm("layer", weight=False))


GGUF = GGUFForm("olmo", "olmo", permuted=True, needs_epsilon=False)

ARCHITECTURES = [decoder_family("OlmoForCausalLM", ["allenai/OLMo-1B-hf"], olmo_decoder, gguf=GGUF)]
"""The architectures of this module, for the registry."""
