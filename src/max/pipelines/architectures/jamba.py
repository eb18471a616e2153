"""Jamba: blocks of Mamba and of attention without rotation, with MLPs or experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from max.nn.moe import ExpertRouting
from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import ExpertKeys, GGUFForm
from max.pipelines.gguf.metadata import Metadata
from max.pipelines.gguf.scan_keys import scan_keys
from max.pipelines.models.config_fields import Fields, base_fields
from max.pipelines.models.expert_fields import layer_list
from max.pipelines.models.experts import Experts
from max.pipelines.models.rope import LONGEST_SEQUENCE
from max.pipelines.models.state_space_fields import (
    GGUF_MIXER_FORMS,
    HYBRID_KEYS,
    HYBRID_LAYER,
    HYBRID_TOP,
    MIXER_FORMS,
    kinds_of_layers,
    mamba_form,
    periodic_layers,
)
from max.pipelines.models.weight_names import WeightNames

__all__ = ["ARCHITECTURES"]


def jamba_fields(keys: ConfigKeys) -> Fields:
    """The fields of a Jamba's config."""
    fields = base_fields(keys, eps=1e-6, longest=262144, rotates=False)
    layers = range(fields["num_layers"])
    attends, routed = periodic_layers(keys, "attn", 8, 4), periodic_layers(keys, "expert", 2, 1)
    attention = [i for i in layers if attends(i)]
    # GGUF files list both
    routed_layers = layer_list(keys, "moe_layers", filter(routed, layers))
    form = mamba_form(keys, HYBRID_KEYS, fields["hidden_size"])
    count = keys.integer("num_experts", 1, LONGEST_SEQUENCE, 16)
    experts = Experts(
        count,
        keys.integer("num_experts_per_tok", 1, count, min(2, count)),
        fields["intermediate_size"],
        ExpertRouting(normalised=False),
        dense_layers=frozenset(layers) - routed_layers,
    )
    return fields | {
        "layer_kinds": kinds_of_layers(keys, "layers_block_type", len(layers), attention),
        "recurrence": replace(form, norms=True),
        "experts": experts if count > 1 else None,
    }


LAYER = {**HYBRID_LAYER, "feed_forward.router": "mlp.gate.gate_score"}
NAMES = WeightNames(
    top=HYBRID_TOP,
    layer=LAYER,
    stacked={"mlp.experts": "mlp.experts"},
    converted=MIXER_FORMS,
)


def _read(metadata: Metadata) -> dict[str, Any]:
    """The kinds of layers, and the layers with experts."""
    return {
        **scan_keys(metadata),
        "layers_block_type": metadata.layer_types("attention", "mamba"),
        "moe_layers": metadata.layers_with("ffn_gate_inp.weight"),
        "num_experts": metadata.config.get("num_experts") or 1,
    }


GGUF = GGUFForm(
    "jamba",
    "jamba",
    hybrid=True,
    experts=ExpertKeys(weights=False, dense_layers="tensors"),
    read=_read,
    converted=GGUF_MIXER_FORMS,
)

ARCHITECTURES = [
    decoder_family(
        "JambaForCausalLM", ["ai21labs/AI21-Jamba-Mini-1.7"], jamba_fields, names=NAMES, gguf=GGUF
    )
]
"""The architectures of this module, for the registry."""
