"""OLMoE: layers of experts, QK norm over all heads."""

from __future__ import annotations

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.models.blocks.norms import QKNorm
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.read_config import read_decoder, with_biases
from max.pipelines.models.decoder.read_experts import EXPERT_NAMES, with_softmax_experts
from max.pipelines.models.decoder.weight_names import WeightNames

__all__ = ["ARCHITECTURES"]


def olmoe_decoder(keys: ConfigKeys) -> DecoderConfig:
    """An OLMoE."""
    config = with_biases(read_decoder(keys, eps=1e-5), keys)
    config = with_softmax_experts(config, keys, size="intermediate_size")
    clip = keys.number("clip_qkv", over=0, default=None)
    return config.with_attention(qk_norm=QKNorm(over="all"), clip=clip)


NAMES = WeightNames(layer=EXPERT_NAMES, stacks={"mlp.experts": "mlp.experts"})

GGUF = GGUFForm("olmoe", "olmoe")

ARCHITECTURES = [
    decoder_family(
        "OlmoeForCausalLM",
        ["allenai/OLMoE-1B-7B-0924-Instruct"],
        olmoe_decoder,
        names=NAMES,
        gguf=GGUF,
    )
]
"""The architectures of this module, for the registry."""
