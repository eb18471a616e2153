"""Mamba and Mamba 2: blocks of one norm and one recurrent layer."""

from __future__ import annotations

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.models.config_fields import Fields, recurrent_fields
from max.pipelines.models.state_space_fields import (
    GGUF_MIXER_FORMS,
    MAMBA2_KEYS,
    MAMBA_KEYS,
    MIXER_FORMS,
    mamba2_form,
    mamba_form,
    mixer_names,
)
from max.pipelines.models.weight_names import WeightNames

__all__ = ["ARCHITECTURES"]


def mamba_fields(keys: ConfigKeys) -> Fields:
    """The fields of a Mamba's config."""
    fields = recurrent_fields(keys, tied=True)
    return fields | {"recurrence": mamba_form(keys, MAMBA_KEYS, fields["hidden_size"])}


def mamba2_fields(keys: ConfigKeys) -> Fields:
    """The fields of a Mamba 2's config."""
    fields = recurrent_fields(keys)
    return fields | {"recurrence": mamba2_form(keys, MAMBA2_KEYS, fields["hidden_size"])}


NAMES = WeightNames(
    prefix="backbone.",
    top={"embeddings": "embed_tokens", "embedding": "embed_tokens", "norm_f": "norm"},
    layer={"norm": "input_layernorm", **mixer_names("mixer")},
    converted=MIXER_FORMS,
    gguf_converted=GGUF_MIXER_FORMS,
)

ARCHITECTURES = [
    decoder_family(name, [example], fields, names=NAMES, rotates=False)
    for name, example, fields in (
        ("MambaForCausalLM", "state-spaces/mamba-130m-hf", mamba_fields),
        ("Mamba2ForCausalLM", "AntonV/mamba2-130m-hf", mamba2_fields),
    )
]
"""The architectures of this module, for the registry."""
