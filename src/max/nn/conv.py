"""Convolutions over sequences, images and volumes.

Channels come last: ``[N, L, C]``, ``[N, H, W, C]``, ``[N, D, H, W, C]``. With `permute` they come second, in inputs
and results, and filters are laid out as PyTorch has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from max.dtype import DType
from max.graph import (
    ConvInputLayout,
    DeviceRef,
    FilterLayout,
    ShardingStrategy,
    TensorValue,
    TensorValueLike,
    Weight,
    ops,
)
from max.nn._sharding import check_strategy, part_of, parts_of_weight, shard_devices
from max.nn.layer import Layer, Module

__all__ = ["Conv1D", "Conv1DV1", "Conv2d", "Conv2dV1", "Conv3D", "Conv3DV1"]


def numbers(layer: str, what: str, value: int | Sequence[int], count: int) -> tuple[int, ...]:
    """One number for each spatial axis.

    Args:
        layer: The layer, for the message.
        what: The argument.
        value: A number for all axes, or one for each.
        count: The number of axes.

    Raises:
        ValueError: The number of values is wrong.
    """
    sizes = (value,) * count if isinstance(value, int) else tuple(value)
    if len(sizes) != count:
        raise ValueError(f"{layer}: {what} is {value!r}, expected a number or {count} of them")
    return sizes


def paddings(layer: str, value: int | Sequence[int], count: int) -> tuple[int, ...]:
    """The padding before and after each spatial axis.

    Args:
        layer: The layer, for the message.
        value: A number for all sides, one for each axis, or two for each axis.
        count: The number of axes.

    Raises:
        ValueError: The number of values is wrong.
    """
    sizes = (value,) * count if isinstance(value, int) else tuple(value)
    if len(sizes) == count:
        return tuple(n for n in sizes for _ in range(2))
    if len(sizes) != 2 * count:
        raise ValueError(
            f"{layer}: padding is {value!r}, expected a number, {count} of them or {2 * count}"
        )
    return sizes


class _Conv(Module):
    """Base of the convolution layers.

    Args:
        taps: The filter's size along each spatial axis.
        in_channels: The channels of the input.
        out_channels: The channels of the result.
        dtype: The dtype of filter and bias.
        num_groups: The number of channel groups.
        device: The device of the computation; the CPU by default.
        has_bias: Whether there is a bias.
        permute: Whether channels come second, and the filter is laid out as PyTorch has it.
        name: The prefix of the weights' names.

    Raises:
        ValueError: The groups do not divide the channels.
    """

    filter: Weight
    """``[taps…, in_channels / num_groups, out_channels]``; with `permute`
    ``[out_channels, in_channels / num_groups, taps…]``."""

    bias: Weight | None
    """``[out_channels]``."""

    device: DeviceRef
    """The device of the computation."""

    num_groups: int
    """The number of channel groups."""

    permute: bool
    """Whether channels come second, and the filter is laid out as PyTorch has it."""

    def __init__(
        self,
        taps: Sequence[int],
        in_channels: int,
        out_channels: int,
        dtype: DType,
        num_groups: int,
        device: DeviceRef | None,
        has_bias: bool,
        permute: bool,
        name: str | None,
    ) -> None:
        if num_groups < 1 or in_channels % num_groups or out_channels % num_groups:
            raise ValueError(
                f"{type(self).__name__}: {num_groups} groups do not divide {in_channels} channels of the "
                f"input and {out_channels} of the result"
            )
        self.device = DeviceRef.CPU() if device is None else device
        self.num_groups, self.permute = num_groups, permute
        channels = in_channels // num_groups
        shape = (out_channels, channels, *taps) if permute else (*taps, channels, out_channels)
        prefix = f"{name}." if name else ""
        self.filter = Weight(f"{prefix}weight", dtype, shape, self.device)
        self.bias = (
            Weight(f"{prefix}bias", dtype, (out_channels,), self.device) if has_bias else None
        )

    @property
    def layout(self) -> ConvInputLayout:
        """The layout of inputs and results."""
        return ConvInputLayout.NCHW if self.permute else ConvInputLayout.NHWC

    def check(self, x: TensorValue, rank: int) -> None:
        """Checks an input's rank and channels.

        Raises:
            ValueError: They are others.
        """
        axis = 1 if self.permute else -1
        filter = self.filter.shape[1 if self.permute else -2]
        channels = filter * self.num_groups
        if x.rank != rank or x.shape[axis] != channels:
            order = "channels second" if self.permute else "channels last"
            raise ValueError(
                f"{type(self).__name__}: the input is {x!r}, expected rank {rank} with {channels} "
                f"channels, {order} (permute={self.permute})"
            )


class Conv1D(_Conv):
    """Convolution over sequences.

    Shapes: ``[N, L, in_channels]`` gives ``[N, OL, out_channels]``, with `permute` channels second.

    Args:
        kernel_size: The filter's length.
        in_channels: The channels of the input.
        out_channels: The channels of the result.
        dtype: The dtype of filter and bias.
        stride: The step between windows.
        padding: Zeros before and after: one number, or two.
        dilation: The step between the taps of a window.
        num_groups: The number of channel groups; each is a separate convolution.
        device: The device of the computation; the CPU by default.
        has_bias: Whether there is a bias.
        permute: Whether channels come second, and the filter is ``[out, in / groups, taps]`` as in PyTorch.
        name: The prefix of the weights' names.

    Raises:
        ValueError: The groups do not divide the channels, or padding has other than one or two numbers.
    """

    def __init__(
        self,
        kernel_size: int,
        in_channels: int,
        out_channels: int,
        dtype: DType,
        stride: int = 1,
        padding: int | tuple[int, int] = 0,
        dilation: int = 1,
        num_groups: int = 1,
        device: DeviceRef | None = None,
        has_bias: bool = False,
        permute: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(
            (kernel_size,), in_channels, out_channels, dtype, num_groups, device, has_bias, permute, name
        )  # fmt: skip
        self.stride, self.padding, self.dilation = stride, padding, dilation
        paddings("Conv1D", padding, 1)

    def __call__(self, x: TensorValue) -> TensorValue:
        """The convolution.

        Args:
            x: ``[N, L, in_channels]``, or ``[N, in_channels, L]`` with `permute`.

        Raises:
            ValueError: The input has another rank or other channels.
        """
        self.check(x, 3)
        # a sequence is an image of height 1
        filter = ops.unsqueeze(self.filter, 2 if self.permute else 0)
        axis = 2 if self.permute else 1
        y = ops.conv2d(
            ops.unsqueeze(x, axis),
            filter,
            stride=(1, self.stride),
            dilation=(1, self.dilation),
            padding=(0, 0, *paddings("Conv1D", self.padding, 1)),  # pyright: ignore[reportArgumentType]
            groups=self.num_groups,
            bias=self.bias,
            input_layout=self.layout,
            filter_layout=FilterLayout.FCRS if self.permute else FilterLayout.RSCF,
        )
        return ops.squeeze(y, axis)


class Conv2d(_Conv):
    """Convolution over images.

    Shapes: ``[N, H, W, in_channels]`` gives ``[N, OH, OW, out_channels]``, with `permute` channels second.

    Args:
        kernel_size: The filter's height and width, or one number for both.
        in_channels: The channels of the input.
        out_channels: The channels of the result.
        dtype: The dtype of filter and bias.
        stride: The step between windows along height and width, or one number for both.
        padding: Zeros around: one number, (height, width), or (top, bottom, left, right).
        dilation: The step between the taps of a window, as `stride`.
        num_groups: The number of channel groups; each is a separate convolution.
        device: The device of the computation; the CPU by default.
        has_bias: Whether there is a bias.
        permute: Whether channels come second, and the filter is ``[out, in / groups, R, S]`` as in PyTorch.
        name: The prefix of the weights' names.

    Raises:
        ValueError: The groups do not divide the channels, or an argument has a wrong number of numbers.
    """

    stride: tuple[int, ...]
    """The step between windows along height and width."""

    padding: tuple[int, ...]
    """Zeros before and after height, before and after width."""

    dilation: tuple[int, ...]
    """The step between the taps of a window along height and width."""

    def __init__(
        self,
        kernel_size: int | tuple[int, int],
        in_channels: int,
        out_channels: int,
        dtype: DType,
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] | tuple[int, int, int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        num_groups: int = 1,
        device: DeviceRef | None = None,
        has_bias: bool = False,
        permute: bool = False,
        name: str | None = None,
    ) -> None:
        taps = numbers("Conv2d", "kernel_size", kernel_size, 2)
        super().__init__(
            taps, in_channels, out_channels, dtype, num_groups, device, has_bias, permute, name
        )
        self.stride = numbers("Conv2d", "stride", stride, 2)
        self.padding = paddings("Conv2d", padding, 2)
        self.dilation = numbers("Conv2d", "dilation", dilation, 2)

    @property
    def sharding_strategy(self) -> ShardingStrategy | None:
        """How `shard` splits the layer: replicate; None: not split.

        Raises:
            ValueError: It is set to another strategy.
        """
        return self.filter.sharding_strategy

    @sharding_strategy.setter
    def sharding_strategy(self, strategy: ShardingStrategy | None) -> None:
        check_strategy("Conv2d", strategy, "replicate")
        self.filter.sharding_strategy = strategy

    def shard(self, devices: Iterable[DeviceRef]) -> list[Conv2d]:
        """The layer on each device; the weights are those of this one.

        Args:
            devices: The devices.

        Raises:
            ValueError: There is no sharding strategy, or it is for another number of devices.
        """
        strategy = self.sharding_strategy
        where = shard_devices("Conv2d", strategy, devices)
        assert strategy is not None
        biases = parts_of_weight(self.bias, strategy, where)
        return [
            part_of(self, Conv2d, filter=filter, bias=bias, device=device)
            for filter, bias, device in zip(self.filter.shard(where), biases, where, strict=True)
        ]

    def __call__(self, x: TensorValue) -> TensorValue:
        """The convolution.

        Args:
            x: ``[N, H, W, in_channels]``, or ``[N, in_channels, H, W]`` with `permute`.

        Raises:
            ValueError: The input has another rank or other channels.
        """
        self.check(x, 4)
        return ops.conv2d(
            x,
            self.filter,
            stride=self.stride,  # pyright: ignore[reportArgumentType]
            dilation=self.dilation,  # pyright: ignore[reportArgumentType]
            padding=self.padding,  # pyright: ignore[reportArgumentType]
            groups=self.num_groups,
            bias=self.bias,
            input_layout=self.layout,
            filter_layout=FilterLayout.FCRS if self.permute else FilterLayout.RSCF,
        )


class Conv3D(_Conv):
    """Convolution over volumes.

    Shapes: ``[N, D, H, W, in_channels]`` gives ``[N, OD, OH, OW, out_channels]``, with `permute` channels second.

    Args:
        depth: The filter's size along D.
        height: The filter's size along H.
        width: The filter's size along W.
        in_channels: The channels of the input.
        out_channels: The channels of the result.
        dtype: The dtype of filter and bias.
        stride: The step between windows along D, H and W, or one number for all.
        padding: Zeros around: one number, one for each of D, H and W, or two for each.
        dilation: The step between the taps of a window, as `stride`.
        num_groups: The number of channel groups; each is a separate convolution.
        device: The device of the computation; the CPU by default.
        has_bias: Whether there is a bias.
        permute: Whether channels come second, and the filter is ``[out, in / groups, Q, R, S]`` as in PyTorch.
        name: The prefix of the weights' names.

    Raises:
        ValueError: The groups do not divide the channels, or an argument has a wrong number of numbers.
    """

    stride: tuple[int, ...]
    """The step between windows along D, H and W."""

    padding: tuple[int, ...]
    """Zeros before and after D, H and W."""

    dilation: tuple[int, ...]
    """The step between the taps of a window along D, H and W."""

    def __init__(
        self,
        depth: int,
        height: int,
        width: int,
        in_channels: int,
        out_channels: int,
        dtype: DType,
        stride: int | tuple[int, int, int] = 1,
        padding: int | tuple[int, int, int] | tuple[int, int, int, int, int, int] = 0,
        dilation: int | tuple[int, int, int] = 1,
        num_groups: int = 1,
        device: DeviceRef | None = None,
        has_bias: bool = False,
        permute: bool = False,
        name: str | None = None,
    ) -> None:
        taps = (depth, height, width)
        super().__init__(
            taps, in_channels, out_channels, dtype, num_groups, device, has_bias, permute, name
        )
        self.stride = numbers("Conv3D", "stride", stride, 3)
        self.padding = paddings("Conv3D", padding, 3)
        self.dilation = numbers("Conv3D", "dilation", dilation, 3)

    def __call__(self, x: TensorValue) -> TensorValue:
        """The convolution.

        Args:
            x: ``[N, D, H, W, in_channels]``, or ``[N, in_channels, D, H, W]`` with `permute`.

        Raises:
            ValueError: The input has another rank or other channels.
        """
        self.check(x, 5)
        return ops.conv3d(
            x,
            self.filter,
            stride=self.stride,  # pyright: ignore[reportArgumentType]
            dilation=self.dilation,  # pyright: ignore[reportArgumentType]
            padding=self.padding,  # pyright: ignore[reportArgumentType]
            groups=self.num_groups,
            bias=self.bias,
            input_layout=self.layout,
            filter_layout=FilterLayout.FCQRS if self.permute else FilterLayout.QRSCF,
        )


class Conv1DV1(Layer):
    """Convolution over sequences with graph values instead of weights. Deprecated: use `Conv1D`.

    Args:
        filter: ``[taps, in_channels / groups, out_channels]``.
        bias: ``[out_channels]``.
        stride: The step between windows.
        padding: Zeros before and after.
        dilation: The step between the taps of a window.
        groups: The number of channel groups.
    """

    def __init__(
        self,
        filter: TensorValueLike,
        bias: TensorValueLike | None = None,
        stride: int = 1,
        padding: int = 0,
        dilation: int = 1,
        groups: int = 1,
    ) -> None:
        self.filter, self.bias = filter, bias
        self.stride, self.padding, self.dilation, self.groups = stride, padding, dilation, groups

    def __call__(self, x: TensorValueLike) -> TensorValue:
        """The convolution.

        Args:
            x: ``[N, L, in_channels]``.
        """
        y = ops.conv2d(
            ops.unsqueeze(x, 1),
            ops.unsqueeze(self.filter, 0),
            stride=(1, self.stride),
            dilation=(1, self.dilation),
            padding=(0, 0, self.padding, self.padding),
            groups=self.groups,
            bias=self.bias,
        )
        return ops.squeeze(y, 1)


class Conv2dV1(Layer):
    """Convolution over images with graph values instead of weights. Deprecated: use `Conv2d`.

    Args:
        filter: ``[R, S, in_channels / groups, out_channels]``.
        bias: ``[out_channels]``.
        stride: The step between windows along height and width, or one number for both.
        padding: Zeros around: one number, (height, width), or (top, bottom, left, right).
        dilation: The step between the taps of a window, as `stride`.
        groups: The number of channel groups.

    Raises:
        ValueError: An argument has a wrong number of numbers.
    """

    def __init__(
        self,
        filter: TensorValueLike,
        bias: TensorValueLike | None = None,
        stride: int | tuple[int, int] = (1, 1),
        padding: int | tuple[int, int] | tuple[int, int, int, int] = (0, 0, 0, 0),
        dilation: int | tuple[int, int] = (1, 1),
        groups: int = 1,
    ) -> None:
        self.filter, self.bias, self.groups = filter, bias, groups
        self.stride = numbers("Conv2dV1", "stride", stride, 2)
        self.padding = paddings("Conv2dV1", padding, 2)
        self.dilation = numbers("Conv2dV1", "dilation", dilation, 2)

    def __call__(self, x: TensorValueLike) -> TensorValue:
        """The convolution.

        Args:
            x: ``[N, H, W, in_channels]``.
        """
        return ops.conv2d(
            x,
            self.filter,
            stride=self.stride,  # pyright: ignore[reportArgumentType]
            dilation=self.dilation,  # pyright: ignore[reportArgumentType]
            padding=self.padding,  # pyright: ignore[reportArgumentType]
            groups=self.groups,
            bias=self.bias,
        )


class Conv3DV1(Layer):
    """Convolution over volumes with graph values instead of weights. Deprecated: use `Conv3D`.

    Args:
        filter: ``[Q, R, S, in_channels / groups, out_channels]``.
        bias: ``[out_channels]``.
        stride: The step between windows along D, H and W, or one number for all.
        padding: Zeros around: one number, one for each of D, H and W, or two for each.
        dilation: The step between the taps of a window, as `stride`.
        groups: The number of channel groups.

    Raises:
        ValueError: An argument has a wrong number of numbers.
    """

    def __init__(
        self,
        filter: TensorValueLike,
        bias: TensorValueLike | None = None,
        stride: int | tuple[int, int, int] = (1, 1, 1),
        padding: int | tuple[int, int, int] | tuple[int, int, int, int, int, int] = (
            0,
            0,
            0,
            0,
            0,
            0,
        ),
        dilation: int | tuple[int, int, int] = (1, 1, 1),
        groups: int = 1,
    ) -> None:
        self.filter, self.bias, self.groups = filter, bias, groups
        self.stride = numbers("Conv3DV1", "stride", stride, 3)
        self.padding = paddings("Conv3DV1", padding, 3)
        self.dilation = numbers("Conv3DV1", "dilation", dilation, 3)

    def __call__(self, x: TensorValueLike) -> TensorValue:
        """The convolution.

        Args:
            x: ``[N, D, H, W, in_channels]``.
        """
        return ops.conv3d(
            x,
            self.filter,
            stride=self.stride,  # pyright: ignore[reportArgumentType]
            dilation=self.dilation,  # pyright: ignore[reportArgumentType]
            padding=self.padding,  # pyright: ignore[reportArgumentType]
            groups=self.groups,
            bias=self.bias,
        )
