"""Qwen3: query and key heads are normalised before RoPE."""

from __future__ import annotations

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.architectures.qwen2 import qwen2_fields
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.models.config_fields import Fields
from max.pipelines.models.norms import QKNorm

__all__ = ["ARCHITECTURES", "qwen3_fields"]


def qwen3_fields(keys: ConfigKeys) -> Fields:
    """The fields of a Qwen3's config."""
    bias = keys.flag("attention_bias")
    return qwen2_fields(keys) | {
        "attention_bias": bias,
        "attention_output_bias": bias,
        "qk_norm": QKNorm(),
    }


GGUF = GGUFForm("qwen3", "qwen3")

ARCHITECTURES = [
    decoder_family(
        "Qwen3ForCausalLM", ["Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B"], qwen3_fields, gguf=GGUF
    )
]
"""The architectures of this module, for the registry."""
