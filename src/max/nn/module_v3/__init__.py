"""Layers of eager tensors: models that run as they are written, and compile as a whole."""

from max.nn.module_v3.embedding import Embedding
from max.nn.module_v3.linear import Linear
from max.nn.module_v3.module import Module, module_dataclass
from max.nn.module_v3.norm import LayerNorm
from max.nn.module_v3.sequential import Sequential

__all__ = ["Embedding", "LayerNorm", "Linear", "Module", "Sequential", "module_dataclass"]
