"""Layers, attention over a paged KV cache, transformers.

All names but `clamp` are loaded when they are first used: a model imports the layers that it has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from max._names import lazy_names
from max.nn.clamp import clamp

if TYPE_CHECKING:
    from max._compat.nn.conv_v1 import Conv1DV1, Conv2dV1, Conv3DV1
    from max._compat.nn.layers_v1 import (
        MLPV1,
        EmbeddingV1,
        GPTQLinearV1,
        LayerNormV1,
        LinearV1,
        QLinearV1,
        RMSNormV1,
    )
    from max._compat.nn.quant_config import QuantConfig, QuantFormat
    from max._compat.nn.stacked_linear import FusedMLP, StackedLinear
    from max.nn.attention.attention_with_rope import (
        AttentionWithRope,
        AttentionWithRopeNoOpaque,
        DataParallelAttentionWithRope,
        GGUFQAttentionWithRope,
        GPTQAttentionWithRope,
        TensorParallelAttentionWithRope,
    )
    from max.nn.attention.interfaces import DistributedAttentionImpl
    from max.nn.attention.mask_config import MHAMaskConfig, MHAMaskVariant
    from max.nn.attention.multi_latent_attention import LatentAttentionWithRope
    from max.nn.attention.multihead_attention import MultiheadAttention
    from max.nn.attention.ragged_attention import RaggedAttention
    from max.nn.comm import Allreduce, Signals
    from max.nn.conv_transpose import ConvTranspose1d, WeightNormConvTranspose1d
    from max.nn.float8_config import (
        Float8Config,
        Float8InputScaleSpec,
        Float8ScaleGranularity,
        Float8ScaleOrigin,
        Float8WeightScaleSpec,
        parse_float8_config,
    )
    from max.nn.hooks import PrintHook
    from max.nn.identity import Identity, MissingLayer
    from max.nn.layer import (
        Layer,
        LayerList,
        Module,
        Shardable,
        add_layer_hook,
        clear_hooks,
        recursive_named_layers,
    )
    from max.nn.layers.conv import Conv1D, Conv2d, Conv3D
    from max.nn.layers.embedding import Embedding, VocabParallelEmbedding
    from max.nn.layers.gptq_linear import GPTQLinear
    from max.nn.layers.linear import ColumnParallelLinear, DistributedGemmConfig, Linear
    from max.nn.layers.mlp import MLP
    from max.nn.layers.norm import ConstantLayerNorm, GroupNorm, LayerNorm, RMSNorm
    from max.nn.lora import AttentionWithRopeAndLoRA, LinearLoRA, SupportsLoRA
    from max.nn.moe import MoE, MoEFp8, MoEGate
    from max.nn.rotary_embedding import (
        DeepseekYarnRopeScalingParams,
        DeepseekYarnRotaryEmbedding,
        DynamicRotaryEmbedding,
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
    from max.nn.sampling import MinPSampler, RejectionSampler, RejectionSamplerWithResiduals
    from max.nn.sequential import Sequential
    from max.nn.transformer.distributed_transformer import (
        DistributedTransformer,
        DistributedTransformerBlock,
    )
    from max.nn.transformer.transformer import (
        ReturnHiddenStates,
        ReturnLogits,
        Transformer,
        TransformerBlock,
    )

_MODULES = {
    "max._compat.nn.conv_v1": "Conv1DV1 Conv2dV1 Conv3DV1",
    "max._compat.nn.layers_v1": "EmbeddingV1 GPTQLinearV1 LayerNormV1 LinearV1 MLPV1 QLinearV1 RMSNormV1",
    "max._compat.nn.quant_config": "QuantConfig QuantFormat",
    "max.nn.attention.attention_with_rope": "AttentionWithRope AttentionWithRopeNoOpaque "
    "DataParallelAttentionWithRope GGUFQAttentionWithRope GPTQAttentionWithRope TensorParallelAttentionWithRope",
    "max.nn.attention.interfaces": "DistributedAttentionImpl",
    "max.nn.attention.mask_config": "MHAMaskConfig MHAMaskVariant",
    "max.nn.attention.multi_latent_attention": "LatentAttentionWithRope",
    "max.nn.attention.multihead_attention": "MultiheadAttention",
    "max.nn.attention.ragged_attention": "RaggedAttention",
    "max.nn.comm": "Allreduce Signals",
    "max.nn.conv_transpose": "ConvTranspose1d WeightNormConvTranspose1d",
    "max.nn.float8_config": "Float8Config Float8InputScaleSpec Float8ScaleGranularity Float8ScaleOrigin "
    "Float8WeightScaleSpec parse_float8_config",
    "max.nn.hooks": "PrintHook",
    "max.nn.identity": "Identity MissingLayer",
    "max.nn.layer": "Layer LayerList Module Shardable add_layer_hook clear_hooks recursive_named_layers",
    "max.nn.layers.conv": "Conv1D Conv2d Conv3D",
    "max.nn.layers.embedding": "Embedding VocabParallelEmbedding",
    "max.nn.layers.gptq_linear": "GPTQLinear",
    "max.nn.layers.linear": "ColumnParallelLinear DistributedGemmConfig Linear",
    "max.nn.layers.mlp": "MLP",
    "max.nn.layers.norm": "ConstantLayerNorm GroupNorm LayerNorm RMSNorm",
    "max.nn.lora": "AttentionWithRopeAndLoRA LinearLoRA SupportsLoRA",
    "max.nn.moe": "MoE MoEFp8 MoEGate",
    "max.nn.rotary_embedding": "DeepseekYarnRopeScalingParams DeepseekYarnRotaryEmbedding "
    "DynamicRotaryEmbedding LinearRotaryEmbedding LinearScalingParams Llama3RopeScalingParams "
    "Llama3RotaryEmbedding LongRoPERotaryEmbedding LongRoPEScalingParams RotaryEmbedding YarnRotaryEmbedding "
    "YarnScalingParams",
    "max.nn.sampling": "MinPSampler RejectionSampler RejectionSamplerWithResiduals",
    "max.nn.sequential": "Sequential",
    "max._compat.nn.stacked_linear": "FusedMLP StackedLinear",
    "max.nn.transformer.distributed_transformer": "DistributedTransformer DistributedTransformerBlock",
    "max.nn.transformer.transformer": "ReturnHiddenStates ReturnLogits Transformer TransformerBlock",
}
"""The names of each module."""
_WHERE = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = [
    "Allreduce",
    "AttentionWithRope",
    "AttentionWithRopeAndLoRA",
    "AttentionWithRopeNoOpaque",
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
    "DynamicRotaryEmbedding",
    "Embedding",
    "EmbeddingV1",
    "Float8Config",
    "Float8InputScaleSpec",
    "Float8ScaleGranularity",
    "Float8ScaleOrigin",
    "Float8WeightScaleSpec",
    "FusedMLP",
    "GGUFQAttentionWithRope",
    "GPTQAttentionWithRope",
    "GPTQLinear",
    "GPTQLinearV1",
    "GroupNorm",
    "Identity",
    "LatentAttentionWithRope",
    "Layer",
    "LayerList",
    "LayerNorm",
    "LayerNormV1",
    "Linear",
    "LinearLoRA",
    "LinearRotaryEmbedding",
    "LinearScalingParams",
    "LinearV1",
    "Llama3RopeScalingParams",
    "Llama3RotaryEmbedding",
    "LongRoPERotaryEmbedding",
    "LongRoPEScalingParams",
    "MHAMaskConfig",
    "MHAMaskVariant",
    "MLP",
    "MLPV1",
    "MinPSampler",
    "MissingLayer",
    "MoE",
    "MoEFp8",
    "MoEGate",
    "Module",
    "MultiheadAttention",
    "PrintHook",
    "QLinearV1",
    "QuantConfig",
    "QuantFormat",
    "RMSNorm",
    "RMSNormV1",
    "RaggedAttention",
    "RejectionSampler",
    "RejectionSamplerWithResiduals",
    "ReturnHiddenStates",
    "ReturnLogits",
    "RotaryEmbedding",
    "Sequential",
    "Shardable",
    "Signals",
    "StackedLinear",
    "SupportsLoRA",
    "TensorParallelAttentionWithRope",
    "Transformer",
    "TransformerBlock",
    "VocabParallelEmbedding",
    "WeightNormConvTranspose1d",
    "YarnRotaryEmbedding",
    "YarnScalingParams",
    "add_layer_hook",
    "clamp",
    "clear_hooks",
    "parse_float8_config",
    "recursive_named_layers",
]

__getattr__ = lazy_names(__name__, _WHERE, submodules=True)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
