"""Normalizations of the last axis, and of groups of channels."""

from __future__ import annotations

from collections.abc import Iterator

from max.dtype import DType
from max.experimental import functional as F
from max.experimental.tensor import Tensor
from max.graph import Dim, DimLike
from max.nn.module_v3.module import Module

__all__ = ["GemmaRMSNorm", "GroupNorm", "LayerNorm", "RMSNorm"]


class LayerNorm(Module):
    """``(x - mean) / sqrt(var + eps) * weight + bias`` over the last axis (https://arxiv.org/abs/1607.06450).

    Args:
        dim: The size of the last axis.
        eps: Added to the variance.
        keep_dtype: Whether to normalize in the dtype of x if the parameters have it; otherwise in float32. The result
            has the dtype of x.
        elementwise_affine: Whether there is a scale.
        use_bias: Whether there is a shift; ignored without a scale.
    """

    weight: Tensor | None
    """The scale, of shape (`dim`,); 1 at first. None without one."""
    bias: Tensor | None
    """The shift, of shape (`dim`,); 0 at first. None without one."""

    def __init__(
        self,
        dim: DimLike,
        eps: float = 1e-5,
        *,
        keep_dtype: bool = True,
        elementwise_affine: bool = True,
        use_bias: bool = True,
    ) -> None:
        self._dim = Dim(dim)
        self.weight = Tensor.ones([dim]) if elementwise_affine else None
        self.bias = Tensor.zeros([dim]) if elementwise_affine and use_bias else None
        self.eps, self.keep_dtype = eps, keep_dtype

    @property
    def dim(self) -> Dim:
        """The size of the last axis."""
        return self._dim

    def __call__(self, x: Tensor) -> Tensor:
        """Normalizes the last axis of x.

        Raises:
            ValueError: The size of the axis is not `dim`.
        """
        if self.weight is None and x.shape[-1] != self._dim:
            raise ValueError(f"LayerNorm: the last axis of {x.type!r} is not {self._dim}")
        own = x.dtype if self.weight is None else self.weight.dtype
        # parameters of another dtype: compute in float32
        dtype = x.dtype if self.keep_dtype and own is x.dtype else DType.float32
        like = {"dtype": dtype, "device": x.device}
        weight = F.ones([self._dim], **like) if self.weight is None else F.cast(self.weight, dtype)
        bias = F.zeros([self._dim], **like) if self.bias is None else F.cast(self.bias, dtype)
        return F.cast(F.layer_norm(F.cast(x, dtype), weight, bias, self.eps), x.dtype)

    def _repr_items(self) -> Iterator[tuple[str, object]]:
        yield "dim", self.dim


class RMSNorm(Module):
    """``x / sqrt(mean(x²) + eps) * weight`` over the last axis (https://arxiv.org/abs/1910.07467).

    The result has the shape and dtype of x.

    Args:
        dim: The size of the last axis.
        eps: Added to the mean square.
    """

    weight: Tensor
    """The scale, of shape (`dim`,); 1 at first."""

    def __init__(self, dim: DimLike, eps: float = 1e-6) -> None:
        self.weight = Tensor.ones([dim])
        self.eps = eps

    @property
    def dim(self) -> Dim:
        """The size of the last axis."""
        return self.weight.shape[0]

    def __call__(self, x: Tensor) -> Tensor:
        """Normalizes the last axis of x."""
        return F.rms_norm(x, self.weight, self.eps)

    def _repr_items(self) -> Iterator[tuple[str, object]]:
        yield "dim", self.dim


class GemmaRMSNorm(RMSNorm):
    """`RMSNorm` with the scale ``weight + 1``, as Gemma stores it; the weight is 0 at first.

    Args:
        dim: The size of the last axis.
        eps: Added to the mean square.
    """

    def __init__(self, dim: DimLike, eps: float = 1e-6) -> None:
        super().__init__(dim, eps)
        self.weight = Tensor.zeros([dim])

    def __call__(self, x: Tensor) -> Tensor:
        """Normalizes the last axis of x."""
        return F.rms_norm(x, self.weight, self.eps, weight_offset=1.0)


class GroupNorm(Module):
    """``(x - mean) / sqrt(var + eps) * weight + bias``, with mean and variance over a group of channels.

    Statistics are also over all positions; weight and bias are per channel (https://arxiv.org/abs/1803.08494).

    Args:
        num_groups: The number of groups.
        num_channels: The number of channels, a multiple of `num_groups`.
        eps: Added to the variance.
        affine: Whether channels are scaled and shifted.

    Raises:
        ValueError: The channels cannot be divided into the groups.
    """

    weight: Tensor | None
    """The scale, of shape (`num_channels`,); 1 at first."""
    bias: Tensor | None
    """The shift, of shape (`num_channels`,); 0 at first."""

    def __init__(
        self, num_groups: int, num_channels: int, eps: float = 1e-5, affine: bool = True
    ) -> None:
        if num_groups < 1 or num_channels % num_groups:
            raise ValueError(
                f"GroupNorm: {num_channels} channels cannot be divided into {num_groups} groups"
            )
        self.num_groups, self.num_channels, self.eps = num_groups, num_channels, eps
        self.weight = Tensor.ones([num_channels]) if affine else None
        self.bias = Tensor.zeros([num_channels]) if affine else None

    def __call__(self, x: Tensor) -> Tensor:
        """Normalizes the groups of x, ``[batch, num_channels, …]``.

        Raises:
            ValueError: The number of channels of x is not `num_channels`.
        """
        channels = [self.num_channels]
        weight = Tensor.ones(channels) if self.weight is None else self.weight
        bias = Tensor.zeros(channels) if self.bias is None else self.bias
        return F.group_norm(x, weight, bias, self.num_groups, self.eps)

    def _repr_items(self) -> Iterator[tuple[str, object]]:
        yield "num_groups", self.num_groups
        yield "num_channels", self.num_channels
