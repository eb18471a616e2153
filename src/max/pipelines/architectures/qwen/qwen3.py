"""Qwen3: query and key heads are normalized before RoPE."""

from __future__ import annotations

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.architectures.qwen.qwen2 import qwen2_decoder
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.models.blocks.norms import QKNorm
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.read_config import with_biases

__all__ = ["ARCHITECTURES", "qwen3_decoder"]


def qwen3_decoder(keys: ConfigKeys) -> DecoderConfig:
    """A Qwen3."""
    return with_biases(qwen2_decoder(keys), keys).with_attention(qk_norm=QKNorm())


GGUF = GGUFForm("qwen3", "qwen3")

ARCHITECTURES = [
    decoder_family(
        "Qwen3ForCausalLM", ["Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B"], qwen3_decoder, gguf=GGUF
    )
]
"""The architectures of this module, for the registry."""
