"""Qwen2 MoE and Qwen3 MoE: layers of experts; the former has a shared expert."""

from __future__ import annotations

from typing import Any

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.architectures.qwen2 import qwen2_fields
from max.pipelines.architectures.qwen3 import qwen3_fields
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import ExpertKeys, GGUFForm
from max.pipelines.gguf.metadata import Metadata
from max.pipelines.models.config_fields import Fields, layers_of_type
from max.pipelines.models.expert_fields import EXPERT_NAMES, softmax_experts
from max.pipelines.models.rope import LONGEST_SEQUENCE
from max.pipelines.models.weight_names import WeightNames

__all__ = ["ARCHITECTURES"]


def qwen2_moe_fields(keys: ConfigKeys) -> Fields:
    """The fields of a Qwen2 MoE's config."""
    fields = qwen2_fields(keys)
    layers = fields["num_layers"]
    first = keys.integer("max_window_layers", 0, LONGEST_SEQUENCE, 28)
    # another default than Qwen2's
    slides = fields.get("sliding_window") is not None
    full = frozenset(i for i in range(layers) if i % 2 or i >= first or not slides)
    experts = softmax_experts(
        keys,
        fields["num_layers"],
        size="moe_intermediate_size",
        shared="shared_expert_intermediate_size",
    )
    return fields | {
        "attention_bias": keys.flag("qkv_bias", True),
        "experts": experts,
        "full_attention_layers": layers_of_type(keys, layers, full),
    }


def qwen3_moe_fields(keys: ConfigKeys) -> Fields:
    """The fields of a Qwen3 MoE's config."""
    fields = qwen3_fields(keys)
    experts = softmax_experts(keys, fields["num_layers"], size="moe_intermediate_size")
    return fields | {"experts": experts, "full_attention_layers": frozenset[int]()}


NAMES = WeightNames(layer=EXPERT_NAMES, stacked={"mlp.experts": "mlp.experts"})


def dense_layers(metadata: Metadata) -> dict[str, Any]:
    """The layers without experts in a GGUF file: they have no router.

    Args:
        metadata: The file's metadata.
    """
    return {"mlp_only_layers": metadata.layers_without("ffn_gate_inp.weight")}


EXPERTS = ExpertKeys(dense_layers="tensors")
GGUF_2 = GGUFForm(
    "qwen2moe",
    "qwen2_moe",
    keys={"attention_bias": "qkv_bias"},
    experts=EXPERTS,
    read=dense_layers,
)
GGUF_3 = GGUFForm(
    "qwen3moe",
    "qwen3_moe",
    constants={"norm_topk_prob": True},
    experts=EXPERTS,
    read=dense_layers,
)

ARCHITECTURES = [
    decoder_family(
        "Qwen2MoeForCausalLM",
        ["Qwen/Qwen1.5-MoE-A2.7B-Chat"],
        qwen2_moe_fields,
        names=NAMES,
        gguf=GGUF_2,
    ),
    decoder_family(
        "Qwen3MoeForCausalLM", ["Qwen/Qwen3-30B-A3B"], qwen3_moe_fields, names=NAMES, gguf=GGUF_3
    ),
]
"""The architectures of this module, for the registry."""
