"""Qwen 3-Next and 3.5: gated delta nets, gated attention, experts or MLPs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import ExpertKeys, GGUFForm
from max.pipelines.gguf.metadata import Metadata
from max.pipelines.models.blocks.norms import NormForm, QKNorm
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.read_config import read_decoder, with_biases
from max.pipelines.models.decoder.read_delta_nets import STORED_PARTS, with_delta_nets
from max.pipelines.models.decoder.read_experts import EXPERT_NAMES, with_softmax_experts
from max.pipelines.models.decoder.read_state_space import GGUF_MIXER_FORMS, MIXER_FORMS, mixer_names
from max.pipelines.models.decoder.weight_names import WeightNames

__all__ = ["ARCHITECTURES"]


def read_hybrid(keys: ConfigKeys, *, fused: bool, sized: bool = True) -> DecoderConfig:
    """What all three share; `fused` is the layout of delta net projections, `sized` tells whether layers have MLPs."""
    names = {} if sized else {"intermediate_size": ""}
    config = read_decoder(keys, names, head_dim=256, eps=1e-6, longest=32768, partial_rotation=0.25)
    norm = NormForm(offset=1.0)
    config = with_biases(config, keys).with_attention(qk_norm=QKNorm(norm), gated=True)
    # no key of config.json states that published checkpoints have one
    config = replace(config, prediction_layers=1)
    return replace(with_delta_nets(config, keys, fused, not fused), norm=norm)


def _with_experts(config: DecoderConfig, keys: ConfigKeys) -> DecoderConfig:
    """The experts, with one shared expert."""
    sizes = {"size": "moe_intermediate_size", "shared_size_key": "shared_expert_intermediate_size"}
    return with_softmax_experts(config, keys, normalized=True, **sizes)


def qwen3_next_decoder(keys: ConfigKeys) -> DecoderConfig:
    """A Qwen 3-Next."""
    return _with_experts(read_hybrid(keys, fused=True), keys)


def qwen3_5_decoder(keys: ConfigKeys) -> DecoderConfig:
    """A Qwen 3.5."""
    return read_hybrid(keys, fused=False)


def qwen3_5_moe_decoder(keys: ConfigKeys) -> DecoderConfig:
    """A Qwen 3.5 MoE: all layers have experts."""
    return _with_experts(read_hybrid(keys, fused=False, sized=False), keys)


FUSED = {
    f"mlp.experts.{name}": f"mlp.experts.{name}.weight" for name in ("gate_up_proj", "down_proj")
}
NAMES = WeightNames(
    layer={**EXPERT_NAMES, **FUSED, **mixer_names("linear_attn")},
    stacks={"mlp.experts": "mlp.experts"},
    conversions=MIXER_FORMS,
    prediction={
        "mtp.layers.0": "",
        "mtp.fc": "eh_proj",
        "mtp.norm": "shared_head.norm",
        "mtp.pre_fc_norm_embedding": "enorm",
        "mtp.pre_fc_norm_hidden": "hnorm",
    },
)


def _read(metadata: Metadata) -> dict[str, Any]:
    """Layers with a query projection have attention, the others are delta nets."""
    heads = metadata.integer("ssm.time_step_rank")
    attends = {*metadata.layers_with("attn_q.weight")}
    return {
        "layer_types": [
            f"{'full' if index in attends else 'linear'}_attention"
            for index in range(metadata.layers)
        ],
        "linear_num_value_heads": heads,
        "linear_num_key_heads": metadata.integer("ssm.group_count"),
        "linear_key_head_dim": metadata.integer("ssm.state_size"),
        "linear_value_head_dim": metadata.integer("ssm.inner_size") // max(heads, 1),
        "linear_conv_kernel_dim": metadata.integer("ssm.conv_kernel"),
        "mlp_only_layers": metadata.layers_without("ffn_gate_inp.weight"),
    }


def _write_sections(config: DecoderConfig) -> dict[str, Any]:
    """The numbers of pairs rotated by time, height and width; for text these positions are equal."""
    rope = next(iter(config.ropes), None)
    if rope is None:
        return {}
    pairs = (rope.rotated_dim or config.attention.head_dim) // 2
    sections = [(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3, 0]
    return {"rope.dimension_sections": sections}


GGUF_NEXT = GGUFForm(
    "qwen3next",
    "qwen3_next",
    constants={"norm_topk_prob": True},
    hybrid=True,
    read=_read,
    layer=STORED_PARTS,
    fused_projections=("in_proj_ba",),
    conversions=GGUF_MIXER_FORMS,
    experts=ExpertKeys(dense_layers="tensors"),
)
GGUF_5_MOE = replace(
    GGUF_NEXT,
    name="qwen35moe",
    model_type="qwen3_5_moe_text",
    fused_projections=(),
    write=_write_sections,
)
GGUF_5 = replace(
    GGUF_5_MOE, name="qwen35", model_type="qwen3_5_text", constants={}, experts=ExpertKeys()
)

ARCHITECTURES = [
    decoder_family(
        "Qwen3NextForCausalLM",
        ["Qwen/Qwen3-Next-80B-A3B-Instruct"],
        qwen3_next_decoder,
        names=NAMES,
        gguf=GGUF_NEXT,
    ),
    decoder_family(
        "Qwen3_5ForCausalLM", ["Qwen/Qwen3.5-27B"], qwen3_5_decoder, names=NAMES, gguf=GGUF_5
    ),
    decoder_family(
        "Qwen3_5MoeForCausalLM",
        ["Qwen/Qwen3.5-35B-A3B"],
        qwen3_5_moe_decoder,
        names=NAMES,
        gguf=GGUF_5_MOE,
    ),
]
"""The architectures of this module, for the registry."""
