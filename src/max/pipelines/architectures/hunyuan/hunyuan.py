"""Hunyuan (dense): queries and keys are normalized after the rotation."""

from __future__ import annotations

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.models.blocks.norms import QKNorm
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.read_config import read_decoder, with_biases
from max.pipelines.models.decoder.weight_names import WeightNames

__all__ = ["ARCHITECTURES", "hunyuan_decoder", "NAMES"]


def hunyuan_decoder(keys: ConfigKeys) -> DecoderConfig:
    """A Hunyuan."""
    config = with_biases(read_decoder(keys, eps=1e-5), keys)
    return config.with_attention(qk_norm=QKNorm(after_rotation=True))


NAMES = WeightNames(
    layer={
        "self_attn.query_layernorm": "self_attn.q_norm",
        "self_attn.key_layernorm": "self_attn.k_norm",
    }
)

GGUF = GGUFForm("hunyuan-dense", "hunyuan_v1_dense")

ARCHITECTURES = [
    decoder_family(
        "HunYuanDenseV1ForCausalLM",
        ["tencent/Hunyuan-0.5B-Instruct"],
        hunyuan_decoder,
        names=NAMES,
        gguf=GGUF,
    )
]
"""The architectures of this module, for the registry."""
