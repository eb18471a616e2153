"""A linear transformation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from max.experimental import random
from max.experimental.tensor import Tensor
from max.graph import Dim, DimLike
from max.nn.module_v3.module import Module

__all__ = ["Linear"]


class Linear(Module):
    """``x @ weight.T + bias``; parameters are initialized at random.

    Shapes: ``x`` is ``[…, in_dim]``, the result ``[…, out_dim]``.

    Args:
        in_dim: The size of the last axis of x.
        out_dim: The size of the last axis of the result.
        bias: Whether there is a bias.
    """

    weight: Tensor
    """The weight, of shape (`out_dim`, `in_dim`)."""
    bias: Tensor | Literal[0]
    """The bias, of shape (`out_dim`,); 0 without one."""

    def __init__(self, in_dim: DimLike, out_dim: DimLike, *, bias: bool = True) -> None:
        self.weight = random.normal([out_dim, in_dim])
        self.bias = random.normal([out_dim]) if bias else 0

    @property
    def in_dim(self) -> Dim:
        """The size of the last axis of the input."""
        return self.weight.shape[1]

    @property
    def out_dim(self) -> Dim:
        """The size of the last axis of the result."""
        return self.weight.shape[0]

    def __call__(self, x: Tensor) -> Tensor:
        """Applies the transformation to the last axis of x.

        Raises:
            ValueError: The size of the axis is not `in_dim`.
        """
        product = x @ self.weight.T
        return product + self.bias if isinstance(self.bias, Tensor) else product

    def _repr_items(self) -> Iterator[tuple[str, object]]:
        yield "in_dim", self.in_dim
        yield "out_dim", self.out_dim
        if not isinstance(self.bias, Tensor):
            yield "bias", False
