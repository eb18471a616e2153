"""OLMo 2: norms of the outputs of attention and MLP, QK norm over all heads."""

from __future__ import annotations

from typing import Any

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.models.config_fields import Fields, base_fields, biases
from max.pipelines.models.norms import QKNorm
from max.pipelines.models.weight_names import OUTPUT_NORMS, WeightNames

__all__ = ["ARCHITECTURES", "olmo2_fields"]


def olmo2_fields(keys: ConfigKeys, **defaults: Any) -> Fields:
    """The fields of an OLMo 2's config; `defaults` are arguments of `base_fields`."""
    return (
        base_fields(keys, eps=1e-5, **defaults)
        | biases(keys)
        | {"norm_places": ("attention_output", "mlp_output"), "qk_norm": QKNorm(over="all")}
    )


GGUF = GGUFForm("olmo2", "olmo2")

ARCHITECTURES = [
    decoder_family(
        "Olmo2ForCausalLM",
        ["allenai/OLMo-2-0425-1B-Instruct"],
        olmo2_fields,
        names=WeightNames(layer=OUTPUT_NORMS),
        gguf=GGUF,
    )
]
"""The architectures of this module, for the registry."""
