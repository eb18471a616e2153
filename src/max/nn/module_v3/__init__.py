"""Layers of eager tensors: models that run eagerly, and that can be compiled as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from max._names import lazy_names
from max.nn.module_v3.conv import Conv2d
from max.nn.module_v3.embedding import Embedding
from max.nn.module_v3.hyper_connection import HyperConnection
from max.nn.module_v3.linear import Linear
from max.nn.module_v3.lora import LoRA, lora_layers, lora_parameters
from max.nn.module_v3.module import Module, TransparentModule, module_dataclass
from max.nn.module_v3.norm import GemmaRMSNorm, GroupNorm, LayerNorm, RMSNorm
from max.nn.module_v3.rope import RotaryEmbedding, TransposedRotaryEmbedding
from max.nn.module_v3.sequential import ModuleList, Sequential

if TYPE_CHECKING:
    from max._compat.nn.subgraphs import PinnedDeviceTensor, as_subgraph

__all__ = [
    "Conv2d",
    "Embedding",
    "GemmaRMSNorm",
    "GroupNorm",
    "HyperConnection",
    "LayerNorm",
    "Linear",
    "LoRA",
    "Module",
    "ModuleList",
    "PinnedDeviceTensor",
    "RMSNorm",
    "RotaryEmbedding",
    "Sequential",
    "TransparentModule",
    "TransposedRotaryEmbedding",
    "as_subgraph",
    "lora_layers",
    "lora_parameters",
    "module_dataclass",
]

_SUBGRAPHS = "max._compat.nn.subgraphs"
__getattr__ = lazy_names(__name__, {"PinnedDeviceTensor": _SUBGRAPHS, "as_subgraph": _SUBGRAPHS})
