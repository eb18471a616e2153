"""Experimental APIs: eager tensors, the functions on them, and random tensors."""

from max._earlier import earlier_names
from max.experimental import custom, functional, random, tensor
from max.experimental.custom import CustomOp
from max.experimental.tensor import Tensor

__all__ = ["CustomOp", "Tensor", "custom", "functional", "random", "tensor"]

__getattr__ = earlier_names(__name__)
