"""The quantization of weights and inputs, with the names and fields of version 26."""

from __future__ import annotations

from max._compat.nn.quant_config import QuantConfig, QuantFormat
from max._names import lazy_names

__all__ = ["QuantConfig", "QuantFormat"]

__getattr__ = lazy_names(__name__)
