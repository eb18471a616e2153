"""Nemotron: layer norms whose weights are offsets from 1, MLPs of a squared ReLU."""

from __future__ import annotations

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.models.config_fields import Fields, base_fields, biases
from max.pipelines.models.norms import NormForm

__all__ = ["ARCHITECTURES"]


def nemotron_fields(keys: ConfigKeys) -> Fields:
    """The fields of a Nemotron's config."""
    fields = base_fields(
        keys,
        {"rms_norm_eps": "norm_eps"},
        gated=False,
        activation="relu2",
        eps=1e-5,
        longest=4096,
        partial_rotation=0.5,
    )
    form = NormForm("layer", bias=True, offset=1.0)
    return fields | biases(keys, mlp="mlp_bias") | {"norm": form}


GGUF = GGUFForm("nemotron", "nemotron", keys={"layer_norm_eps": "norm_eps"})

ARCHITECTURES = [
    decoder_family("NemotronForCausalLM", ["nvidia/Minitron-4B-Base"], nemotron_fields, gguf=GGUF)
]
"""The architectures of this module, for the registry."""
