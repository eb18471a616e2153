"""Helpers shared by convolution layers: argument checks, and the op over one, two or three axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from max.graph import (
    ConvInputLayout,
    FilterLayout,
    TensorValue,
    TensorValueLike,
    ops,
)

__all__ = ["check_groups", "convolve", "numbers", "paddings"]


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
