"""Experimental APIs: eager tensors, the functions on them, and random tensors.

Names are loaded when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from max._lazy import lazy_module
from max._names import lazy_names
from max.experimental.mesh_forms import set_meshes

if TYPE_CHECKING:
    from max.experimental import custom, functional, random, tensor
    from max.experimental.custom import CustomOp
    from max.experimental.tensor import Tensor

# meshes of devices, which only programs of other versions name
set_meshes(lazy_module("max._compat.experimental.v26_meshes"))

_WHERE = {"CustomOp": "max.experimental.custom", "Tensor": "max.experimental.tensor"}

__all__ = ["CustomOp", "Tensor", "custom", "functional", "random", "tensor"]

__getattr__ = lazy_names(__name__, _WHERE, submodules=True)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
