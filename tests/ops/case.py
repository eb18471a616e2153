"""Cases of the table of ops."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from max.graph import Graph

Array = np.ndarray
Run = Callable[[Graph, Sequence[Array], Mapping[str, Array]], Sequence[Any]]

FLOATS = ("float32", "float64", "float16", "bfloat16")
INTS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
NUMBERS = FLOATS + INTS
BOOL = ("bool",)
ALL = NUMBERS + BOOL
SIZES = (1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 33)


@dataclass(frozen=True)
class OpCase:
    """One op on operands of one family of shapes."""

    name: str
    build: Callable[..., Any]
    """From the operands (`TensorValue`s) to a value or a sequence of values."""
    reference: Callable[..., Any]
    """From the operands (floats as float64) to an array or a sequence of arrays."""
    shapes: tuple[tuple[str | int, ...], ...]
    """For each operand its dimensions: a letter is a size that is drawn, and a symbolic dimension."""
    dtypes: tuple[str, ...] = FLOATS
    """The dtypes of those operands that `fixed` does not name."""
    domain: tuple[float, float] = (-4.0, 4.0)
    """From where floats are drawn."""
    fixed: Mapping[int, tuple[str, tuple[float, float]]] | None = None
    """Operands of another dtype, with their domain: indices, conditions."""
    scale: float = 1.0
    """What the tolerance is multiplied by: long sums, functions that amplify errors."""
    sizes: tuple[int, ...] = SIZES
    """What the letters stand for."""

    def __str__(self) -> str:
        return self.name


def torch_reference(function: Callable[[Any, Any], Any]) -> Callable[..., Array]:
    """A reference in torch; the module ``torch`` is its first argument."""

    def reference(*operands: Array) -> Array:
        import torch

        tensors = [torch.from_numpy(np.ascontiguousarray(x)) for x in operands]
        return function(torch, *tensors).numpy()

    return reference
