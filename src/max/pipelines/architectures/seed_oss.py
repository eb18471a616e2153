"""Seed-OSS: biases of queries, keys and values."""

from __future__ import annotations

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.models.config_fields import Fields, base_fields
from max.pipelines.models.weight_names import WeightNames

__all__ = ["ARCHITECTURES"]


def seed_oss_fields(keys: ConfigKeys) -> Fields:
    """The fields of a Seed-OSS's config."""
    return base_fields(keys, eps=1e-6) | {
        "attention_bias": keys.flag("attention_bias", True),
        "attention_output_bias": keys.flag("attention_out_bias"),
        "mlp_bias": keys.flag("mlp_bias"),
    }


ARCHITECTURES = [
    decoder_family(
        "SeedOssForCausalLM",
        ["ByteDance-Seed/Seed-OSS-36B-Instruct"],
        seed_oss_fields,
        names=WeightNames(gguf_layer={"post_attention_norm": "post_attention_layernorm"}),
    )
]
"""The architectures of this module, for the registry."""
