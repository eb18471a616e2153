"""Arcee: MLPs of a squared ReLU, without a gate."""

from __future__ import annotations

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.models.config_fields import Fields, base_fields, biases

__all__ = ["ARCHITECTURES"]


def arcee_fields(keys: ConfigKeys) -> Fields:
    """The fields of an Arcee's config."""
    fields = base_fields(keys, gated=False, activation="relu2", eps=1e-5)
    return fields | biases(keys, mlp="mlp_bias")


GGUF = GGUFForm("arcee", "arcee", permuted=True)

ARCHITECTURES = [decoder_family("ArceeForCausalLM", ["arcee-ai/AFM-4.5B"], arcee_fields, gguf=GGUF)]
"""The architectures of this module, for the registry."""
