"""Normalizations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from max.dtype import DType
from max.graph import DeviceRef, ShardingStrategy, TensorValue, TensorValueLike, Weight, ops
from max.graph.ops.reductions.normalization import normalize_groups
from max.nn.layer import Module
from max.nn.layers.sharding import check_strategy, part_of, parts_of_weight, shard_devices

__all__ = ["ConstantLayerNorm", "GroupNorm", "LayerNorm", "RMSNorm"]


def parameter_for(value: TensorValueLike, x: TensorValue) -> TensorValue:
    """Converts a parameter to the dtype and device for a normalization of `x`."""
    return ops.cast(TensorValue(value), x.dtype).to(x.device)


class _ReplicatedNorm(Module):
    """Base of norms over rows, whose weight is replicated on each device of a sharded model."""

    weight: Weight
    """``[size of a row]``."""

    @property
    def sharding_strategy(self) -> ShardingStrategy | None:
        """How `shard` splits the layer; only ``replicate`` is supported. None: not split.

        Raises:
            ValueError: It is set to another strategy: a row cannot be normalized in parts.
        """
        return self.weight.sharding_strategy

    @sharding_strategy.setter
    def sharding_strategy(self, strategy: ShardingStrategy | None) -> None:
        # the statistics of a row need the whole row: norms are not split over devices
        check_strategy(type(self).__name__, strategy, "replicate")
        self.weight.sharding_strategy = strategy


class RMSNorm(_ReplicatedNorm):
    """``x / sqrt(mean(x²) + eps) * (weight + weight_offset)`` over the last dimension.

    RMS norm (https://arxiv.org/abs/1910.07467). Computed in float32 and rounded to the dtype of x.

    Args:
        dim: The size of the last dimension.
        dtype: The dtype of the weight.
        eps: Added to the mean square.
        weight_offset: Added to the weight; 1 for Gemma.
        multiply_before_cast: If true, the normalized value is multiplied by the weight in float32 and rounded once
            (Gemma); if false, it is rounded to the dtype of x before the product (Llama).
    """

    __module__ = "max.nn.norm"

    def __init__(
        self,
        dim: int,
        dtype: DType,
        eps: float = 1e-6,
        weight_offset: float = 0.0,
        multiply_before_cast: bool = True,
    ) -> None:
        self.weight = Weight("weight", dtype, [dim], DeviceRef.CPU())
        self.eps = eps
        self.weight_offset = weight_offset
        self.multiply_before_cast = multiply_before_cast

    def shard(self, devices: Iterable[DeviceRef]) -> Sequence[RMSNorm]:
        """The layer on each device; all share the weights of this layer.

        Args:
            devices: The devices.

        Raises:
            ValueError: There is no sharding strategy, or its number of devices differs.
        """
        strategy = self.sharding_strategy
        where = shard_devices("RMSNorm", strategy, devices)
        assert strategy is not None
        return [part_of(self, RMSNorm, weight=w) for w in self.weight.shard(where)]

    def __call__(self, x: TensorValue) -> TensorValue:
        """The normalized tensor, of x's dtype.

        Args:
            x: ``[…, dim]``.

        Raises:
            ValueError: The last dimension is not dim.
        """
        return ops.rms_norm(
            x,
            parameter_for(self.weight, x),
            self.eps,
            self.weight_offset,
            self.multiply_before_cast,
        )


class LayerNorm(_ReplicatedNorm):
    """``(x - mean) / sqrt(var + eps) * weight + bias`` over the last dimension.

    Layer norm (https://arxiv.org/abs/1607.06450). Computed in float32 and rounded to the dtype of x.

    Args:
        dims: The size of the last dimension.
        devices: The devices; the layer runs on the first one. A single device is accepted too.
        dtype: The dtype of the parameters.
        eps: Added to the variance.
        use_bias: Whether there is a bias.

    Raises:
        ValueError: There is no device.
    """

    __module__ = "max.nn.norm"

    def __init__(
        self,
        dims: int,
        devices: Sequence[DeviceRef] | DeviceRef,
        dtype: DType,
        eps: float = 1e-5,
        use_bias: bool = True,
    ) -> None:
        if isinstance(devices, DeviceRef):
            devices = [devices]
        if not devices:
            raise ValueError("LayerNorm: no device is given")
        self.eps = eps
        self.weight = Weight("weight", dtype, [dims], devices[0])
        self.bias = Weight("bias", dtype, [dims], devices[0]) if use_bias else None

    def shard(self, devices: Iterable[DeviceRef]) -> Sequence[LayerNorm]:
        """The layer on each device; all share the weights of this layer.

        Args:
            devices: The devices.

        Raises:
            ValueError: There is no sharding strategy, or its number of devices differs.
        """
        strategy = self.sharding_strategy
        where = shard_devices("LayerNorm", strategy, devices)
        assert strategy is not None
        biases = parts_of_weight(self.bias, strategy, where)
        return [
            part_of(self, LayerNorm, weight=weight, bias=bias)
            for weight, bias in zip(self.weight.shard(where), biases, strict=True)
        ]

    def __call__(self, x: TensorValue) -> TensorValue:
        """The normalized tensor, of x's dtype.

        Args:
            x: ``[…, dims]``.

        Raises:
            ValueError: The last dimension is not dims.
        """
        return layer_norm(x, self.weight, self.bias, self.eps)


def layer_norm(
    x: TensorValue, weight: TensorValueLike, bias: TensorValueLike | None, eps: float
) -> TensorValue:
    gamma = parameter_for(weight, x)
    # the op takes a bias in any case
    beta = ops.broadcast_to(
        ops.constant(0, x.dtype, x.device), gamma.shape
    ) if bias is None else parameter_for(bias, x)  # fmt: skip
    return ops.layer_norm(x, gamma, beta, eps)


class ConstantLayerNorm(Module):
    """`LayerNorm` with weight 1 and bias 0.

    Args:
        dims: The size of the last dimension, or a shape of one dimension.
        device: The device of the computation.
        dtype: The dtype of the constants.
        eps: Added to the variance.
    """

    __module__ = "max.nn.norm"

    gamma: npt.NDArray[np.floating[Any]]
    """Ones."""

    beta: npt.NDArray[np.floating[Any]]
    """Zeros."""

    eps: float = 1e-5
    """The number added to the variance."""

    device: DeviceRef
    """The device of the computation."""

    dtype: DType
    """The dtype of the constants."""

    def __init__(
        self, dims: int | tuple[int, ...], device: DeviceRef, dtype: DType, eps: float = 1e-5
    ) -> None:
        self.gamma = np.ones(dims, np.float32)
        self.beta = np.zeros(dims, np.float32)
        self.device, self.dtype, self.eps = device, dtype, eps

    def __call__(self, x: TensorValue) -> TensorValue:
        """The normalized tensor, of x's dtype.

        Args:
            x: ``[…, dims]``.
        """
        gamma = ops.constant(self.gamma, self.dtype, self.device)
        beta = ops.constant(self.beta, self.dtype, self.device)
        return layer_norm(x, gamma, beta, self.eps)


class GroupNorm(Module):
    """``(x - mean) / sqrt(var + eps) * weight + bias``, with mean and variance over a group of channels.

    Statistics are also over all positions; weight and bias are per channel.

    Shapes: ``[batch, channels, …]`` with a static number of channels
    (https://arxiv.org/abs/1803.08494).

    Args:
        num_groups: The number of groups.
        num_channels: The number of channels, a multiple of `num_groups`.
        eps: Added to the variance.
        affine: Whether channels are scaled and offset by weights.
        device: The device of the computation.

    Raises:
        ValueError: The channels cannot be divided into the groups.
    """

    __module__ = "max.nn.norm"

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: DeviceRef = DeviceRef.GPU(),  # noqa: B008 - the documented default
    ) -> None:
        if num_groups < 1 or num_channels % num_groups:
            raise ValueError(
                f"GroupNorm: {num_channels} channels cannot be divided into {num_groups} groups"
            )
        self.num_groups, self.num_channels, self.eps = num_groups, num_channels, eps
        self.affine = affine
        self.weight: Weight | None = None
        self.bias: Weight | None = None
        if affine:
            self.weight = Weight("weight", DType.float32, [num_channels], device)
            self.bias = Weight("bias", DType.float32, [num_channels], device)

    def __call__(self, x: TensorValue) -> TensorValue:
        """The normalized tensor, of x's dtype.

        Args:
            x: ``[batch, num_channels, …]``.

        Raises:
            ValueError: The second dimension is not num_channels.
        """
        if x.rank < 2 or x.shape[1] != self.num_channels:
            raise ValueError(
                f"GroupNorm: the input is {x!r}, expected {self.num_channels} channels"
            )
        if self.weight is None or self.bias is None:
            return ops.cast(normalize_groups(x, self.num_groups, self.eps), x.dtype)
        scale, offset = (w.to(x.device) for w in (self.weight, self.bias))
        return ops.group_norm(x, scale, offset, self.num_groups, self.eps)
