"""Gemma 3n (text): several hidden states of a token, vectors of each layer, shared keys and values, sparse gates."""

from __future__ import annotations

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.models.alternating import Alternating
from max.pipelines.models.config_fields import Fields
from max.pipelines.models.per_layer_fields import PER_LAYER_NAMES, PER_LAYER_TOP, per_layer_fields
from max.pipelines.models.rope import LONGEST_SEQUENCE
from max.pipelines.models.weight_names import SANDWICH_NORMS, WeightNames

__all__ = ["ARCHITECTURES"]


def gemma3n_fields(keys: ConfigKeys) -> Fields:
    """The fields of a Gemma 3n's config."""
    fields = per_layer_fields(keys, 5, 15)
    layers, stated_sizes = fields["num_layers"], keys.value("intermediate_size")
    sizes = [16384] * layers if stated_sizes is None else stated_sizes
    sizes = sizes if isinstance(sizes, list) else [sizes] * layers
    if len(sizes) != layers or not all(type(n) is int and 0 < n < LONGEST_SEQUENCE for n in sizes):
        raise keys.error("intermediate_size", f"one size, or {layers}")
    sparsity = keys.numbers("activation_sparsity_pattern", over=-1e-9)
    if sparsity is None:
        sparse = 10 if layers > 10 else 0
        sparsity = [0.95] * sparse + [0.0] * (layers - sparse)
    if len(sparsity) != layers or max(sparsity) >= 1:
        raise keys.error("activation_sparsity_pattern", f"{layers} numbers from 0 to below 1")
    count = keys.integer("altup_num_inputs", 2, 64, 4)
    return fields | {
        "intermediate_size": max(sizes),
        "layer_sizes": tuple(sizes),
        "sparsity": tuple(sparsity),
        "logits_soft_cap": keys.number("final_logit_softcapping", over=0, default=30.0),
        "alternating": Alternating(
            count,
            keys.integer("altup_active_idx", 0, count - 1, 0),
            keys.flag("altup_correct_scale", True),
            keys.integer("laurel_rank", 1, LONGEST_SEQUENCE, 64),
        ),
    }


NAMES = WeightNames(
    top={
        "altup_projections": "states.altup_projections",
        "altup_unembed_projections": "states.altup_unembed_projections",
        **PER_LAYER_TOP,
    },
    layer={**SANDWICH_NORMS, **PER_LAYER_NAMES},
    gguf_stacked={
        "altup_proj.weight": "states.altup_projections",
        "altup_unembd_proj.weight": "states.altup_unembed_projections",
    },
)

ARCHITECTURES = [
    decoder_family("Gemma3nForCausalLM", ["google/gemma-3n-E2B-it"], gemma3n_fields, names=NAMES)
]
"""The architectures of this module, for the registry."""
