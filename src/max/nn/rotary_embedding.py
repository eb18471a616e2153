"""Rotary position embedding (https://arxiv.org/abs/2104.09864), and its scalings for long contexts."""

from __future__ import annotations

from max._names import lazy_names
from max.nn.layers.rope_scaling import (
    DeepseekYarnRopeScalingParams,
    LinearScalingParams,
    Llama3RopeScalingParams,
    LongRoPEScalingParams,
    YarnScalingParams,
)
from max.nn.layers.rotary import RotaryEmbedding
from max.nn.layers.scaled_rotary import (
    DeepseekYarnRotaryEmbedding,
    DynamicRotaryEmbedding,
    LinearRotaryEmbedding,
    Llama3RotaryEmbedding,
    LongRoPERotaryEmbedding,
    YarnRotaryEmbedding,
)

__all__ = [
    "DeepseekYarnRopeScalingParams",
    "DeepseekYarnRotaryEmbedding",
    "DynamicRotaryEmbedding",
    "LinearRotaryEmbedding",
    "LinearScalingParams",
    "Llama3RopeScalingParams",
    "Llama3RotaryEmbedding",
    "LongRoPERotaryEmbedding",
    "LongRoPEScalingParams",
    "RotaryEmbedding",
    "YarnRotaryEmbedding",
    "YarnScalingParams",
]

__getattr__ = lazy_names(__name__)
