"""DeepSeek V2, V3 and V3.2, and Kimi K2: latent attention, experts in groups and shared ones."""

from __future__ import annotations

from dataclasses import replace

from max.nn.moe import ExpertRouting
from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.models.config_fields import Fields
from max.pipelines.models.expert_fields import EXPERT_NAMES, grouped_experts
from max.pipelines.models.latent_fields import indexed_fields, latent_fields
from max.pipelines.models.weight_names import WeightNames

__all__ = ["ARCHITECTURES"]


def deepseek_v3_fields(keys: ConfigKeys) -> Fields:
    """The fields of a DeepSeek V3's config; Kimi K2 has the same."""
    keys.choice("scoring_func", ("sigmoid",), "sigmoid")
    keys.choice("topk_method", ("noaux_tc",), "noaux_tc")
    keys.integer("moe_layer_freq", 1, 1, 1)
    return latent_fields(keys, eps=1e-6, longest=4096) | {"experts": grouped_experts(keys)}


def deepseek_v32_fields(keys: ConfigKeys) -> Fields:
    """The fields of a DeepSeek V3.2's config: attention sees the tokens that an indexer selects."""
    return indexed_fields(deepseek_v3_fields(keys), keys)


def deepseek_v2_fields(keys: ConfigKeys) -> Fields:
    """The fields of a DeepSeek V2's config."""
    keys.choice("scoring_func", ("softmax",), "softmax")
    keys.integer("moe_layer_freq", 1, 1, 1)
    # transformers ignores norm_topk_prob
    bias = keys.flag("mlp_bias")
    grouped = keys.choice("topk_method", ("greedy", "group_limited_greedy"), "greedy") != "greedy"
    experts = grouped_experts(keys)
    routing = ExpertRouting(
        scale=experts.routing.scale,
        groups=experts.routing.groups if grouped else 1,
        chosen_groups=experts.routing.chosen_groups if grouped else 1,
        in_float32=True,
    )
    return latent_fields(keys, eps=1e-6) | {
        "mlp_bias": bias,
        "experts": replace(experts, routing=routing, shared_bias=bias),
    }


NAMES = WeightNames(layer=EXPERT_NAMES, stacked={"mlp.experts": "mlp.experts"})

ARCHITECTURES = [
    decoder_family(name, [example], fields, names=NAMES)
    for name, example, fields in (
        ("DeepseekV2ForCausalLM", "deepseek-ai/DeepSeek-V2-Lite-Chat", deepseek_v2_fields),
        ("DeepseekV3ForCausalLM", "deepseek-ai/DeepSeek-V3", deepseek_v3_fields),
        ("DeepseekV32ForCausalLM", "deepseek-ai/DeepSeek-V3.2", deepseek_v32_fields),
    )
]
"""The architectures of this module, for the registry."""
