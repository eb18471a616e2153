"""Gemma 3n (text): several hidden states of a token, vectors of each layer, shared keys and values, sparse gates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

import numpy as np

from max.graph.weights import WeightData
from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.gguf.metadata import Metadata
from max.pipelines.gguf.metadata_writer import refused
from max.pipelines.models.alternating import Alternating
from max.pipelines.models.config_fields import Fields
from max.pipelines.models.decoder_config import DecoderConfig
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
)


def _read(metadata: Metadata) -> dict[str, Any]:
    """The keys that only this family's config.json has."""
    bounds: Any = metadata.value("activation_sparsity_scale")
    # minus infinity keeps all activations of the layer
    if bounds is not None and not (
        isinstance(bounds, np.ndarray)
        and len(bounds) == metadata.layers
        and (bounds < np.inf).all()
    ):
        raise metadata.error("activation_sparsity_scale", bounds, f"{metadata.layers} numbers")
    shares = [] if bounds is None else [NormalDist().cdf(float(bound)) for bound in bounds]
    return {
        "intermediate_size": metadata.by_layer("feed_forward_length"),
        "activation_sparsity_pattern": shares or None,
        "num_kv_shared_layers": metadata.integer("attention.shared_kv_layers", 0),
        "hidden_size_per_layer_input": metadata.integer("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": metadata.rows_of("per_layer_token_embd.weight"),
        "laurel_rank": metadata.rows_of("blk.0.laurel_l.weight"),
        "altup_active_idx": metadata.integer("altup.active_idx", 0),
        "altup_num_inputs": metadata.integer("altup.num_inputs", 4),
        "rope_parameters": metadata.local_rotation(),
    }


def _write(config: DecoderConfig) -> dict[str, Any]:
    """The several hidden states of a token, and the vectors of layers."""
    states, inputs = config.alternating, config.per_layer_inputs
    if states is None or inputs is None or not states.scaled:
        raise refused("gemma3n", "layers without vectors, or states that are not scaled")
    return {
        "embedding_length_per_layer_input": inputs.size,
        "altup.active_idx": states.active,
        "altup.num_inputs": states.count,
        "attention.shared_kv_layers": config.shared_kv_layers,
        # the bound of gates, in standard deviations from their mean
        "activation_sparsity_scale": [
            NormalDist().inv_cdf(share) if share else -math.inf for share in config.sparsity
        ],
    }


def _split_weights(
    config: DecoderConfig, weights: Mapping[str, WeightData]
) -> tuple[dict[str, list[float]], dict[str, WeightData]]:
    """Files require keys and values of layers that read those of another layer, although they are not used."""
    completed = dict(weights)
    for index in range(config.num_layers - config.shared_kv_layers, config.num_layers):
        source = f"layers.{config.kv_layer_of(index)}.self_attn."
        for name in [name for name in weights if name.startswith(source)]:
            part = name.removeprefix(source)
            if part.startswith(("k_", "v_")):
                completed.setdefault(f"layers.{index}.self_attn.{part}", weights[name])
    return {}, completed


GGUF = GGUFForm(
    "gemma3n",
    "gemma3n_text",
    by_layer=("feed_forward_length",),
    read=_read,
    write=_write,
    states_windows=True,
    layer={
        "altup_correct_coef": "altup.correction_coefs",
        "altup_correct_scale.weight": "altup.correct_output_scale",
        "altup_predict_coef": "altup.prediction_coefs",
        "altup_router": "altup.modality_router",
        "altup_router_norm": "altup.router_norm",
        "laurel_l": "laurel.linear_left",
        "laurel_r": "laurel.linear_right",
        "laurel_post_norm": "laurel.post_laurel_norm",
    },
    stacked={
        "altup_proj.weight": "states.altup_projections",
        "altup_unembd_proj.weight": "states.altup_unembed_projections",
    },
    split_weights=_split_weights,
)

ARCHITECTURES = [
    decoder_family(
        "Gemma3nForCausalLM", ["google/gemma-3n-E2B-it"], gemma3n_fields, names=NAMES, gguf=GGUF
    )
]
"""The architectures of this module, for the registry."""
