"""Nemotron-H: blocks of one norm with a Mamba 2, an attention without rotation, or an MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.models.config_fields import Fields, base_fields
from max.pipelines.models.state_space_fields import (
    GGUF_MIXER_FORMS,
    MIXER_FORMS,
    NEMOTRON_KEYS,
    kinds_of_pattern,
    mamba2_form,
    mixer_names,
)
from max.pipelines.models.weight_names import WeightNames

__all__ = ["ARCHITECTURES"]

KEYS = {
    "rms_norm_eps": "layer_norm_epsilon",
    "hidden_act": "mlp_hidden_act",
    "num_hidden_layers": "",
}


def nemotron_h_fields(config: Any, keys: ConfigKeys) -> Fields:
    """The fields of a Nemotron-H's config."""
    fields = base_fields(
        config, keys, KEYS, eps=1e-5, gated=False, activation="relu2", longest=4096, rotates=False
    )
    kinds = kinds_of_pattern(keys)
    form = mamba2_form(keys, NEMOTRON_KEYS, activation="mamba_hidden_act")
    limits = keys.number("time_step_min", over=0, default=0.001), float("inf")
    return fields | {
        "num_layers": len(kinds),
        "layer_kinds": kinds,
        "recurrence": replace(form, limits=limits, out_bias=keys.flag("use_bias")),
        "norm_places": ("attention_input",),
        "mixers_alone": True,
        "mlp_bias": keys.flag("mlp_bias"),
    }


LAYER = {f"mixer.{x}_proj": f"self_attn.{x}_proj" for x in "qkvo"}
LAYER |= {f"mixer.{x}_proj": f"mlp.{x}_proj" for x in ("up", "down")}
NAMES = WeightNames(
    prefix=("model.", "backbone."),
    top={"embeddings": "embed_tokens", "norm_f": "norm"},
    layer={"norm": "input_layernorm", **LAYER, **mixer_names("mixer")},
    converted=MIXER_FORMS,
    gguf_converted=GGUF_MIXER_FORMS,
)

ARCHITECTURES = [
    decoder_family(
        "NemotronHForCausalLM", ["nvidia/Nemotron-H-8B-Base-8K"], nemotron_h_fields, names=NAMES
    )
]
"""The architectures of this module, for the registry."""
