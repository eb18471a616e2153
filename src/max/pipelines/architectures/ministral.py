"""Ministral, and Ministral 3, whose queries grow with their position."""

from __future__ import annotations

from typing import Any

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.architectures.mistral import mistral_fields
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.gguf.metadata import Metadata
from max.pipelines.models.config_fields import Fields, base_fields, layers_of_type, window
from max.pipelines.models.decoder_config import DecoderConfig, QueryGrowth
from max.pipelines.models.rope import rotation_keys

__all__ = ["ARCHITECTURES"]


def ministral_fields(keys: ConfigKeys) -> Fields:
    """The fields of a Ministral's config."""
    fields = mistral_fields(keys)
    layers = fields["num_layers"]
    return fields | {"full_attention_layers": layers_of_type(keys, layers, frozenset())}


def ministral3_fields(keys: ConfigKeys) -> Fields:
    """The fields of a Ministral 3's config."""
    fields = base_fields(keys, head_dim=128, eps=1e-5, longest=262144, theta=1e6)
    rope = rotation_keys(keys) or ConfigKeys({})
    beta = rope.number("llama_4_scaling_beta", least=0, default=0.0)
    length = fields["rope"].parameters["original_max_position_embeddings"]
    return fields | {
        "sliding_window": window(keys),
        "query_growth": QueryGrowth(beta, length) if beta and length else None,
    }


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
    growth = config.query_growth
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
        ministral_fields,
        gguf=GGUF,
    ),
    decoder_family(
        "Ministral3ForCausalLM",
        ["mistralai/Ministral-3-3B-Instruct-2512"],
        ministral3_fields,
        gguf=GGUF_3,
    ),
]
"""The architectures of this module, for the registry."""
