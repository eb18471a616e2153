"""Layers of eager tensors: models that run eagerly, and that can be compiled as a whole."""

from max.nn.module_v3.conv import Conv2d
from max.nn.module_v3.embedding import Embedding
from max.nn.module_v3.hyper_connection import HyperConnection
from max.nn.module_v3.later import PinnedDeviceTensor, as_subgraph
from max.nn.module_v3.linear import Linear
from max.nn.module_v3.lora import LoRA, lora_layers, lora_parameters
from max.nn.module_v3.module import Module, TransparentModule, module_dataclass
from max.nn.module_v3.norm import GemmaRMSNorm, GroupNorm, LayerNorm, RMSNorm
from max.nn.module_v3.rope import RotaryEmbedding, TransposedRotaryEmbedding
from max.nn.module_v3.sequential import ModuleList, Sequential

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
