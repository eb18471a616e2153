"""Helium: a Llama whose rotated pairs are adjacent."""

from __future__ import annotations

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.models.config_fields import Fields, base_fields

__all__ = ["ARCHITECTURES"]


def helium_fields(keys: ConfigKeys) -> Fields:
    """The fields of a Helium's config."""
    return base_fields(keys, head_dim=128, eps=1e-8, longest=4096) | {
        "attention_bias": keys.flag("attention_bias"),
        "mlp_bias": keys.flag("mlp_bias"),
        "interleaved_rope": True,
    }


ARCHITECTURES = [decoder_family("HeliumForCausalLM", ["kyutai/helium-1-2b"], helium_fields)]
"""The architectures of this module, for the registry."""
