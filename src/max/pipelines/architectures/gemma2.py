"""Gemma 2: norms before and after layers, soft caps, a window in every other layer."""

from __future__ import annotations

import math
from typing import Any

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.architectures.gemma import gemma_fields
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.gguf.metadata import Metadata
from max.pipelines.gguf.metadata_writer import refused
from max.pipelines.models.config_fields import Fields, windows
from max.pipelines.models.decoder_config import DecoderConfig
from max.pipelines.models.weight_names import SANDWICH_NORMS, WeightNames

__all__ = ["ARCHITECTURES", "sandwich_fields"]


def sandwich_fields(keys: ConfigKeys, fields: Fields, pattern: int) -> Fields:
    """The fields with norms around attention and MLP, soft caps and windows, as Gemma 2 and 3 have them.

    Args:
        config: config.json.
        keys: Its keys.
        fields: The other fields.
        pattern: The distance of layers without a window, see `windows`.
    """
    return (
        fields
        | windows(keys, fields["num_layers"], pattern, 4096)
        | {
            "attention_multiplier": keys.number("query_pre_attn_scalar", over=0, default=256)
            ** -0.5,
            "norm_places": ("attention_input", "attention_output", "mlp_input", "mlp_output"),
            "scores_soft_cap": keys.number("attn_logit_softcapping", over=0, default=None),
            "logits_soft_cap": keys.number("final_logit_softcapping", over=0, default=None),
        }
    )


def gemma2_fields(keys: ConfigKeys) -> Fields:
    """The fields of a Gemma 2's config."""
    return sandwich_fields(keys, gemma_fields(keys), 2)


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
    divisor = config.hidden_size / config.num_heads if is_largest else config.head_dim
    multiplier = config.attention_multiplier
    if multiplier is not None and not math.isclose(multiplier, divisor**-0.5):
        raise refused(name, f"scores that are not divided by the root of {divisor:g}")
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
        gemma2_fields,
        names=WeightNames(layer=SANDWICH_NORMS),
        gguf=GGUF,
    )
]
"""The architectures of this module, for the registry."""
