"""Attention layers and their masks."""

from max._earlier import earlier_names
from max.nn.attention.mask_config import (
    AttentionMaskVariant,
    MHAMaskConfig,
    MHAMaskVariant,
    PositionalEncodingVariant,
)

from max.nn.attention.attention_with_rope import (  # isort: skip
    AttentionWithRope,
    AttentionWithRopeNoOpaque,
    DataParallelAttentionWithRope,
    GGUFQAttentionWithRope,
    GPTQAttentionWithRope,
    TensorParallelAttentionWithRope,
)
from max.nn.attention.multi_latent_attention import (  # isort: skip
    DataParallelLatentAttentionWithRope,
    LatentAttentionWithRope,
    TensorParallelLatentAttentionWithRope,
)
from max.nn.attention.interfaces import DistributedAttentionImpl  # isort: skip
from max.nn.attention.multihead_attention import MultiheadAttention  # isort: skip
from max.nn.attention.ragged_attention import RaggedAttention  # isort: skip

__all__ = [
    "AttentionMaskVariant",
    "AttentionWithRope",
    "AttentionWithRopeNoOpaque",
    "DataParallelAttentionWithRope",
    "DataParallelLatentAttentionWithRope",
    "GGUFQAttentionWithRope",
    "GPTQAttentionWithRope",
    "LatentAttentionWithRope",
    "DistributedAttentionImpl",
    "MHAMaskConfig",
    "MHAMaskVariant",
    "MultiheadAttention",
    "PositionalEncodingVariant",
    "RaggedAttention",
    "TensorParallelAttentionWithRope",
    "TensorParallelLatentAttentionWithRope",
]


__getattr__ = earlier_names(__name__)
