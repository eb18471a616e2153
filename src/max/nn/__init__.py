"""Layers, attention over a paged KV cache, transformers."""

from max._earlier import earlier_names
from max.nn.attention import (
    AttentionWithRope,
    DataParallelAttentionWithRope,
    DistributedAttentionImpl,
    MHAMaskConfig,
    MHAMaskVariant,
    MultiheadAttention,
    RaggedAttention,
    TensorParallelAttentionWithRope,
)
from max.nn.clamp import clamp
from max.nn.comm import Allreduce, Signals
from max.nn.conv import Conv1D, Conv1DV1, Conv2d, Conv2dV1, Conv3D, Conv3DV1
from max.nn.conv_transpose import ConvTranspose1d, WeightNormConvTranspose1d
from max.nn.embedding import Embedding, EmbeddingV1, VocabParallelEmbedding
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
from max.nn.linear import (
    MLP,
    MLPV1,
    ColumnParallelLinear,
    DistributedGemmConfig,
    GPTQLinear,
    Linear,
    LinearV1,
    QLinearV1,
)
from max.nn.moe import MoE, MoEFp8, MoEGate
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
from max.nn.transformer import (
    DistributedTransformer,
    DistributedTransformerBlock,
    ReturnLogits,
    Transformer,
    TransformerBlock,
)

__all__ = [
    "clamp",
    "MLP",
    "Allreduce",
    "AttentionWithRope",
    "ColumnParallelLinear",
    "ConstantLayerNorm",
    "Conv1D",
    "Conv1DV1",
    "Conv2d",
    "Conv2dV1",
    "Conv3D",
    "Conv3DV1",
    "ConvTranspose1d",
    "DataParallelAttentionWithRope",
    "DeepseekYarnRopeScalingParams",
    "DeepseekYarnRotaryEmbedding",
    "DistributedAttentionImpl",
    "DistributedGemmConfig",
    "DistributedTransformer",
    "DistributedTransformerBlock",
    "Embedding",
    "EmbeddingV1",
    "Float8Config",
    "Float8InputScaleSpec",
    "Float8ScaleGranularity",
    "Float8ScaleOrigin",
    "Float8WeightScaleSpec",
    "GPTQLinear",
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
    "MoE",
    "MoEFp8",
    "MoEGate",
    "MLPV1",
    "Module",
    "MultiheadAttention",
    "QLinearV1",
    "RMSNorm",
    "RMSNormV1",
    "RaggedAttention",
    "ReturnLogits",
    "RotaryEmbedding",
    "Sequential",
    "Shardable",
    "Signals",
    "TensorParallelAttentionWithRope",
    "Transformer",
    "TransformerBlock",
    "VocabParallelEmbedding",
    "WeightNormConvTranspose1d",
    "YarnRotaryEmbedding",
    "YarnScalingParams",
    "add_layer_hook",
    "clear_hooks",
    "recursive_named_layers",
]

__getattr__ = earlier_names(__name__)
