"""The parameters of the per-sequence states of recurrent layers, which are kept beside the KV cache."""

from __future__ import annotations

import math
from dataclasses import dataclass

from max.dtype import DType

__all__ = ["RecurrentState"]


@dataclass(frozen=True)
class RecurrentState:
    """One state tensor of recurrent layers, such as that of a convolution or of a scan.

    Its buffer has the shape ``[slots, layers, *shape]``; a sequence owns the same slot in all states of a model.

    Args:
        name: The name of the state, unique in a model.
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
