"""OLMoE: layers of experts, QK norm over all heads."""

from __future__ import annotations

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.models.config_fields import Fields, base_fields, biases
from max.pipelines.models.expert_fields import EXPERT_NAMES, softmax_experts
from max.pipelines.models.norms import QKNorm
from max.pipelines.models.weight_names import WeightNames

__all__ = ["ARCHITECTURES"]


def olmoe_fields(keys: ConfigKeys) -> Fields:
    """The fields of an OLMoE's config."""
    fields = base_fields(keys, eps=1e-5)
    return (
        fields
        | biases(keys)
        | {
            "experts": softmax_experts(keys, fields["num_layers"], size="intermediate_size"),
            "qk_norm": QKNorm(over="all"),
            "clip_qkv": keys.number("clip_qkv", over=0, default=None),
        }
    )


NAMES = WeightNames(layer=EXPERT_NAMES, stacked={"mlp.experts": "mlp.experts"})

GGUF = GGUFForm("olmoe", "olmoe")

ARCHITECTURES = [
    decoder_family(
        "OlmoeForCausalLM",
        ["allenai/OLMoE-1B-7B-0924-Instruct"],
        olmoe_fields,
        names=NAMES,
        gguf=GGUF,
    )
]
"""The architectures of this module, for the registry."""
