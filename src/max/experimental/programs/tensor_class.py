"""The class of eager tensors, which is defined above the modules that make tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["TENSOR", "TensorClass"]


class TensorClass:
    """How the recorder makes tensors; `max.experimental.tensor` sets the attributes."""

    __slots__ = ("of_cell", "of_value", "type")

    type: type[Any]
    """The class."""
    of_cell: Callable[[Any], Any]
    """Makes a tensor of a recorded value."""
    of_value: Callable[[Any], Any]
    """Makes a tensor of a value of a graph that is being built."""


TENSOR = TensorClass()
