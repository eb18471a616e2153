"""Seed-OSS: biases of queries, keys and values."""

from __future__ import annotations

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.read_config import read_decoder

__all__ = ["ARCHITECTURES"]


def seed_oss_decoder(keys: ConfigKeys) -> DecoderConfig:
    """A Seed-OSS."""
    config = read_decoder(keys, eps=1e-6).with_attention(
        bias=keys.flag("attention_bias", True), output_bias=keys.flag("attention_out_bias")
    )
    return config.with_mlp(bias=keys.flag("mlp_bias"))


GGUF = GGUFForm(
    "seed_oss",
    "seed_oss",
    keys={"attention_output_bias": "attention_out_bias"},
    layer={"post_attention_norm": "post_attention_layernorm"},
)

ARCHITECTURES = [
    decoder_family(
        "SeedOssForCausalLM", ["ByteDance-Seed/Seed-OSS-36B-Instruct"], seed_oss_decoder, gguf=GGUF
    )
]
"""The architectures of this module, for the registry."""
