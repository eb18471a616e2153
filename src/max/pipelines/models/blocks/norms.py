"""The norms of decoders."""

from __future__ import annotations

from typing import Literal

import numpy as np

from max._dataclass import dataclass
from max.dtype import DType
from max.graph import DeviceRef, TensorValue, Weight, ops
from max.nn import LayerNorm, RMSNorm
from max.nn.layer import Module

__all__ = [
    "HeadNorm",
    "NormForm",
    "PlainLayerNorm",
    "PlainRMSNorm",
    "QKNorm",
    "norm_layer",
    "unit_rms",
]


@dataclass(frozen=True)
class NormForm:
    """The form of a norm.

    Args:
        kind: ``rms``, or ``layer``, which also subtracts the mean.
        weight: Whether there is a weight.
        bias: Whether there is a bias; only layer norms may have one.
        offset: Added to the weight.
    """

    kind: Literal["rms", "layer"] = "rms"
    weight: bool = True
    bias: bool = False
    offset: float = 0.0


@dataclass(frozen=True)
class QKNorm:
    """How queries and keys are normalized.

    Args:
        over: ``head``: each head, with one weight for all; ``each_head``: each head, with its own weight; ``all``: all
            heads of a token together.
        after_rotation: Whether heads are normalized after the rotation instead of before it.
    """

    form: NormForm = NormForm()
    over: Literal["head", "each_head", "all"] = "head"
    after_rotation: bool = False


class PlainLayerNorm(Module):
    """Layer norm without a weight or with an offset of its weight, and an optional bias.

    Args:
        dim: The size of the last dimension.
        dtype: The dtype of the parameters.
        eps: Added to the variance.
        form: States whether there are a weight and a bias, and the weight's offset.
        device: Where it runs.
    """

    def __init__(
        self, dim: int, dtype: DType, eps: float, form: NormForm, device: DeviceRef
    ) -> None:
        self.dim, self.eps, self.offset = dim, eps, form.offset
        self.weight = Weight("weight", dtype, [dim], device) if form.weight else None
        self.bias = Weight("bias", dtype, [dim], device) if form.bias else None

    def __call__(self, x: TensorValue) -> TensorValue:
        """The normalized tensor, of x's dtype.

        Args:
            x: ``[…, dim]``.
        """
        ones = ops.constant(np.ones(self.dim, np.float32), x.dtype, x.device)
        zeros = ops.constant(np.zeros(self.dim, np.float32), x.dtype, x.device)
        weight = ones if self.weight is None else ops.cast(self.weight, x.dtype) + self.offset
        bias = zeros if self.bias is None else ops.cast(self.bias, x.dtype)
        return ops.layer_norm(x, weight, bias, self.eps)


class PlainRMSNorm(Module):
    """RMS norm without a weight.

    Args:
        eps: Added to the mean square.
    """

    def __init__(self, eps: float) -> None:
        self.eps = eps

    def __call__(self, x: TensorValue) -> TensorValue:
        """The normalized tensor, of x's dtype.

        Args:
            x: ``[…, dim]``.
        """
        return unit_rms(x, self.eps)


class HeadNorm(Module):
    """A norm of heads with a separate weight for each head.

    Args:
        heads: The number of heads.
        dim: The size of a head.
        dtype: The dtype of the weight.
        eps: Added to the variance, or to the mean square.
        form: The kind of the norm; bias and offset are not used.
        device: Where it runs.
    """

    def __init__(
        self, heads: int, dim: int, dtype: DType, eps: float, form: NormForm, device: DeviceRef
    ) -> None:
        self.dim, self.eps, self.kind = dim, eps, form.kind
        self.weight = Weight("weight", dtype, [heads, dim], device)

    def __call__(self, x: TensorValue) -> TensorValue:
        """The normalized heads, of x's dtype.

        Args:
            x: ``[rows, heads, dim]``.
        """
        # the weight is of each head, so it is multiplied after
        ones = ops.constant(np.ones(self.dim, np.float32), x.dtype, x.device)
        if self.kind == "rms":
            y = ops.rms_norm(x, ones, self.eps)
        else:
            zeros = ops.constant(np.zeros(self.dim, np.float32), x.dtype, x.device)
            y = ops.layer_norm(x, ones, zeros, self.eps)
        return y * ops.cast(self.weight, x.dtype)


def unit_rms(x: TensorValue, eps: float) -> TensorValue:
    """``x / sqrt(mean(x²) + eps)`` over the last dimension: an RMS norm without a weight.

    Args:
        x: ``[…, dim]``.
        eps: Added to the mean square.
    """
    ones = ops.constant(np.ones(int(x.shape[-1]), np.float32), x.dtype, x.device)
    return ops.rms_norm(x, ones, eps)


def norm_layer(
    form: NormForm, dim: int, dtype: DType, eps: float, device: DeviceRef
) -> RMSNorm | LayerNorm | PlainLayerNorm | PlainRMSNorm:
    """A norm over the last dimension.

    Args:
        form: The form.
        dim: The size of the last dimension.
        dtype: The dtype of the parameters.
        eps: Added to the mean square, or to the variance.
        device: Where it runs.
    """
    if form.kind == "rms":
        if not form.weight:
            return PlainRMSNorm(eps)
        # nothing is rounded before the product with the weight, as hidden states are float32
        return RMSNorm(dim, dtype, eps, form.offset)
    if form.weight and not form.offset:
        return LayerNorm(dim, [device], dtype, eps, use_bias=form.bias)
    return PlainLayerNorm(dim, dtype, eps, form, device)
