"""Nemotron-H: blocks of one norm with a Mamba 2, an attention without rotation, an MLP, or experts without gates."""

from __future__ import annotations

from dataclasses import replace

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.models.config_fields import Fields, base_fields
from max.pipelines.models.expert_fields import latent_experts
from max.pipelines.models.state_space_fields import (
    GGUF_MIXER_FORMS,
    MIXER_FORMS,
    NEMOTRON_KEYS,
    NEMOTRON_LAYER,
    kinds_of_pattern,
    mamba2_form,
)
from max.pipelines.models.weight_names import WeightNames

__all__ = ["ARCHITECTURES"]

KEYS = {
    "rms_norm_eps": "layer_norm_epsilon",
    "hidden_act": "mlp_hidden_act",
    "num_hidden_layers": "",
}


def nemotron_h_fields(keys: ConfigKeys) -> Fields:
    """The fields of a Nemotron-H's config."""
    fields = base_fields(
        keys, KEYS, eps=1e-5, gated=False, activation="relu2", longest=4096, rotates=False
    )
    kinds, routed = kinds_of_pattern(keys)
    form = mamba2_form(keys, NEMOTRON_KEYS, activation="mamba_hidden_act")
    limits = keys.number("time_step_min", over=0, default=0.001), float("inf")
    bias = keys.flag("mlp_bias")
    dense = frozenset(range(len(kinds))) - routed
    return fields | {
        "num_layers": len(kinds),
        # transformers ignores the key
        "tie_word_embeddings": False,
        "layer_kinds": kinds,
        "recurrence": replace(form, limits=limits),
        "norm_places": ("attention_input",),
        "mixers_alone": True,
        "mlp_bias": bias,
        "experts": latent_experts(keys, dense, bias) if routed else None,
    }


NAMES = WeightNames(
    prefix=("model.", "backbone."),
    top={"embeddings": "embed_tokens", "norm_f": "norm"},
    layer=NEMOTRON_LAYER,
    stacked={"mlp.experts": "mlp.experts"},
    unused_parts=("mtp.",),
    converted=MIXER_FORMS,
    gguf_converted=GGUF_MIXER_FORMS,
)

ARCHITECTURES = [
    decoder_family(
        "NemotronHForCausalLM", ["nvidia/Nemotron-H-8B-Base-8K"], nemotron_h_fields, names=NAMES
    )
]
"""The architectures of this module, for the registry."""
