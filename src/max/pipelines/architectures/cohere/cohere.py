"""Cohere (Command R): attention and MLP in parallel, scaled logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.models.blocks.norms import NormForm, QKNorm
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.config_values import nonzero
from max.pipelines.models.decoder.read_config import read_decoder, with_biases

__all__ = ["ARCHITECTURES", "cohere_decoder", "cohere_metadata"]


def cohere_decoder(keys: ConfigKeys) -> DecoderConfig:
    """A Cohere."""
    names = {"rms_norm_eps": "layer_norm_eps"}
    config = read_decoder(keys, names, tied=True, eps=1e-5, longest=8192)
    norm = NormForm("layer")
    qk_norm = QKNorm(norm, "each_head") if keys.flag("use_qk_norm") else None
    config = with_biases(config, keys).with_attention(interleaved=True, qk_norm=qk_norm)
    config = config.with_blocks(norms=("attention_input",), parallel=True)
    return replace(config, norm=norm, logits_scaling=1 / nonzero(keys, "logit_scale", 0.0625))


def cohere_metadata(config: DecoderConfig) -> dict[str, Any]:
    """The metadata of GGUF files that only these families state.

    Args:
        config: The shape of the model.
    """
    return {"logit_scale": 1.0 / config.logits_scaling}


GGUF = GGUFForm("command-r", "cohere", keys={"qk_norm": "use_qk_norm"}, write=cohere_metadata)

ARCHITECTURES = [
    decoder_family(
        "CohereForCausalLM", ["CohereForAI/c4ai-command-r-v01"], cohere_decoder, gguf=GGUF
    )
]
"""The architectures of this module, for the registry."""
