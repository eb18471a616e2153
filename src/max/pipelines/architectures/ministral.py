"""Ministral, and Ministral 3, whose queries grow with their position."""

from __future__ import annotations

from max.pipelines.architectures.decoder_family import decoder_family
from max.pipelines.architectures.mistral import mistral_fields
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.models.config_fields import Fields, base_fields, layers_of_type, window
from max.pipelines.models.decoder_config import QueryGrowth
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


ARCHITECTURES = [
    decoder_family(
        "MinistralForCausalLM",
        ["mistralai/Ministral-8B-Instruct-2410"],
        ministral_fields,
        gguf_permuted=True,
    ),
    decoder_family(
        "Ministral3ForCausalLM",
        ["mistralai/Ministral-3-3B-Instruct-2512"],
        ministral3_fields,
        gguf_permuted=True,
    ),
]
"""The architectures of this module, for the registry."""
