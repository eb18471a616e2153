"""Falcon-H1: blocks with attention and Mamba 2 side by side, and factors of all parts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.gguf.metadata import Metadata
from max.pipelines.gguf.scan_keys import scan_keys
from max.pipelines.gguf.tensor_names import GGUF_LAYER
from max.pipelines.models.blocks.parallel_hybrid import ParallelHybridForm
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.config_values import LARGEST_SIZE, nonzero
from max.pipelines.models.decoder.read_config import read_decoder, with_biases
from max.pipelines.models.decoder.read_state_space import (
    GGUF_MIXER_FORMS,
    HYBRID_KEYS,
    HYBRID_LAYER,
    HYBRID_TOP,
    MIXER_FORMS,
    factors,
    mamba2_form,
    mixer_names,
)
from max.pipelines.models.decoder.weight_names import WeightNames

__all__ = ["ARCHITECTURES"]


def falcon_h1_decoder(keys: ConfigKeys) -> DecoderConfig:
    """A Falcon-H1: each block has attention and Mamba 2 side by side."""
    config = read_decoder(keys, eps=1e-5, longest=8192)
    inner = keys.integer("mamba_d_ssm", 1, LARGEST_SIZE, None)
    form = mamba2_form(keys, HYBRID_KEYS, config.hidden_size, inner)
    before = keys.flag("mamba_norm_before_gate", True)
    norm = "none" if not keys.flag("mamba_rms_norm") else "before_gate" if before else "after_gate"

    def factor(name: str) -> float:
        return keys.number(f"{name}_multiplier", default=1.0)

    parts = factors(keys, "ssm_multipliers", 5)
    own = {"norm": norm, "out_bias": keys.flag("projectors_bias"), "in_factor": factor("ssm_in")}
    outer = [factor(name) for name in ("attention_in", "attention_out", "ssm_out")]
    inner_factor, down_factor = factors(keys, "mlp_multipliers", 2)
    config = with_biases(config, keys, mlp="mlp_bias")
    config = config.with_mlp(factors=(inner_factor, down_factor))
    # a factor of keys is one of scores
    attention = replace(config.attention, scale=config.attention.head_dim**-0.5 * factor("key"))
    config = config.with_blocks(
        mixer=ParallelHybridForm(attention, replace(form, factors=parts, **own), *outer)
    )
    return replace(
        config,
        embedding_multiplier=factor("embedding"),
        logits_scaling=1 / nonzero(keys, "lm_head_multiplier", 1.0),
    )


LAYER = {**HYBRID_LAYER, **mixer_names("mamba", "both.mixer"), "self_attn": "both.self_attn"}
# the norm's name has no end in files
BOTH = {"ffn_norm": "post_attention_layernorm.weight"}
PARTS = ("mixer.", "self_attn.")
BOTH |= {name: f"both.{own}" for name, own in GGUF_LAYER.items() if own.startswith(PARTS)}
NAMES = WeightNames(
    top=HYBRID_TOP,
    layer=LAYER,
    conversions=MIXER_FORMS,
)
EXAMPLES = ["tiiuae/Falcon-H1-0.5B-Instruct"]


def _read(metadata: Metadata) -> dict[str, Any]:
    """The factors are not keys: files multiply them into the weights."""
    return {
        **scan_keys(metadata),
        "mamba_d_ssm": metadata.integer("ssm.inner_size"),
        "mamba_rms_norm": metadata.has("ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "projectors_bias": metadata.has("ssm_out.bias"),
    }


GGUF = GGUFForm(
    "falcon-h1", "falcon_h1", hybrid=True, read=_read, layer=BOTH, conversions=GGUF_MIXER_FORMS
)

ARCHITECTURES = [
    decoder_family("FalconH1ForCausalLM", EXAMPLES, falcon_h1_decoder, names=NAMES, gguf=GGUF)
]
"""The architectures of this module, for the registry."""
