"""Nemotron-H: blocks of one norm with a Mamba 2, an attention without rotation, an MLP, or experts without gates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import ExpertKeys, GGUFForm
from max.pipelines.gguf.metadata import Metadata
from max.pipelines.gguf.metadata_writer import refusal_of
from max.pipelines.gguf.scan_keys import SCAN_KEYS, scan_keys
from max.pipelines.models.blocks.experts import Experts
from max.pipelines.models.blocks.feed_forward import MLPForm
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.read_config import read_decoder
from max.pipelines.models.decoder.read_experts import latent_experts
from max.pipelines.models.decoder.read_state_space import (
    GGUF_MIXER_FORMS,
    MIXER_FORMS,
    NEMOTRON_KEYS,
    NEMOTRON_LAYER,
    kinds_of_pattern,
    mamba2_form,
    with_kinds,
)
from max.pipelines.models.decoder.weight_names import WeightNames

__all__ = ["ARCHITECTURES"]

KEYS = {
    "rms_norm_eps": "layer_norm_epsilon",
    "hidden_act": "mlp_hidden_act",
    "num_hidden_layers": "",
}


def nemotron_h_decoder(keys: ConfigKeys) -> DecoderConfig:
    """A Nemotron-H: each block has a norm and one layer of some kind."""
    kinds, routed = kinds_of_pattern(keys)
    config = read_decoder(
        keys,
        KEYS,
        num_layers=len(kinds),
        eps=1e-5,
        gated=False,
        activation="relu2",
        longest=4096,
        rotates=False,
    )
    form = mamba2_form(keys, NEMOTRON_KEYS, activation="mamba_hidden_act")
    limits = keys.number("time_step_min", over=0, default=0.001), float("inf")
    bias = keys.flag("mlp_bias")
    config = config.with_mlp(bias=bias).with_blocks(norms=("attention_input",))
    if routed:
        config = config.with_experts(latent_experts(keys, bias), {*range(len(kinds))} - routed)
    config = with_kinds(config, kinds, replace(form, limits=limits))
    mixing = [index for index, kind in enumerate(kinds) if kind != "feed_forward"]
    # transformers ignores the key of tied weights
    return replace(config.with_blocks(mixing, feed_forward=None), tie_word_embeddings=False)


NAMES = WeightNames(
    prefix=("model.", "backbone."),
    top={"embeddings": "embed_tokens", "norm_f": "norm"},
    layer=NEMOTRON_LAYER,
    stacks={"mlp.experts": "mlp.experts"},
    unused_parts=("mtp.",),
    conversions=MIXER_FORMS,
)

_SCAN_KEYS = {
    **SCAN_KEYS,
    "mamba_d_state": "ssm_state_size",
    "mamba_n_heads": "mamba_num_heads",
    "mamba_d_head": "mamba_head_dim",
}


def _read(metadata: Metadata) -> dict[str, Any]:
    """The kind of a layer follows from its sizes."""
    inner = metadata.by_layer("feed_forward_length")
    heads = metadata.by_layer("attention.head_count_kv")
    routed = metadata.layers_with("ffn_gate_inp.weight")
    kinds = [
        "moe" if i in routed else "mlp" if inner[i] else "attention" if heads[i] else "mamba"
        for i in range(metadata.layers)
    ]
    return {
        **{_SCAN_KEYS[key]: value for key, value in scan_keys(metadata).items()},
        "layers_block_type": kinds,
        "layer_norm_epsilon": metadata.rms_epsilon(),
        # files do not state the minimum step size, as llama.cpp has none
        "time_step_min": 1e-30,
    }


def _write(config: DecoderConfig) -> dict[str, Any]:
    """Both epsilons, and experts beside layers of other kinds."""
    values: dict[str, Any] = {"attention.layer_norm_epsilon": float(config.norm_eps)}
    experts = config.first_form(Experts)
    if experts is None:
        return values
    if config.first_form(MLPForm) is not None:
        raise refusal_of("nemotron_h_moe", "layers with an MLP beside layers with experts")
    # one shared MLP of the stated size
    values["expert_shared_count"] = 1
    return values | (
        {} if experts.latent_size is None else {"moe_latent_size": experts.latent_size}
    )


GGUF = GGUFForm(
    "nemotron_h",
    "nemotron_h",
    hybrid=True,
    read=_read,
    write=_write,
    conversions=GGUF_MIXER_FORMS,
    describes=lambda config: config.first_form(Experts) is None,
)
GGUF_EXPERTS = replace(
    GGUF,
    name="nemotron_h_moe",
    keys={
        "num_experts": "n_routed_experts",
        "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
    },
    experts=ExpertKeys(dense_layers="written"),
    describes=lambda config: config.first_form(Experts) is not None,
)

ARCHITECTURES = [
    decoder_family(
        "NemotronHForCausalLM",
        ["nvidia/Nemotron-H-8B-Base-8K"],
        nemotron_h_decoder,
        names=NAMES,
        gguf=(GGUF, GGUF_EXPERTS),
    )
]
"""The architectures of this module, for the registry."""
