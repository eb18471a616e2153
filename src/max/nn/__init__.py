"""Layers, attention over a paged KV cache, transformers."""

from max.nn.attention import (
    AttentionWithRope,
    MHAMaskConfig,
    MHAMaskVariant,
    MultiheadAttention,
    RaggedAttention,
)
from max.nn.embedding import Embedding, EmbeddingV1
from max.nn.float8_config import (
    Float8Config,
    Float8InputScaleSpec,
    Float8ScaleGranularity,
    Float8ScaleOrigin,
    Float8WeightScaleSpec,
)
from max.nn.layer import (
    Layer,
    LayerList,
    Module,
    Shardable,
    add_layer_hook,
    clear_hooks,
    recursive_named_layers,
)
from max.nn.linear import MLP, MLPV1, Linear, LinearV1
from max.nn.norm import (
    ConstantLayerNorm,
    GroupNorm,
    LayerNorm,
    LayerNormV1,
    RMSNorm,
    RMSNormV1,
)
from max.nn.rotary_embedding import (
    DeepseekYarnRopeScalingParams,
    DeepseekYarnRotaryEmbedding,
    LinearRotaryEmbedding,
    LinearScalingParams,
    Llama3RopeScalingParams,
    Llama3RotaryEmbedding,
    LongRoPERotaryEmbedding,
    LongRoPEScalingParams,
    RotaryEmbedding,
    YarnRotaryEmbedding,
    YarnScalingParams,
)
from max.nn.sequential import Sequential
from max.nn.transformer import ReturnLogits, Transformer, TransformerBlock

__all__ = [
    "MLP",
    "AttentionWithRope",
    "ConstantLayerNorm",
    "DeepseekYarnRopeScalingParams",
    "DeepseekYarnRotaryEmbedding",
    "Embedding",
    "EmbeddingV1",
    "Float8Config",
    "Float8InputScaleSpec",
    "Float8ScaleGranularity",
    "Float8ScaleOrigin",
    "Float8WeightScaleSpec",
    "GroupNorm",
    "Layer",
    "LayerList",
    "LayerNorm",
    "LayerNormV1",
    "Linear",
    "LinearRotaryEmbedding",
    "LinearScalingParams",
    "LinearV1",
    "Llama3RopeScalingParams",
    "Llama3RotaryEmbedding",
    "LongRoPERotaryEmbedding",
    "LongRoPEScalingParams",
    "MHAMaskConfig",
    "MHAMaskVariant",
    "MLPV1",
    "Module",
    "MultiheadAttention",
    "RMSNorm",
    "RMSNormV1",
    "RaggedAttention",
    "ReturnLogits",
    "RotaryEmbedding",
    "Sequential",
    "Shardable",
    "Transformer",
    "TransformerBlock",
    "YarnRotaryEmbedding",
    "YarnScalingParams",
    "add_layer_hook",
    "clear_hooks",
    "recursive_named_layers",
]
