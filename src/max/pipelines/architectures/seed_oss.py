"""Seed-OSS: biases of queries, keys and values."""

from __future__ import annotations

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.models.config_fields import Fields, base_fields

__all__ = ["ARCHITECTURES"]


def seed_oss_fields(keys: ConfigKeys) -> Fields:
    """The fields of a Seed-OSS's config."""
    return base_fields(keys, eps=1e-6) | {
        "attention_bias": keys.flag("attention_bias", True),
        "attention_output_bias": keys.flag("attention_out_bias"),
        "mlp_bias": keys.flag("mlp_bias"),
    }


GGUF = GGUFForm(
    "seed_oss",
    "seed_oss",
    keys={"attention_output_bias": "attention_out_bias"},
    layer={"post_attention_norm": "post_attention_layernorm"},
)

ARCHITECTURES = [
    decoder_family(
        "SeedOssForCausalLM", ["ByteDance-Seed/Seed-OSS-36B-Instruct"], seed_oss_fields, gguf=GGUF
    )
]
"""The architectures of this module, for the registry."""
