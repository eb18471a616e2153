"""Weight files: safetensors, GGUF and torch checkpoints, read by hierarchical name.

::

    from pathlib import Path
    from max.graph.weights import load_weights

    weights = load_weights([Path("model.safetensors")])
    data = weights.model.layers[0].mlp.down_proj.weight.data()
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from max._names import lazy_names
from max.graph.weights._gguf import GGUFWeights
from max.graph.weights._pytorch import PytorchWeights
from max.graph.weights._safetensors import SafetensorWeights

if TYPE_CHECKING:
    from max.graph.weights._deferred_cast import LaterCast
    from max.graph.weights._format import WeightsFormat, weights_format
    from max.graph.weights._gguf_file import GGUF_TYPE_NUMBERS, GGUFFile, GGUFTensor, open_gguf
    from max.graph.weights._gguf_parts import first_parts, gguf_parts, gguf_stem
    from max.graph.weights._hierarchical import Weights
    from max.graph.weights._load import load_weights
    from max.graph.weights._safetensors_file import SafetensorsFile, WeightsFileError
    from max.graph.weights._torch_file import TorchFile
    from max.graph.weights._weight_data import WeightData, WeightsAdapter

_MODULES = {
    "max.graph.weights._deferred_cast": "LaterCast",
    "max.graph.weights._format": "WeightsFormat weights_format",
    "max.graph.weights._gguf_file": "GGUFFile GGUFTensor GGUF_TYPE_NUMBERS open_gguf",
    "max.graph.weights._gguf_parts": "first_parts gguf_parts gguf_stem",
    "max.graph.weights._hierarchical": "Weights",
    "max.graph.weights._load": "load_weights",
    "max.graph.weights._safetensors_file": "SafetensorsFile WeightsFileError",
    "max.graph.weights._torch_file": "TorchFile",
    "max.graph.weights._weight_data": "WeightData WeightsAdapter",
}
"""The names of each module."""
_WHERE = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = [
    "GGUFFile",
    "GGUFTensor",
    "GGUFWeights",
    "GGUF_TYPE_NUMBERS",
    "LaterCast",
    "PytorchWeights",
    "SafetensorWeights",
    "SafetensorsFile",
    "TorchFile",
    "WeightData",
    "Weights",
    "WeightsAdapter",
    "WeightsFileError",
    "WeightsFormat",
    "first_parts",
    "gguf_parts",
    "gguf_stem",
    "load_weights",
    "open_gguf",
    "weights_format",
]

__getattr__ = lazy_names(__name__, _WHERE)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
