"""Bamba: blocks of Mamba 2 and of attention, each with an MLP."""

from __future__ import annotations

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.read_config import read_decoder, with_biases
from max.pipelines.models.decoder.read_state_space import (
    HYBRID_KEYS,
    HYBRID_LAYER,
    HYBRID_TOP,
    MIXER_FORMS,
    kinds_of_layers,
    layer_numbers,
    mamba2_form,
    with_kinds,
)
from max.pipelines.models.decoder.weight_names import WeightNames

__all__ = ["ARCHITECTURES"]


def bamba_decoder(keys: ConfigKeys) -> DecoderConfig:
    """A Bamba."""
    # transformers reads the share in ``rope_parameters`` only
    own = keys.with_names({"partial_rotary_factor": ""})
    config = read_decoder(own, eps=1e-5, partial_rotation=0.5)
    config = with_biases(config, keys, mlp="mlp_bias")
    attends = layer_numbers(keys, "attn_layer_indices", config.num_layers)
    kinds = kinds_of_layers(keys, "layers_block_type", config.num_layers, attends)
    return with_kinds(config, kinds, mamba2_form(keys, HYBRID_KEYS, config.hidden_size))


ARCHITECTURES = [
    decoder_family(
        "BambaForCausalLM",
        ["ibm-ai-platform/Bamba-9B-v2"],
        bamba_decoder,
        names=WeightNames(top=HYBRID_TOP, layer=HYBRID_LAYER, conversions=MIXER_FORMS),
    )
]
"""The architectures of this module, for the registry."""
