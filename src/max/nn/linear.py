"""Linear layers and the gated MLP of transformers."""

from __future__ import annotations

from max._earlier import earlier_names
from max.nn._linear import ColumnParallelLinear, DistributedGemmConfig, Linear
from max.nn._linear_gptq import GPTQLinear
from max.nn._linear_v1 import MLPV1, GPTQLinearV1, LinearV1, QLinearV1
from max.nn._mlp import MLP

__all__ = [
    "MLP",
    "ColumnParallelLinear",
    "DistributedGemmConfig",
    "GPTQLinear",
    "GPTQLinearV1",
    "Linear",
    "LinearV1",
    "MLPV1",
    "QLinearV1",
]

__getattr__ = earlier_names(__name__)
