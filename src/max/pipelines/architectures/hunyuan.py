"""Hunyuan (dense): queries and keys are normalised after the rotation."""

from __future__ import annotations

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.models.config_fields import Fields, base_fields, biases
from max.pipelines.models.norms import QKNorm
from max.pipelines.models.weight_names import WeightNames

__all__ = ["ARCHITECTURES", "hunyuan_fields", "NAMES"]


def hunyuan_fields(keys: ConfigKeys) -> Fields:
    """The fields of a Hunyuan's config."""
    fields = base_fields(keys, eps=1e-5)
    return fields | biases(keys) | {"qk_norm": QKNorm(after_rotation=True)}


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
        hunyuan_fields,
        names=NAMES,
        gguf=GGUF,
    )
]
"""The architectures of this module, for the registry."""
