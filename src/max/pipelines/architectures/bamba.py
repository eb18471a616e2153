"""Bamba: blocks of Mamba 2 and of attention, each with an MLP."""

from __future__ import annotations

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.models.config_fields import Fields, base_fields
from max.pipelines.models.state_space_fields import (
    HYBRID_KEYS,
    HYBRID_LAYER,
    HYBRID_TOP,
    MIXER_FORMS,
    kinds_of_layers,
    layer_numbers,
    mamba2_form,
)
from max.pipelines.models.weight_names import WeightNames

__all__ = ["ARCHITECTURES"]


def bamba_fields(keys: ConfigKeys) -> Fields:
    """The fields of a Bamba's config."""
    # transformers reads the share in ``rope_parameters`` only
    own = keys.renamed({"partial_rotary_factor": ""})
    fields = base_fields(own, eps=1e-5, partial_rotation=0.5)
    layers = fields["num_layers"]
    attends = layer_numbers(keys, "attn_layer_indices", layers)
    bias = keys.flag("attention_bias")
    return fields | {
        "layer_kinds": kinds_of_layers(keys, "layers_block_type", layers, attends),
        "recurrence": mamba2_form(keys, HYBRID_KEYS, fields["hidden_size"]),
        "attention_bias": bias,
        "attention_output_bias": bias,
        "mlp_bias": keys.flag("mlp_bias"),
    }


ARCHITECTURES = [
    decoder_family(
        "BambaForCausalLM",
        ["ibm-ai-platform/Bamba-9B-v2"],
        bamba_fields,
        names=WeightNames(top=HYBRID_TOP, layer=HYBRID_LAYER, converted=MIXER_FORMS),
    )
]
"""The architectures of this module, for the registry."""
