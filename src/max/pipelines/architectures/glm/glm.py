"""GLM 4 (9B) and GLM-4-0414: partly rotated heads with adjacent pairs; the latter also normalizes outputs."""

from __future__ import annotations

from typing import Any

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.read_config import read_decoder
from max.pipelines.models.decoder.weight_names import WeightNames

__all__ = ["ARCHITECTURES"]


def glm_decoder(keys: ConfigKeys) -> DecoderConfig:
    """A GLM."""
    config = read_decoder(keys, head_dim=128, eps=1.5625e-7, longest=131072, partial_rotation=0.5)
    return config.with_attention(bias=keys.flag("attention_bias", True), interleaved=True)


def glm4_decoder(keys: ConfigKeys) -> DecoderConfig:
    """A GLM-4-0414."""
    places = ("attention_input", "attention_output", "mlp_input", "mlp_output")
    return glm_decoder(keys).with_blocks(norms=places)


NAMES = WeightNames(
    layer={
        "post_self_attn_layernorm": "attention_output_norm",
        "post_mlp_layernorm": "mlp_output_norm",
    },
)

FUSED: dict[str, Any] = {
    "layer": {"ffn_up": "mlp.gate_up_proj"},
    "fused_projections": ("gate_up_proj",),
}

ARCHITECTURES = [
    decoder_family(
        "GlmForCausalLM",
        ["THUDM/glm-4-9b-chat-hf"],
        glm_decoder,
        gguf=GGUFForm("chatglm", "glm", **FUSED),
    ),
    decoder_family(
        "Glm4ForCausalLM",
        ["THUDM/GLM-4-9B-0414"],
        glm4_decoder,
        names=NAMES,
        gguf=GGUFForm("glm4", "glm4", **FUSED),
    ),
]
"""The architectures of this module, for the registry."""
