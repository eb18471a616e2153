"""Qwen 3-Next and 3.5: gated delta nets, gated attention, experts or MLPs."""

from __future__ import annotations

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.models.config_fields import Fields, base_fields, biases
from max.pipelines.models.delta_net_fields import STORED_PARTS, delta_net_fields
from max.pipelines.models.expert_fields import EXPERT_NAMES, softmax_experts
from max.pipelines.models.norms import NormForm, QKNorm
from max.pipelines.models.state_space_fields import GGUF_MIXER_FORMS, MIXER_FORMS, mixer_names
from max.pipelines.models.weight_names import WeightNames

__all__ = ["ARCHITECTURES"]


def hybrid_fields(keys: ConfigKeys, *, fused: bool, sized: bool = True) -> Fields:
    """The fields of all three; `fused` is the layout of delta net projections, `sized` tells whether layers have
    MLPs.
    """
    names = {} if sized else {"intermediate_size": ""}
    fields = base_fields(keys, names, head_dim=256, eps=1e-6, longest=32768, partial_rotation=0.25)
    fields |= biases(keys) | delta_net_fields(keys, fields["num_layers"], fused, not fused)
    norm = NormForm(offset=1.0)
    return fields | {"norm": norm, "qk_norm": QKNorm(norm), "attention_gate": True}


def experts(keys: ConfigKeys, layers: int) -> Fields:
    """The experts, with one shared expert."""
    sizes = {"size": "moe_intermediate_size", "shared": "shared_expert_intermediate_size"}
    return {"experts": softmax_experts(keys, layers, normalised=True, **sizes)}


def qwen3_next_fields(keys: ConfigKeys) -> Fields:
    """The fields of a Qwen 3-Next's config."""
    fields = hybrid_fields(keys, fused=True)
    return fields | experts(keys, fields["num_layers"])


def qwen3_5_fields(keys: ConfigKeys) -> Fields:
    """The fields of a Qwen 3.5's config."""
    return hybrid_fields(keys, fused=False)


def qwen3_5_moe_fields(keys: ConfigKeys) -> Fields:
    """The fields of a Qwen 3.5 MoE's config: all layers have experts."""
    fields = hybrid_fields(keys, fused=False, sized=False)
    inner = keys.integer("moe_intermediate_size", 1, 2**24)
    return fields | experts(keys, fields["num_layers"]) | {"intermediate_size": inner}


FUSED = {
    f"mlp.experts.{name}": f"mlp.experts.{name}.weight" for name in ("gate_up_proj", "down_proj")
}
NAMES = WeightNames(
    layer={**EXPERT_NAMES, **FUSED, **mixer_names("linear_attn")},
    stacked={"mlp.experts": "mlp.experts"},
    converted=MIXER_FORMS,
    unused_parts=("mtp.",),
    gguf_layer=STORED_PARTS,
    gguf_converted=GGUF_MIXER_FORMS,
)

ARCHITECTURES = [
    decoder_family(
        "Qwen3NextForCausalLM", ["Qwen/Qwen3-Next-80B-A3B-Instruct"], qwen3_next_fields, names=NAMES
    ),
    decoder_family("Qwen3_5ForCausalLM", ["Qwen/Qwen3.5-27B"], qwen3_5_fields, names=NAMES),
    decoder_family(
        "Qwen3_5MoeForCausalLM", ["Qwen/Qwen3.5-35B-A3B"], qwen3_5_moe_fields, names=NAMES
    ),
]
"""The architectures of this module, for the registry."""
