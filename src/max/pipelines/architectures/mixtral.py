"""Mixtral: a Mistral with experts."""

from __future__ import annotations

from dataclasses import replace

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import ExpertKeys, GGUFForm
from max.pipelines.models.config_fields import Fields, base_fields, window
from max.pipelines.models.expert_fields import softmax_experts
from max.pipelines.models.weight_names import WeightNames

__all__ = ["ARCHITECTURES", "NAMES"]


def mixtral_fields(keys: ConfigKeys) -> Fields:
    """The fields of a Mixtral's config."""
    fields = base_fields(keys, eps=1e-5, theta=1e6)
    experts = softmax_experts(
        keys, fields["num_layers"], count="num_local_experts", size="intermediate_size"
    )
    # a softmax over the chosen experts equals the softmax over all experts, normalised over the chosen
    routing = replace(experts.routing, normalised=True)
    return fields | {
        "experts": replace(experts, routing=routing),
        "sliding_window": window(keys),
    }


NAMES = WeightNames(
    layer={
        "block_sparse_moe.gate": "mlp.gate.gate_score",
        "block_sparse_moe": "mlp",
        "w1": "gate_proj",
        "w2": "down_proj",
        "w3": "up_proj",
    },
    stacked={"mlp.experts": "mlp.experts"},
)
"""Mixtral's names of weights."""

GGUF = GGUFForm(
    "llama",
    "mixtral",
    keys={"num_experts": "num_local_experts"},
    marks={"expert_count": None},
    permuted=True,
    experts=ExpertKeys(weights=False),
)

ARCHITECTURES = [
    decoder_family(
        "MixtralForCausalLM",
        ["mistralai/Mixtral-8x7B-Instruct-v0.1"],
        mixtral_fields,
        names=NAMES,
        gguf=GGUF,
    )
]
"""The architectures of this module, for the registry."""
