"""Llama and models of the same form: RMS norms, rotary positions, grouped heads, a gated MLP.

Names are loaded when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from max._names import lazy_names

if TYPE_CHECKING:
    from max.pipelines.architectures.llama3.arch import ARCHITECTURES, llama_arch
    from max.pipelines.architectures.llama3.llama3 import Llama3
    from max.pipelines.architectures.llama3.model import Llama3Inputs, Llama3Model
    from max.pipelines.architectures.llama3.model_config import Llama3Config

_HERE = "max.pipelines.architectures.llama3."
_WHERE = {
    "ARCHITECTURES": _HERE + "arch",
    "Llama3": _HERE + "llama3",
    "Llama3Config": _HERE + "model_config",
    "Llama3Inputs": _HERE + "model",
    "Llama3Model": _HERE + "model",
    "llama_arch": _HERE + "arch",
}

__all__ = [
    "ARCHITECTURES",
    "Llama3",
    "Llama3Config",
    "Llama3Inputs",
    "Llama3Model",
    "llama_arch",
]

__getattr__ = lazy_names(__name__, _WHERE)
