"""Linear layers and the gated MLP of transformers."""

from __future__ import annotations

from max._compat.nn.layers_v1 import MLPV1, GPTQLinearV1, LinearV1, QLinearV1
from max._names import lazy_names
from max.nn.layers.gptq_linear import GPTQLinear
from max.nn.layers.linear import ColumnParallelLinear, DistributedGemmConfig, Linear
from max.nn.layers.mlp import MLP

__all__ = [
    "ColumnParallelLinear",
    "DistributedGemmConfig",
    "GPTQLinear",
    "GPTQLinearV1",
    "Linear",
    "LinearV1",
    "MLP",
    "MLPV1",
    "QLinearV1",
]

__getattr__ = lazy_names(__name__)
