"""Experimental APIs: eager tensors, the functions on them, and random tensors."""

from max._names import lazy_names
from max.experimental import custom, functional, random, tensor
from max.experimental.custom import CustomOp
from max.experimental.tensor import Tensor

__all__ = ["CustomOp", "Tensor", "custom", "functional", "random", "tensor"]

__getattr__ = lazy_names(__name__)
