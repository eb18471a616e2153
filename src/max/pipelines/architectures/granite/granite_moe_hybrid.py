"""Granite 4: blocks of Mamba 2 or attention, with experts and a shared MLP, or only the shared MLP."""

from __future__ import annotations

from typing import Any

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.architectures.granite.granite import granite_metadata
from max.pipelines.architectures.granite.granite_moe import (
    NAMES,
    granite_decoder,
    granite_moe_decoder,
)
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import ExpertKeys, GGUFForm
from max.pipelines.gguf.metadata import Metadata
from max.pipelines.gguf.scan_keys import scan_keys
from max.pipelines.models.blocks.rope import LONGEST_SEQUENCE
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.read_state_space import (
    GGUF_MIXER_FORMS,
    HYBRID_KEYS,
    MIXER_FORMS,
    kinds_of_layers,
    mamba2_form,
    mixer_names,
    with_kinds,
)
from max.pipelines.models.decoder.weight_names import SharedMLPNames

__all__ = ["ARCHITECTURES"]


def hybrid_decoder(keys: ConfigKeys) -> DecoderConfig:
    """A Granite 4."""
    if keys.integer("num_local_experts", 0, LONGEST_SEQUENCE, 8):
        config = granite_moe_decoder(keys)
    else:
        inner = keys.integer("shared_intermediate_size", 1, LONGEST_SEQUENCE, 1024)
        config = granite_decoder(keys).with_mlp(size=inner)
    if keys.choice("position_embedding_type", ("rope", "nope"), "nope") == "nope":
        config = config.with_attention(rope=None)
    kinds = kinds_of_layers(keys, "layer_types", config.num_layers)
    return with_kinds(config, kinds, mamba2_form(keys, HYBRID_KEYS, config.hidden_size))


HYBRID = SharedMLPNames(
    layer={**NAMES.layer, **mixer_names("mamba")},
    conversions=MIXER_FORMS,
)


def _read(metadata: Metadata) -> dict[str, Any]:
    """The kinds of layers, and the keys that depend on whether there are experts."""
    experts = metadata.config.get("num_experts") or 0
    if experts:
        shared = metadata.integer("expert_shared_feed_forward_length")
    else:
        shared = max(metadata.by_layer("feed_forward_length"))
    rotates = metadata.flag("rope.scaling.finetuned", False)
    return {
        **scan_keys(metadata),
        "layer_types": metadata.layer_types("full_attention", "linear_attention"),
        "num_experts": experts,
        "shared_intermediate_size": shared,
        "position_embedding_type": "rope" if rotates else "nope",
    }


def _write(config: DecoderConfig) -> dict[str, Any]:
    """Only some models rotate heads."""
    return granite_metadata(config) | {"rope.scaling.finetuned": bool(config.ropes)}


GGUF = GGUFForm(
    "granitehybrid",
    "granitemoehybrid",
    keys={"num_experts": "num_local_experts", "logit_scale": "logits_scaling"},
    hybrid=True,
    permuted=True,
    experts=ExpertKeys(weights=False),
    read=_read,
    write=_write,
    conversions=GGUF_MIXER_FORMS,
)

ARCHITECTURES = [
    decoder_family(
        "GraniteMoeHybridForCausalLM",
        ["ibm-granite/granite-4.0-h-micro"],
        hybrid_decoder,
        names=HYBRID,
        gguf=GGUF,
    )
]
"""The architectures of this module, for the registry."""
