"""Multi-head latent attention (https://arxiv.org/abs/2405.04434)."""

from __future__ import annotations

from max.nn.attention._latent_attention import ExpansionChange, LatentAttentionWithRope
from max.nn.attention._latent_attention_parallel import (
    DataParallelLatentAttentionWithRope,
    TensorParallelLatentAttentionWithRope,
)

__all__ = [
    "ExpansionChange",
    "DataParallelLatentAttentionWithRope",
    "LatentAttentionWithRope",
    "TensorParallelLatentAttentionWithRope",
]
