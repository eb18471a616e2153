"""Ministral, and Ministral 3, whose queries grow with their position."""

from __future__ import annotations

from typing import Any

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.gguf.metadata import Metadata
from max.pipelines.models.blocks.attention import QueryGrowth
from max.pipelines.models.blocks.rope import rotation_keys
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.config_values import layers_of_type, window
from max.pipelines.models.decoder.read_config import read_decoder, with_windows

__all__ = ["ARCHITECTURES"]


def ministral_decoder(keys: ConfigKeys) -> DecoderConfig:
    """A Ministral."""
    config = read_decoder(keys)
    full = layers_of_type(keys, config.num_layers, frozenset())
    return with_windows(config, window(keys, 4096), full)


def ministral3_decoder(keys: ConfigKeys) -> DecoderConfig:
    """A Ministral 3."""
    config = read_decoder(keys, head_dim=128, eps=1e-5, longest=262144, theta=1e6)
    rope = rotation_keys(keys) or ConfigKeys({})
    beta = rope.number("llama_4_scaling_beta", least=0, default=0.0)
    length = config.ropes[0].parameters["original_max_position_embeddings"]
    growth = QueryGrowth(beta, length) if beta and length else None
    return with_windows(config, window(keys)).with_attention(query_growth=growth)


def _read(metadata: Metadata) -> dict[str, Any]:
    """The growth of queries with the position, and YaRN's magnitude."""
    rope: dict[str, Any] = {}
    for key, stored in (
        ("llama_4_scaling_beta", "attention.temperature_scale"),
        ("mscale_all_dim", "rope.scaling.yarn_log_multiplier"),
    ):
        if metadata.states(stored):
            rope[key] = metadata.number(stored)
    # files state only the one that differs from 1
    mscale = {"mscale": 1.0} if "mscale_all_dim" in rope else {}
    return {"rope_parameters": rope | mscale}


def _write(config: DecoderConfig) -> dict[str, Any]:
    """The growth of queries."""
    growth = config.attention.query_growth
    return {} if growth is None else {"attention.temperature_scale": float(growth.beta)}


GGUF = GGUFForm(
    "llama",
    "ministral",
    marks={"attention.sliding_window_pattern": None},
    lacks=("expert_count",),
    permuted=True,
)
GGUF_3 = GGUFForm(
    "mistral3", "ministral3", read=_read, write=_write, yarn_multiplier=1.0, permuted=True
)

ARCHITECTURES = [
    decoder_family(
        "MinistralForCausalLM",
        ["mistralai/Ministral-8B-Instruct-2410"],
        ministral_decoder,
        gguf=GGUF,
    ),
    decoder_family(
        "Ministral3ForCausalLM",
        ["mistralai/Ministral-3-3B-Instruct-2512"],
        ministral3_decoder,
        gguf=GGUF_3,
    ),
]
"""The architectures of this module, for the registry."""
