"""LFM 2 MoE: an LFM 2 with experts."""

from __future__ import annotations

from dataclasses import replace

from max.nn.moe import ExpertRouting
from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.architectures.lfm2.lfm2 import GGUF as DENSE_GGUF
from max.pipelines.architectures.lfm2.lfm2 import LAYER_NAMES, STORED_FORMS, lfm2_decoder
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import ExpertKeys
from max.pipelines.models.blocks.experts import Experts
from max.pipelines.models.blocks.rope import LONGEST_SEQUENCE
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.weight_names import WeightNames

__all__ = ["ARCHITECTURES"]


def lfm2_moe_decoder(keys: ConfigKeys) -> DecoderConfig:
    """An LFM 2 MoE."""
    count = keys.integer("num_experts", 1, LONGEST_SEQUENCE, 32)
    routing = ExpertRouting(
        "sigmoid",
        normalized=keys.flag("norm_topk_prob", True),
        scale=keys.number("routed_scaling_factor", over=0, default=1.0),
        has_correction=keys.flag("use_expert_bias", True),
        sum_offset=1e-6,
    )
    experts = Experts(
        count,
        keys.integer("num_experts_per_tok", 1, count, 4),
        keys.integer("moe_intermediate_size", 1, LONGEST_SEQUENCE, 1792),
        routing,
    )
    dense = range(keys.integer("num_dense_layers", 0, 1000, 2))
    return lfm2_decoder(keys).with_experts(experts, dense)


NAMES = WeightNames(
    top={"embedding_norm": "norm"},
    layer={
        **LAYER_NAMES,
        "feed_forward": "mlp",
        "feed_forward.gate": "mlp.gate.gate_score",
        "feed_forward.expert_bias": "mlp.gate.e_score_correction_bias",
        "w1": "gate_proj",
        "w2": "down_proj",
        "w3": "up_proj",
    },
    stacks={"mlp.experts": "mlp.experts"},
    conversions=STORED_FORMS,
)

GGUF = replace(
    DENSE_GGUF,
    name="lfm2moe",
    model_type="lfm2_moe",
    keys={"first_k_dense_replace": "num_dense_layers"},
    experts=ExpertKeys(scoring=True),
)

ARCHITECTURES = [
    decoder_family(
        "Lfm2MoeForCausalLM", ["LiquidAI/LFM2-8B-A1B"], lfm2_moe_decoder, names=NAMES, gguf=GGUF
    )
]
"""The architectures of this module, for the registry."""
