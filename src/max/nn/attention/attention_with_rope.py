"""Attention with rotary position embedding over a paged KV cache."""

from __future__ import annotations

from max._names import lazy_names
from max.nn.attention._rope_attention import (
    AttentionWithRope,
    AttentionWithRopeNoOpaque,
    distribute_value,
)
from max.nn.attention._rope_attention_parallel import (
    DataParallelAttentionWithRope,
    TensorParallelAttentionWithRope,
)
from max.nn.attention._rope_attention_quantized import (
    GGUFQAttentionWithRope,
    GPTQAttentionWithRope,
)

__all__ = [
    "AttentionWithRope",
    "AttentionWithRopeNoOpaque",
    "DataParallelAttentionWithRope",
    "GGUFQAttentionWithRope",
    "GPTQAttentionWithRope",
    "TensorParallelAttentionWithRope",
    "distribute_value",
]

__getattr__ = lazy_names(__name__)
