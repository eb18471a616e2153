"""Cohere 2 (Command R7B, A): windows; layers without one are not rotated."""

from __future__ import annotations

from max.pipelines.architectures.cohere import cohere_fields, cohere_metadata
from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.models.config_fields import Fields, windows

__all__ = ["ARCHITECTURES"]


def cohere2_fields(keys: ConfigKeys) -> Fields:
    """The fields of a Cohere 2's config."""
    fields = cohere_fields(keys)
    fields |= windows(keys, fields["num_layers"], 4, 4096)
    return fields | {"unrotated_layers": fields["full_attention_layers"]}


GGUF = GGUFForm("cohere2", "cohere2", window_period=4, write=cohere_metadata)

ARCHITECTURES = [
    decoder_family(
        "Cohere2ForCausalLM", ["CohereForAI/c4ai-command-r7b-12-2024"], cohere2_fields, gguf=GGUF
    )
]
"""The architectures of this module, for the registry."""
