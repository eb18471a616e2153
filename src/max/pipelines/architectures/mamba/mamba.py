"""Mamba and Mamba 2: blocks of one norm and one recurrent layer."""

from __future__ import annotations

from typing import Any

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.gguf.metadata import Metadata
from max.pipelines.gguf.scan_keys import SCAN_KEYS, scan_keys
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.read_config import read_recurrent
from max.pipelines.models.decoder.read_state_space import (
    GGUF_MIXER_FORMS,
    MAMBA2_KEYS,
    MAMBA_KEYS,
    MIXER_FORMS,
    mamba2_form,
    mamba_form,
    mixer_names,
)
from max.pipelines.models.decoder.weight_names import WeightNames

__all__ = ["ARCHITECTURES"]


def mamba_decoder(keys: ConfigKeys) -> DecoderConfig:
    """A Mamba."""
    return read_recurrent(keys, lambda hidden: mamba_form(keys, MAMBA_KEYS, hidden), tied=True)


def mamba2_decoder(keys: ConfigKeys) -> DecoderConfig:
    """A Mamba 2."""
    return read_recurrent(keys, lambda hidden: mamba2_form(keys, MAMBA2_KEYS, hidden))


NAMES = WeightNames(
    prefix="backbone.",
    top={"embeddings": "embed_tokens", "embedding": "embed_tokens", "norm_f": "norm"},
    layer={"norm": "input_layernorm", **mixer_names("mixer")},
    conversions=MIXER_FORMS,
)


def _read(metadata: Metadata) -> dict[str, Any]:
    """The sizes under the keys of models that have only such layers."""
    keys = {SCAN_KEYS[key]: value for key, value in scan_keys(metadata).items()}
    inner, epsilon = metadata.integer("ssm.inner_size"), metadata.rms_epsilon()
    return {**keys, "layer_norm_epsilon": epsilon, "intermediate_size": inner}


ARCHITECTURES = [
    decoder_family(
        name,
        [example],
        fields,
        names=NAMES,
        rotates=False,
        gguf=GGUFForm(stored, stored, hybrid=True, read=_read, conversions=GGUF_MIXER_FORMS),
    )
    for name, example, fields, stored in (
        ("MambaForCausalLM", "state-spaces/mamba-130m-hf", mamba_decoder, "mamba"),
        ("Mamba2ForCausalLM", "AntonV/mamba2-130m-hf", mamba2_decoder, "mamba2"),
    )
]
"""The architectures of this module, for the registry."""
