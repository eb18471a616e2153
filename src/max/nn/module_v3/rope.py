"""Rotary position embeddings (RoPE): rotations of pairs of elements by angles that grow with the position.

Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", arXiv 2104.09864.
"""

from __future__ import annotations

from collections.abc import Iterator

from max.experimental import functional as F
from max.experimental.tensor import Tensor
from max.graph import Dim, DimLike, StaticDim
from max.nn.layers.rotary import rotate_positions
from max.nn.module_v3.module import Module

__all__ = ["RotaryEmbedding", "TransposedRotaryEmbedding"]

_rotate = F.functional(rotate_positions)


class RotaryEmbedding(Module):
    """Rotates pairs of adjacent elements: 0 and 1, 2 and 3, ….

    Args:
        weight: The cosine and the sine of each position and pair: ``[max_sequence_length, dim / 2, 2]``.

    Raises:
        ValueError: The rank of the weight is not 3, or its last axis is not 2.
    """

    _interleaved = True

    weight: Tensor
    """The cosines and sines: ``[max_sequence_length, dim / 2, 2]``."""

    def __init__(self, weight: Tensor) -> None:
        if weight.rank != 3 or weight.shape[2] != 2:
            raise ValueError(
                f"{type(self).__name__}: weight has shape {list(weight.shape)}, expected "
                "[max_sequence_length, dim / 2, 2]"
            )
        self.weight = weight

    @property
    def dim(self) -> Dim:
        """The size of a head."""
        return self.weight.shape[1] * 2

    @property
    def max_sequence_length(self) -> Dim:
        """The number of positions."""
        return self.weight.shape[0]

    def __call__(self, x: Tensor, start_pos: DimLike = 0) -> Tensor:
        """Rotates each head by its position.

        Args:
            x: Heads: ``[batch, sequence, heads, dim]``.
            start_pos: The position of the first element of the sequence.

        Returns:
            A tensor like x.

        Raises:
            ValueError: The rank of x or the size of a head differs, or a position is not below `max_sequence_length`.
        """
        name = type(self).__name__
        if x.rank != 4 or x.shape[3] != self.dim:
            raise ValueError(
                f"{name}: x has shape {list(x.shape)}, expected [batch, sequence, heads, {self.dim}]"
            )
        length = x.shape[1]
        last = Dim(start_pos) + length
        if isinstance(last, StaticDim) and int(last) > int(self.max_sequence_length):
            raise ValueError(
                f"{name}: the positions end at {last}, expected at most {self.max_sequence_length}"
            )
        return _rotate(x, self.weight, Dim(start_pos), None, self._interleaved)

    def _repr_items(self) -> Iterator[tuple[str, object]]:
        yield "dim", self.dim
        yield "max_sequence_length", self.max_sequence_length


class TransposedRotaryEmbedding(RotaryEmbedding):
    """Rotates pairs of elements that are half a head apart: 0 and dim / 2, 1 and dim / 2 + 1, ….

    Args:
        weight: The cosine and the sine of each position and pair: ``[max_sequence_length, dim / 2, 2]``.

    Raises:
        ValueError: The rank of the weight is not 3, or its last axis is not 2.
    """

    _interleaved = False
