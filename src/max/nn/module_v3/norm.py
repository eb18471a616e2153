"""Layer normalisation."""

from __future__ import annotations

from collections.abc import Iterator

from max.experimental import functional as F
from max.experimental.tensor import Tensor
from max.graph import Dim, DimLike
from max.nn.module_v3.module import Module

__all__ = ["LayerNorm"]


class LayerNorm(Module):
    """Normalises the last axis to mean 0 and variance 1, and applies a scale and a shift.

    Args:
        dim: The size of the last axis.
        eps: Added to the variance.
    """

    weight: Tensor
    """The scale, of shape (`dim`,); 1 at first."""
    bias: Tensor
    """The shift, of shape (`dim`,); 0 at first."""

    def __init__(self, dim: DimLike, *, eps: float = 1e-5) -> None:
        self.weight = Tensor.ones([dim])
        self.bias = Tensor.zeros([dim])
        self.eps = eps

    @property
    def dim(self) -> Dim:
        """The size of the last axis."""
        return self.weight.shape[0]

    def __call__(self, x: Tensor) -> Tensor:
        """Normalises the last axis of x."""
        return F.layer_norm(x, self.weight, self.bias, self.eps)

    def _shown(self) -> Iterator[tuple[str, object]]:
        yield "dim", self.dim
