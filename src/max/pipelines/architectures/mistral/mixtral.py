"""Mixtral: a Mistral with experts."""

from __future__ import annotations

from dataclasses import replace

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import ExpertKeys, GGUFForm
from max.pipelines.models.blocks.experts import Experts
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.config_values import window
from max.pipelines.models.decoder.read_config import read_decoder, with_windows
from max.pipelines.models.decoder.read_experts import with_softmax_experts
from max.pipelines.models.decoder.weight_names import WeightNames

__all__ = ["ARCHITECTURES", "NAMES"]


def mixtral_decoder(keys: ConfigKeys) -> DecoderConfig:
    """A Mixtral."""
    config = read_decoder(keys, eps=1e-5, theta=1e6)
    config = with_softmax_experts(config, keys, count="num_local_experts", size="intermediate_size")
    # a softmax over the chosen experts equals the softmax over all experts, normalized over the chosen
    for index, experts in enumerate(config.every(Experts)):
        routing = replace(experts.routing, normalized=True)
        own = replace(experts, routing=routing)
        config = config.with_blocks([index], feed_forward=own)
    return with_windows(config, window(keys))


NAMES = WeightNames(
    layer={
        "block_sparse_moe.gate": "mlp.gate.gate_score",
        # adapters have the names of modules, which are those of other families
        "mlp.gate.weight": "mlp.gate.gate_score.weight",
        "block_sparse_moe": "mlp",
        "w1": "gate_proj",
        "w2": "down_proj",
        "w3": "up_proj",
    },
    stacks={"mlp.experts": "mlp.experts"},
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
        mixtral_decoder,
        names=NAMES,
        gguf=GGUF,
    )
]
"""The architectures of this module, for the registry."""
