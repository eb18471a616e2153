"""Gemma 3n (text): several hidden states of a token, vectors of each layer, shared keys and values, sparse gates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy as np

from max.graph.weights import WeightData
from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.gguf.metadata import Metadata
from max.pipelines.gguf.metadata_writer import refusal_of
from max.pipelines.models.blocks.alternating import Alternating, AlternatingBlock
from max.pipelines.models.blocks.attention import AttentionForm
from max.pipelines.models.blocks.feed_forward import MLPForm
from max.pipelines.models.blocks.rope import LONGEST_SEQUENCE
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.read_per_layer import (
    PER_LAYER_NAMES,
    PER_LAYER_TOP,
    read_per_layer_decoder,
)
from max.pipelines.models.decoder.weight_names import SANDWICH_NORMS, WeightNames

__all__ = ["ARCHITECTURES"]


def gemma3n_decoder(keys: ConfigKeys) -> DecoderConfig:
    """A Gemma 3n: each token has several hidden states, and vectors for each layer."""
    config = read_per_layer_decoder(keys, 5, 15)
    layers, stated_sizes = config.num_layers, keys.value("intermediate_size")
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
    updates = Alternating(
        count,
        keys.integer("altup_active_idx", 0, count - 1, 0),
        keys.flag("altup_correct_scale", True),
        keys.integer("laurel_rank", 1, LONGEST_SEQUENCE, 64),
    )
    inputs, cap = (
        config.per_layer_inputs,
        keys.number("final_logit_softcapping", over=0, default=30.0),
    )
    if inputs is None:
        raise keys.error("hidden_size_per_layer_input", "an integer from 1")
    for index, (size, share) in enumerate(zip(sizes, sparsity, strict=True)):
        config = config.with_mlp([index], size=size, sparsity=share)
    blocks = tuple(
        AlternatingBlock(**vars(block), updates=updates, inputs=inputs) for block in config.blocks
    )
    return replace(config, blocks=blocks, alternating=updates, logits_soft_cap=cap)


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
    attentions = config.every(AttentionForm)
    if states is None or inputs is None or not states.scaled:
        raise refusal_of("gemma3n", "layers without vectors, or states that are not scaled")
    return {
        "embedding_length_per_layer_input": inputs.size,
        "altup.active_idx": states.active,
        "altup.num_inputs": states.count,
        "attention.shared_kv_layers": sum(form.shared_with is not None for form in attentions),
        # the bound of gates, in standard deviations from their mean
        "activation_sparsity_scale": [
            NormalDist().inv_cdf(mlp.sparsity) if mlp.sparsity else -math.inf
            for mlp in config.every(MLPForm)
        ],
    }


def _split_weights(
    config: DecoderConfig, weights: Mapping[str, WeightData]
) -> tuple[dict[str, list[float]], dict[str, WeightData]]:
    """Files require keys and values of layers that read those of another layer, although they are not used."""
    completed = dict(weights)
    for index, form in enumerate(config.every(AttentionForm)):
        if form.shared_with is None:
            continue
        source = f"layers.{form.shared_with}.self_attn."
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
    stacks={
        "altup_proj.weight": "states.altup_projections",
        "altup_unembd_proj.weight": "states.altup_unembed_projections",
    },
    split_weights=_split_weights,
)

ARCHITECTURES = [
    decoder_family(
        "Gemma3nForCausalLM", ["google/gemma-3n-E2B-it"], gemma3n_decoder, names=NAMES, gguf=GGUF
    )
]
"""The architectures of this module, for the registry."""
