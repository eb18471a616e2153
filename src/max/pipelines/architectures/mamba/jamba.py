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
from max.pipelines.models.blocks.experts import Experts
from max.pipelines.models.blocks.rope import LONGEST_SEQUENCE
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.read_config import read_decoder
from max.pipelines.models.decoder.read_experts import layer_list
from max.pipelines.models.decoder.read_state_space import (
    GGUF_MIXER_FORMS,
    HYBRID_KEYS,
    HYBRID_LAYER,
    HYBRID_TOP,
    MIXER_FORMS,
    kinds_of_layers,
    mamba_form,
    periodic_layers,
    with_kinds,
)
from max.pipelines.models.decoder.weight_names import WeightNames

__all__ = ["ARCHITECTURES"]


def jamba_decoder(keys: ConfigKeys) -> DecoderConfig:
    """A Jamba."""
    config = read_decoder(keys, eps=1e-6, longest=262144, rotates=False)
    layers = range(config.num_layers)
    attends, routed = periodic_layers(keys, "attn", 8, 4), periodic_layers(keys, "expert", 2, 1)
    attention = [i for i in layers if attends(i)]
    # GGUF files list both
    routed_layers = layer_list(keys, "moe_layers", filter(routed, layers))
    form = mamba_form(keys, HYBRID_KEYS, config.hidden_size)
    count = keys.integer("num_experts", 1, LONGEST_SEQUENCE, 16)
    experts = Experts(
        count,
        keys.integer("num_experts_per_tok", 1, count, min(2, count)),
        keys.integer("intermediate_size", 1, LONGEST_SEQUENCE),
        ExpertRouting(normalized=False),
    )
    if count > 1:
        config = config.with_experts(experts, {*layers} - routed_layers)
    kinds = kinds_of_layers(keys, "layers_block_type", len(layers), attention)
    return with_kinds(config, kinds, replace(form, norms=True))


LAYER = {**HYBRID_LAYER, "feed_forward.router": "mlp.gate.gate_score"}
NAMES = WeightNames(
    top=HYBRID_TOP,
    layer=LAYER,
    stacks={"mlp.experts": "mlp.experts"},
    conversions=MIXER_FORMS,
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
    conversions=GGUF_MIXER_FORMS,
)

ARCHITECTURES = [
    decoder_family(
        "JambaForCausalLM", ["ai21labs/AI21-Jamba-Mini-1.7"], jamba_decoder, names=NAMES, gguf=GGUF
    )
]
"""The architectures of this module, for the registry."""
