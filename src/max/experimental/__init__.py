"""Experimental APIs: eager tensors, the functions on them, and random tensors."""

from max._earlier import earlier_names
from max.experimental import functional, random, tensor
from max.experimental.tensor import Tensor

__all__ = ["Tensor", "functional", "random", "tensor"]

__getattr__ = earlier_names(__name__)
