"""Gemma 2: norms before and after layers, soft caps, a window in every other layer."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.architectures.gemma.gemma import read_gemma
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.gguf.metadata import Metadata
from max.pipelines.gguf.metadata_writer import refusal_of
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.config_values import periodic_windows
from max.pipelines.models.decoder.read_config import with_windows
from max.pipelines.models.decoder.weight_names import SANDWICH_NORMS, WeightNames

__all__ = ["ARCHITECTURES", "with_sandwich"]


def with_sandwich(keys: ConfigKeys, config: DecoderConfig, pattern: int) -> DecoderConfig:
    """Norms around attention and MLP, soft caps and windows, as Gemma 2 and 3 have them.

    Args:
        keys: The keys of config.json.
        config: The decoder without.
        pattern: The distance of layers without a window, see `periodic_windows`.
    """
    window, full = periodic_windows(keys, config.num_layers, pattern, 4096)
    config = config.with_attention(
        scale=keys.number("query_pre_attn_scalar", over=0, default=256) ** -0.5,
        soft_cap=keys.number("attn_logit_softcapping", over=0, default=None),
    )
    config = config.with_blocks(
        norms=("attention_input", "attention_output", "mlp_input", "mlp_output")
    )
    cap = keys.number("final_logit_softcapping", over=0, default=None)
    return replace(with_windows(config, window, full), logits_soft_cap=cap)


def gemma2_decoder(keys: ConfigKeys) -> DecoderConfig:
    """A Gemma 2."""
    return with_sandwich(keys, read_gemma(keys), 2)


def score_divisor(metadata: Metadata, largest: int) -> dict[str, Any]:
    """The divisor of scores, which files do not state: that of the published models.

    Args:
        metadata: The file's metadata.
        largest: The number of layers of the largest published model, whose divisor differs.
    """
    hidden, heads = metadata.config["hidden_size"], metadata.config["num_attention_heads"]
    is_largest = metadata.config["num_hidden_layers"] == largest
    return {"query_pre_attn_scalar": hidden / heads if is_largest else metadata.head_dim}


def check_divisor(config: DecoderConfig, name: str, largest: int) -> dict[str, Any]:
    """Refuses models whose scores have another divisor than `score_divisor`.

    Args:
        config: The shape of the model.
        name: llama.cpp's name of the architecture.
        largest: The number of layers of the largest published model.

    Raises:
        ModelFilesError: The divisor differs.
    """
    is_largest = config.num_layers == largest
    attention = config.attention
    divisor = (
        config.hidden_size / attention.num_attention_heads if is_largest else attention.head_dim
    )
    multiplier = attention.scale
    if multiplier is not None and not math.isclose(multiplier, divisor**-0.5):
        raise refusal_of(name, f"scores that are not divided by the root of {divisor:g}")
    return {}


GGUF = GGUFForm(
    "gemma2",
    "gemma2",
    window_period=2,
    read=lambda metadata: score_divisor(metadata, 46),
    write=lambda config: check_divisor(config, "gemma2", 46),
)

ARCHITECTURES = [
    decoder_family(
        "Gemma2ForCausalLM",
        ["google/gemma-2-2b-it"],
        gemma2_decoder,
        names=WeightNames(layer=SANDWICH_NORMS),
        gguf=GGUF,
    )
]
"""The architectures of this module, for the registry."""
