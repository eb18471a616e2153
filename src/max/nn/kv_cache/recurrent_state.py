"""The parameters of states that recurrent layers keep of a sequence, beside the KV cache."""

from __future__ import annotations

import math
from dataclasses import dataclass

from max.dtype import DType

__all__ = ["RecurrentState"]


@dataclass(frozen=True)
class RecurrentState:
    """One state tensor of recurrent layers: the state of a convolution, of a scan.

    Its buffer has the shape ``[slots, layers, *shape]``; a sequence owns one slot of all states of a model.

    Args:
        name: What it is, unique in a model.
        layers: The number of layers that have it.
        shape: The shape of one sequence's state in one layer.
        dtype: The element type.

    Raises:
        ValueError: There is no layer, or a dim is less than 1.
    """

    name: str
    layers: int
    shape: tuple[int, ...]
    dtype: DType = DType.float32

    def __post_init__(self) -> None:
        if self.layers < 1 or any(dim < 1 for dim in self.shape):
            raise ValueError(
                f"RecurrentState: {self.name} has {self.layers} layers of shape {list(self.shape)}; "
                "expected 1 or more layers, and dims of 1 or more"
            )

    @property
    def bytes_per_slot(self) -> int:
        """The bytes of one sequence's state in all layers."""
        return self.layers * math.prod(self.shape) * self.dtype.size_in_bytes
