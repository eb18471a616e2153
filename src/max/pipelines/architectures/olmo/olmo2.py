"""OLMo 2: norms of the outputs of attention and MLP, QK norm over all heads."""

from __future__ import annotations

from typing import Any

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.models.blocks.norms import QKNorm
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.read_config import read_decoder, with_biases
from max.pipelines.models.decoder.weight_names import OUTPUT_NORMS, WeightNames

__all__ = ["ARCHITECTURES", "olmo2_decoder"]


def olmo2_decoder(keys: ConfigKeys, **defaults: Any) -> DecoderConfig:
    """An OLMo 2; `defaults` are arguments of `read_decoder`."""
    config = with_biases(read_decoder(keys, eps=1e-5, **defaults), keys)
    config = config.with_blocks(norms=("attention_output", "mlp_output"))
    return config.with_attention(qk_norm=QKNorm(over="all"))


GGUF = GGUFForm("olmo2", "olmo2")

ARCHITECTURES = [
    decoder_family(
        "Olmo2ForCausalLM",
        ["allenai/OLMo-2-0425-1B-Instruct"],
        olmo2_decoder,
        names=WeightNames(layer=OUTPUT_NORMS),
        gguf=GGUF,
    )
]
"""The architectures of this module, for the registry."""
