"""Normalizations of rows, and of groups of channels."""

from __future__ import annotations

from max._compat.nn.layers_v1 import LayerNormV1, RMSNormV1
from max.nn.layers.norm import ConstantLayerNorm, GroupNorm, LayerNorm, RMSNorm

__all__ = ["ConstantLayerNorm", "GroupNorm", "LayerNorm", "LayerNormV1", "RMSNorm", "RMSNormV1"]
