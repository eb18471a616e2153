"""Attention layers and their masks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from max._names import lazy_names

if TYPE_CHECKING:
    from max.nn.attention.attention_with_rope import (
        AttentionWithRope,
        AttentionWithRopeNoOpaque,
        DataParallelAttentionWithRope,
        GGUFQAttentionWithRope,
        GPTQAttentionWithRope,
        TensorParallelAttentionWithRope,
    )
    from max.nn.attention.interfaces import DistributedAttentionImpl
    from max.nn.attention.mask_config import (
        AttentionMaskVariant,
        MHAMaskConfig,
        MHAMaskVariant,
        PositionalEncodingVariant,
    )
    from max.nn.attention.multi_latent_attention import (
        DataParallelLatentAttentionWithRope,
        LatentAttentionWithRope,
        TensorParallelLatentAttentionWithRope,
    )
    from max.nn.attention.multihead_attention import MultiheadAttention
    from max.nn.attention.ragged_attention import RaggedAttention

_MODULES = {
    "attention_with_rope": "AttentionWithRope AttentionWithRopeNoOpaque DataParallelAttentionWithRope "
    "GGUFQAttentionWithRope GPTQAttentionWithRope TensorParallelAttentionWithRope",
    "interfaces": "DistributedAttentionImpl",
    "mask_config": "AttentionMaskVariant MHAMaskConfig MHAMaskVariant PositionalEncodingVariant",
    "multi_latent_attention": "DataParallelLatentAttentionWithRope LatentAttentionWithRope "
    "TensorParallelLatentAttentionWithRope",
    "multihead_attention": "MultiheadAttention",
    "ragged_attention": "RaggedAttention",
}
"""The names of each module."""
_WHERE = {
    name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names.split()
}

__all__ = [
    "AttentionMaskVariant",
    "AttentionWithRope",
    "AttentionWithRopeNoOpaque",
    "DataParallelAttentionWithRope",
    "DataParallelLatentAttentionWithRope",
    "DistributedAttentionImpl",
    "GGUFQAttentionWithRope",
    "GPTQAttentionWithRope",
    "LatentAttentionWithRope",
    "MHAMaskConfig",
    "MHAMaskVariant",
    "MultiheadAttention",
    "PositionalEncodingVariant",
    "RaggedAttention",
    "TensorParallelAttentionWithRope",
    "TensorParallelLatentAttentionWithRope",
]

__getattr__ = lazy_names(__name__, _WHERE, submodules=True)
