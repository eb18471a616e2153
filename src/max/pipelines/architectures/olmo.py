"""OLMo: layer norms without parameters, clamped queries, keys and values."""

from __future__ import annotations

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.models.config_fields import Fields, base_fields, biases
from max.pipelines.models.norms import NormForm

__all__ = ["ARCHITECTURES"]


def olmo_fields(keys: ConfigKeys) -> Fields:
    """The fields of an OLMo's config."""
    fields = base_fields(keys, {"rms_norm_eps": ""}, eps=1e-5)
    return (
        fields
        | biases(keys)
        | {
            "norm": NormForm("layer", weight=False),
            "clip_qkv": keys.number("clip_qkv", over=0, default=None),
        }
    )


GGUF = GGUFForm("olmo", "olmo", permuted=True, needs_epsilon=False)

ARCHITECTURES = [decoder_family("OlmoForCausalLM", ["allenai/OLMo-1B-hf"], olmo_fields, gguf=GGUF)]
"""The architectures of this module, for the registry."""
