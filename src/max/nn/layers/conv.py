"""Convolutions over sequences, images and volumes.

Channels come last: ``[N, L, C]``, ``[N, H, W, C]``, ``[N, D, H, W, C]``. With `permute` they come second in inputs and
results, and filters have PyTorch's layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

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
from max.nn.layer import Module
from max.nn.layers.sharding import check_strategy, part_of, parts_of_weight, shard_devices

__all__ = ["Conv1D", "Conv2d", "Conv3D", "check_groups", "convolve", "numbers", "paddings"]


def numbers(layer: str, what: str, value: int | Sequence[int], count: int) -> tuple[int, ...]:
    """Expands an argument to one number per spatial axis.

    Args:
        layer: The name of the layer, for error messages.
        what: The name of the argument.
        value: A number for all axes, or one for each.
        count: The number of axes.

    Raises:
        ValueError: The number of values is wrong, or one is below 1.
    """
    sizes = (value,) * count if isinstance(value, int) else tuple(value)
    if len(sizes) != count or min(sizes) < 1:
        raise ValueError(
            f"{layer}: {what} is {value!r}, expected a number of 1 or more, or {count} of them"
        )
    return sizes


def paddings(layer: str, value: int | Sequence[int], count: int) -> tuple[int, ...]:
    """Expands the padding to the numbers before and after each spatial axis.

    Args:
        layer: The name of the layer, for error messages.
        value: A number for all sides, one for each axis, or two for each axis.
        count: The number of axes.

    Raises:
        ValueError: The number of values is wrong.
    """
    sizes = (value,) * count if isinstance(value, int) else tuple(value)
    if len(sizes) == count:
        # one number per axis is the padding at both ends
        return tuple(n for n in sizes for _ in range(2))
    if len(sizes) != 2 * count:
        raise ValueError(
            f"{layer}: padding is {value!r}, expected a number, {count} of them or {2 * count}"
        )
    return sizes


def check_groups(layer: str, num_groups: int, in_channels: int, out_channels: int) -> None:
    """Checks that the number of groups divides the numbers of channels.

    Args:
        layer: The name of the layer, for error messages.
        num_groups: The number of groups.
        in_channels: The channels of the input.
        out_channels: The channels of the result.

    Raises:
        ValueError: It does not.
    """
    if num_groups < 1 or in_channels % num_groups or out_channels % num_groups:
        raise ValueError(
            f"{layer}: {num_groups} groups do not divide {in_channels} channels of the input and {out_channels} of "
            "the result, expected multiples of num_groups"
        )


def convolve(
    x: TensorValueLike,
    filter: TensorValueLike,
    bias: TensorValueLike | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    permute: bool = False,
) -> TensorValue:
    """A convolution over one, two or three spatial axes, one per number in `stride`.

    Args:
        x: The input.
        filter: The filter.
        bias: The bias, or None.
        stride: The step between windows along each axis.
        padding: The zero padding before and after each axis.
        dilation: The step between the taps of a window along each axis.
        groups: The number of channel groups.
        permute: Whether channels come second and the filter has PyTorch's layout.
    """
    axes = len(stride)
    if axes == 1:
        # a sequence is an image of height 1
        x = ops.unsqueeze(x, 2 if permute else 1)
        filter = ops.unsqueeze(filter, 2 if permute else 0)
        stride, padding, dilation = (1, *stride), (0, 0, *padding), (1, *dilation)
    op: Callable[..., TensorValue] = ops.conv3d if axes == 3 else ops.conv2d
    channels_last, channels_second = (
        (FilterLayout.QRSCF, FilterLayout.FCQRS)
        if axes == 3
        else (FilterLayout.RSCF, FilterLayout.FCRS)
    )
    y = op(
        x,
        filter,
        stride=tuple(stride),
        dilation=tuple(dilation),
        padding=tuple(padding),
        groups=groups,
        bias=bias,
        input_layout=ConvInputLayout.NCHW if permute else ConvInputLayout.NHWC,
        filter_layout=channels_second if permute else channels_last,
    )
    return ops.squeeze(y, 2 if permute else 1) if axes == 1 else y


class _Conv(Module):
    """Base of the convolution layers.

    Args:
        taps: The filter's size along each spatial axis.
        in_channels: The channels of the input.
        out_channels: The channels of the result.
        dtype: The dtype of filter and bias.
        stride: The step between windows: one number, or one for each axis.
        padding: Zero padding: one number, one for each axis, or two for each axis.
        dilation: The step between the taps of a window, as `stride`.
        num_groups: The number of channel groups.
        device: The device of the computation; the CPU by default.
        has_bias: Whether there is a bias.
        permute: Whether channels come second and the filter has PyTorch's layout.
        name: The prefix of the weights' names.

    Raises:
        ValueError: The groups do not divide the channels, or an argument has the wrong number of values.
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
    """Whether channels come second and the filter has PyTorch's layout."""

    stride: int | tuple[int, ...]
    """The step between windows along each axis."""

    padding: int | tuple[int, ...]
    """The zero padding before and after each axis."""

    dilation: int | tuple[int, ...]
    """The step between the taps of a window along each axis."""

    def __init__(
        self,
        taps: Sequence[int],
        in_channels: int,
        out_channels: int,
        dtype: DType,
        stride: int | Sequence[int],
        padding: int | Sequence[int],
        dilation: int | Sequence[int],
        num_groups: int,
        device: DeviceRef | None,
        has_bias: bool,
        permute: bool,
        name: str | None,
    ) -> None:
        layer, axes = type(self).__name__, len(taps)
        check_groups(layer, num_groups, in_channels, out_channels)
        self.device = DeviceRef.CPU() if device is None else device
        self.num_groups, self.permute = num_groups, permute
        self.stride = numbers(layer, "stride", stride, axes)
        self.padding = paddings(layer, padding, axes)
        self.dilation = numbers(layer, "dilation", dilation, axes)
        channels = in_channels // num_groups
        shape = (out_channels, channels, *taps) if permute else (*taps, channels, out_channels)
        prefix = f"{name}." if name else ""
        self.filter = Weight(f"{prefix}weight", dtype, shape, self.device)
        self.bias = (
            Weight(f"{prefix}bias", dtype, (out_channels,), self.device) if has_bias else None
        )

    def check(self, x: TensorValue, rank: int) -> None:
        """Checks an input's rank and channels.

        Raises:
            ValueError: The rank or the number of channels differs.
        """
        axis = 1 if self.permute else -1
        # the filter holds the input channels of one group
        filter = self.filter.shape[1 if self.permute else -2]
        channels = filter * self.num_groups
        if x.rank != rank or x.shape[axis] != channels:
            order = "channels second" if self.permute else "channels last"
            raise ValueError(
                f"{type(self).__name__}: the input is {x!r}, expected rank {rank} with {channels} "
                f"channels, {order} (permute={self.permute})"
            )

    def __call__(self, x: TensorValue) -> TensorValue:
        """The convolution.

        Args:
            x: ``[N, spatial axes…, in_channels]``, or ``[N, in_channels, spatial axes…]`` with `permute`.

        Raises:
            ValueError: The input has another rank or other channels.
        """
        layer, axes = type(self).__name__, self.filter.rank - 2
        self.check(x, axes + 2)
        return convolve(
            x,
            self.filter,
            self.bias,
            numbers(layer, "stride", self.stride, axes),
            paddings(layer, self.padding, axes),
            numbers(layer, "dilation", self.dilation, axes),
            self.num_groups,
            self.permute,
        )


class Conv1D(_Conv):
    """Convolution over sequences.

    Shapes: ``[N, L, in_channels]`` gives ``[N, OL, out_channels]``, with `permute` channels second;
    ``OL = (L + padding before + padding after - dilation * (kernel_size - 1) - 1) // stride + 1``.

    Args:
        kernel_size: The filter's length.
        in_channels: The channels of the input.
        out_channels: The channels of the result.
        dtype: The dtype of filter and bias.
        stride: The step between windows.
        padding: Zero padding before and after: one number, or two.
        dilation: The step between the taps of a window.
        num_groups: The number of channel groups; each is a separate convolution.
        device: The device of the computation; the CPU by default.
        has_bias: Whether there is a bias.
        permute: Whether channels come second, and the filter is ``[out, in / groups, taps]`` as in PyTorch.
        name: The prefix of the weights' names.

    Raises:
        ValueError: The groups do not divide the channels, or padding has other than one or two numbers.
    """

    __module__ = "max.nn.conv"

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
            (kernel_size,), in_channels, out_channels, dtype, stride, padding, dilation, num_groups,
            device, has_bias, permute, name,
        )  # fmt: skip
        # kept as given, not expanded to one number per axis
        self.stride, self.padding, self.dilation = stride, padding, dilation


class Conv2d(_Conv):
    """Convolution over images.

    Shapes: ``[N, H, W, in_channels]`` gives ``[N, OH, OW, out_channels]``, with `permute` channels second. Sizes follow
    as for `Conv1D`, along each axis.

    Args:
        kernel_size: The filter's height and width, or one number for both.
        in_channels: The channels of the input.
        out_channels: The channels of the result.
        dtype: The dtype of filter and bias.
        stride: The step between windows along height and width, or one number for both.
        padding: Zero padding: one number, (height, width), or (top, bottom, left, right).
        dilation: The step between the taps of a window, as `stride`.
        num_groups: The number of channel groups; each is a separate convolution.
        device: The device of the computation; the CPU by default.
        has_bias: Whether there is a bias.
        permute: Whether channels come second, and the filter is ``[out, in / groups, R, S]`` as in PyTorch.
        name: The prefix of the weights' names.

    Raises:
        ValueError: The groups do not divide the channels, or an argument has the wrong number of values.
    """

    __module__ = "max.nn.conv"

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
            taps, in_channels, out_channels, dtype, stride, padding, dilation, num_groups, device,
            has_bias, permute, name,
        )  # fmt: skip

    @property
    def sharding_strategy(self) -> ShardingStrategy | None:
        """How `shard` splits the layer; only ``replicate`` is supported. None: not split.

        Raises:
            ValueError: It is set to another strategy.
        """
        return self.filter.sharding_strategy

    @sharding_strategy.setter
    def sharding_strategy(self, strategy: ShardingStrategy | None) -> None:
        check_strategy("Conv2d", strategy, "replicate")
        self.filter.sharding_strategy = strategy
        if isinstance(self.bias, Weight):
            self.bias.sharding_strategy = strategy

    def shard(self, devices: Iterable[DeviceRef]) -> list[Conv2d]:
        """The layer on each device; all share the weights of this layer.

        Args:
            devices: The devices.

        Raises:
            ValueError: There is no sharding strategy, or its number of devices differs.
        """
        strategy = self.sharding_strategy
        where = shard_devices("Conv2d", strategy, devices)
        assert strategy is not None
        biases = parts_of_weight(self.bias, strategy, where)
        return [
            part_of(self, Conv2d, filter=filter, bias=bias, device=device)
            for filter, bias, device in zip(self.filter.shard(where), biases, where, strict=True)
        ]


class Conv3D(_Conv):
    """Convolution over volumes.

    Shapes: ``[N, D, H, W, in_channels]`` gives ``[N, OD, OH, OW, out_channels]``, with `permute` channels second. Sizes
    follow as for `Conv1D`, along each axis.

    Args:
        depth: The filter's size along D.
        height: The filter's size along H.
        width: The filter's size along W.
        in_channels: The channels of the input.
        out_channels: The channels of the result.
        dtype: The dtype of filter and bias.
        stride: The step between windows along D, H and W, or one number for all.
        padding: Zero padding: one number, one for each of D, H and W, or two for each.
        dilation: The step between the taps of a window, as `stride`.
        num_groups: The number of channel groups; each is a separate convolution.
        device: The device of the computation; the CPU by default.
        has_bias: Whether there is a bias.
        permute: Whether channels come second, and the filter is ``[out, in / groups, Q, R, S]`` as in PyTorch.
        name: The prefix of the weights' names.

    Raises:
        ValueError: The groups do not divide the channels, or an argument has the wrong number of values.
    """

    __module__ = "max.nn.conv"

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
        super().__init__(
            (depth, height, width), in_channels, out_channels, dtype, stride, padding, dilation,
            num_groups, device, has_bias, permute, name,
        )  # fmt: skip
