"""Gemma 4 (text): heads of another size in layers without a window, keys as values, experts beside the MLP."""

from __future__ import annotations

from max.nn.moe import ExpertRouting
from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.models.config_fields import LARGEST_SIZE, Fields
from max.pipelines.models.experts import Experts
from max.pipelines.models.per_layer_fields import (
    PER_LAYER_NAMES,
    PER_LAYER_TOP,
    full_heads,
    per_layer_fields,
)
from max.pipelines.models.weight_names import SANDWICH_NORMS, WeightNames

__all__ = ["ARCHITECTURES"]


def gemma4_fields(keys: ConfigKeys) -> Fields:
    """The fields of a Gemma 4's config."""
    fields = full_heads(keys, per_layer_fields(keys, 6, 0))
    layers, inner = fields["num_layers"], keys.integer("intermediate_size", 1, LARGEST_SIZE, 9216)
    sizes = [inner] * layers
    if keys.flag("use_double_wide_mlp"):
        own = layers - fields["shared_kv_layers"]
        sizes[own:] = [2 * inner] * (layers - own)
    fields |= {"intermediate_size": max(sizes), "layer_sizes": tuple(sizes), "gated_blocks": True}
    if keys.flag("enable_moe_block"):
        count = keys.integer("num_experts", 1, LARGEST_SIZE)
        chosen = keys.integer("top_k_experts", 1, count)
        size = keys.integer("moe_intermediate_size", 1, LARGEST_SIZE)
        fields["experts_beside"] = Experts(count, chosen, size, ExpertRouting(normalised=True))
    return fields


_BESIDE = {
    "experts.gate_up_proj": "beside.experts.gate_up_proj.weight",
    "experts.down_proj": "beside.experts.down_proj.weight",
    "router.scale": "beside.scale",
    "router.per_expert_scale": "beside.per_expert_scale",
    "router.proj": "beside.gate.gate_score",
    "pre_feedforward_layernorm_2": "beside.input_norm",
    "post_feedforward_layernorm_2": "beside.output_norm",
    "post_feedforward_layernorm_1": "beside.mlp_norm",
}
_STORED_BESIDE = {
    "ffn_gate_inp": "beside.gate.gate_score",
    "ffn_gate_inp.scale": "beside.scale",
    "ffn_gate_up_exps": "beside.experts.gate_up_proj",
    "ffn_down_exps": "beside.experts.down_proj",
    "ffn_down_exps.scale": "beside.per_expert_scale",
}
NAMES = WeightNames(
    top=PER_LAYER_TOP,
    layer={**SANDWICH_NORMS, **PER_LAYER_NAMES, **_BESIDE},
    gguf_layer=_STORED_BESIDE,
)

ARCHITECTURES = [
    decoder_family("Gemma4ForCausalLM", ["google/gemma-4-E2B-it"], gemma4_fields, names=NAMES)
]
"""The architectures of this module, for the registry."""
