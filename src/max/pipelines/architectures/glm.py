"""GLM 4 (9B) and GLM-4-0414: partly rotated heads with adjacent pairs; the latter also normalises outputs."""

from __future__ import annotations

from typing import Any

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.models.config_fields import Fields, base_fields
from max.pipelines.models.weight_names import WeightNames

__all__ = ["ARCHITECTURES"]


def glm_fields(keys: ConfigKeys) -> Fields:
    """The fields of a GLM's config."""
    fields = base_fields(keys, head_dim=128, eps=1.5625e-7, longest=131072, partial_rotation=0.5)
    return fields | {
        "attention_bias": keys.flag("attention_bias", True),
        "interleaved_rope": True,
    }


def glm4_fields(keys: ConfigKeys) -> Fields:
    """The fields of a GLM-4-0414's config."""
    places = ("attention_input", "attention_output", "mlp_input", "mlp_output")
    return glm_fields(keys) | {"norm_places": places}


NAMES = WeightNames(
    layer={
        "post_self_attn_layernorm": "attention_output_norm",
        "post_mlp_layernorm": "mlp_output_norm",
    },
)

FUSED: dict[str, Any] = {"layer": {"ffn_up": "mlp.gate_up_proj"}, "fused": ("gate_up_proj",)}

ARCHITECTURES = [
    decoder_family(
        "GlmForCausalLM",
        ["THUDM/glm-4-9b-chat-hf"],
        glm_fields,
        gguf=GGUFForm("chatglm", "glm", **FUSED),
    ),
    decoder_family(
        "Glm4ForCausalLM",
        ["THUDM/GLM-4-9B-0414"],
        glm4_fields,
        names=NAMES,
        gguf=GGUFForm("glm4", "glm4", **FUSED),
    ),
]
"""The architectures of this module, for the registry."""
