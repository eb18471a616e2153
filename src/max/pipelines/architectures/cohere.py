"""Cohere (Command R): attention and MLP in parallel, scaled logits."""

from __future__ import annotations

from typing import Any

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.models.config_fields import Fields, base_fields, biases, nonzero
from max.pipelines.models.decoder_config import DecoderConfig
from max.pipelines.models.norms import NormForm, QKNorm

__all__ = ["ARCHITECTURES", "cohere_fields", "cohere_metadata"]


def cohere_fields(keys: ConfigKeys) -> Fields:
    """The fields of a Cohere's config."""
    names = {"rms_norm_eps": "layer_norm_eps"}
    fields = base_fields(keys, names, tied=True, eps=1e-5, longest=8192)
    form = NormForm("layer")
    return (
        fields
        | biases(keys)
        | {
            "norm": form,
            "norm_places": ("attention_input",),
            "parallel": True,
            "interleaved_rope": True,
            "qk_norm": QKNorm(form, "each_head") if keys.flag("use_qk_norm") else None,
            "logits_scaling": 1 / nonzero(keys, "logit_scale", 0.0625),
        }
    )


def cohere_metadata(config: DecoderConfig) -> dict[str, Any]:
    """The metadata of GGUF files that only these families state.

    Args:
        config: The shape of the model.
    """
    return {"logit_scale": 1.0 / config.logits_scaling}


GGUF = GGUFForm("command-r", "cohere", keys={"qk_norm": "use_qk_norm"}, write=cohere_metadata)

ARCHITECTURES = [
    decoder_family(
        "CohereForCausalLM", ["CohereForAI/c4ai-command-r-v01"], cohere_fields, gguf=GGUF
    )
]
"""The architectures of this module, for the registry."""
