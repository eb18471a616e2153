"""GraniteMoE: a Granite with experts, and in the shared form with an MLP that all tokens share."""

from __future__ import annotations

from dataclasses import replace

from max.nn.moe import ExpertRouting
from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.architectures.granite.granite import granite_decoder, granite_metadata
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import ExpertKeys, GGUFForm
from max.pipelines.models.blocks.experts import Experts
from max.pipelines.models.blocks.rope import LONGEST_SEQUENCE
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.weight_names import WeightNames

__all__ = ["ARCHITECTURES"]


def granite_moe_decoder(keys: ConfigKeys) -> DecoderConfig:
    """A GraniteMoE."""
    config = granite_decoder(keys)
    count = keys.integer("num_local_experts", 1, LONGEST_SEQUENCE, 8)
    experts = Experts(
        count,
        keys.integer("num_experts_per_tok", 1, count, 2),
        keys.integer("intermediate_size", 1, LONGEST_SEQUENCE),
        ExpertRouting("softmax_of_chosen"),
        keys.integer("shared_intermediate_size", 0, LONGEST_SEQUENCE, 0),
    )
    return config.with_experts(experts)


NAMES = WeightNames(
    layer={
        "block_sparse_moe.router.layer": "mlp.gate.gate_score",
        # adapters have the names of modules
        "block_sparse_moe.router.weight": "mlp.gate.gate_score.weight",
        "block_sparse_moe.input_linear": "mlp.experts.gate_up_proj",
        "block_sparse_moe.output_linear": "mlp.experts.down_proj",
        "shared_mlp.input_linear": "mlp.shared.gate_up_proj",
        "shared_mlp.output_linear": "mlp.shared.down_proj",
    }
)

GGUF = GGUFForm(
    "granitemoe",
    "granitemoe",
    keys={
        "num_experts": "num_local_experts",
        "logit_scale": "logits_scaling",
        "shared_expert_intermediate_size": "shared_intermediate_size",
    },
    permuted=True,
    experts=ExpertKeys(weights=False),
    write=granite_metadata,
)

ARCHITECTURES = [
    decoder_family(name, [example], granite_moe_decoder, names=NAMES, gguf=gguf)
    for name, example, gguf in (
        ("GraniteMoeForCausalLM", "ibm-granite/granite-3.1-3b-a800m-instruct", GGUF),
        (
            "GraniteMoeSharedForCausalLM",
            "ibm-research/moe-7b-1b-active-shared-experts",
            replace(GGUF, reads=False),
        ),
    )
]
"""The architectures of this module, for the registry."""
