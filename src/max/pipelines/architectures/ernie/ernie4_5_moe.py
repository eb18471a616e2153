"""ERNIE 4.5 MoE: experts chosen by a corrected softmax, and some that all tokens share."""

from __future__ import annotations

from dataclasses import replace

from max.nn.moe import ExpertRouting
from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.architectures.ernie.ernie4_5 import ernie_decoder
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import ExpertKeys, GGUFForm
from max.pipelines.models.blocks.experts import Experts
from max.pipelines.models.blocks.rope import LONGEST_SEQUENCE
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.read_experts import EXPERT_NAMES
from max.pipelines.models.decoder.weight_names import WeightNames

__all__ = ["ARCHITECTURES"]


def ernie_moe_decoder(keys: ConfigKeys) -> DecoderConfig:
    """An ERNIE 4.5 MoE."""
    config = ernie_decoder(keys)
    layers = config.num_layers
    first = keys.integer("moe_layer_start_index", 0, LONGEST_SEQUENCE, 1)
    last = keys.integer("moe_layer_end_index", -1, LONGEST_SEQUENCE, -1)
    last = layers - 1 if last == -1 else last
    moe_interval = keys.integer("moe_layer_interval", 1, LONGEST_SEQUENCE, 1)
    with_experts = {i for i in range(first, min(last + 1, layers)) if (i + 1) % moe_interval == 0}
    count = keys.integer("moe_num_experts", 1, LONGEST_SEQUENCE)
    size = keys.integer("moe_intermediate_size", 1, LONGEST_SEQUENCE)
    routing = ExpertRouting(
        normalized=True,
        least_sum=keys.number("moe_norm_min", least=0, default=1e-12),
        has_correction=True,
        in_float32=True,
    )
    shared = size * keys.integer("moe_num_shared_experts", 0, LONGEST_SEQUENCE, 2)
    chosen, bias = keys.integer("moe_k", 1, count), keys.flag("use_bias")
    experts = Experts(count, chosen, size, routing, shared, shared_bias=bias)
    config = config.with_experts(experts, {*range(layers)} - with_experts)
    return replace(config, output_bias=bias)


_CORRECTION = "e_score_correction_bias"
NAMES = WeightNames(
    layer={**EXPERT_NAMES, f"mlp.moe_statics.{_CORRECTION}": f"mlp.gate.{_CORRECTION}"},
    stacks={"mlp.experts": "mlp.experts"},
    vectors=(_CORRECTION,),
    unused_parts=("mtp_",),
)

GGUF = GGUFForm(
    "ernie4_5-moe",
    "ernie4_5_moe",
    keys={
        "attention_bias": "use_bias",
        "num_experts": "moe_num_experts",
        "num_experts_per_tok": "moe_k",
        "n_shared_experts": "moe_num_shared_experts",
        "first_k_dense_replace": "moe_layer_start_index",
    },
    experts=ExpertKeys(shared_count=True),
    write=lambda config: {"interleave_moe_layer_step": 1} if config.first_form(Experts) else {},
)

ARCHITECTURES = [
    decoder_family(
        "Ernie4_5_MoeForCausalLM",
        ["baidu/ERNIE-4.5-21B-A3B-PT"],
        ernie_moe_decoder,
        names=NAMES,
        gguf=GGUF,
    )
]
"""The architectures of this module, for the registry."""
