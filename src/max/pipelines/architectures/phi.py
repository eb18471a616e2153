"""Phi 1, 1.5 and 2: attention and MLP in parallel, partly rotated heads, biases everywhere."""

from __future__ import annotations

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.models.config_fields import EVERY_BIAS, Fields, base_fields
from max.pipelines.models.norms import NormForm, QKNorm
from max.pipelines.models.weight_names import WeightNames

__all__ = ["ARCHITECTURES"]


def phi_fields(keys: ConfigKeys) -> Fields:
    """The fields of a Phi's config."""
    names = {"rms_norm_eps": "layer_norm_eps"}
    fields = base_fields(
        keys, names, gated=False, activation="gelu_new", eps=1e-5, partial_rotation=0.5
    )
    form = NormForm("layer", bias=True)
    return fields | {
        "norm": form,
        "norm_places": ("attention_input",),
        "parallel": True,
        "qk_norm": QKNorm(form) if keys.flag("qk_layernorm") else None,
        **EVERY_BIAS,
        "output_bias": True,
    }


NAMES = WeightNames(
    top={"final_layernorm": "norm"},
    layer={
        "self_attn.dense": "self_attn.o_proj",
        "self_attn.q_layernorm": "self_attn.q_norm",
        "self_attn.k_layernorm": "self_attn.k_norm",
        "mlp.fc1": "mlp.up_proj",
        "mlp.fc2": "mlp.down_proj",
    },
)

GGUF = GGUFForm("phi2", "phi", keys={"qk_norm": "qk_layernorm"}, fused=("qkv_proj",))

ARCHITECTURES = [
    decoder_family("PhiForCausalLM", ["microsoft/phi-2"], phi_fields, names=NAMES, gguf=GGUF)
]
"""The architectures of this module, for the registry."""
