"""Convolutions with graph values instead of weights, for programs of earlier releases."""

from __future__ import annotations

from collections.abc import Sequence

from max.graph import TensorValue, TensorValueLike
from max.nn.layer import Layer
from max.nn.layers.conv import convolve, numbers, paddings

__all__ = ["Conv1DV1", "Conv2dV1", "Conv3DV1"]

_NO_PADDING = (0, 0, 0, 0, 0, 0)


class _ConvV1(Layer):
    """Base of the convolution layers with graph values.

    Args:
        axes: The number of spatial axes.
        filter: The filter.
        bias: The bias, or None.
        stride: The step between windows: one number, or one for each axis.
        padding: Zero padding: one number, one for each axis, or two for each axis.
        dilation: The step between the taps of a window, as `stride`.
        groups: The number of channel groups.

    Raises:
        ValueError: An argument has the wrong number of values.
    """

    filter: TensorValueLike
    """``[taps…, in_channels / groups, out_channels]``."""

    bias: TensorValueLike | None = None
    """``[out_channels]``."""

    stride: int | tuple[int, ...] = 1
    """The step between windows."""

    padding: int | tuple[int, ...] = 0
    """The zero padding before and after each axis."""

    dilation: int | tuple[int, ...] = 1
    """The step between the taps of a window."""

    groups: int = 1
    """The number of channel groups."""

    def __init__(
        self,
        axes: int,
        filter: TensorValueLike,
        bias: TensorValueLike | None,
        stride: int | Sequence[int],
        padding: int | Sequence[int],
        dilation: int | Sequence[int],
        groups: int,
    ) -> None:
        layer = type(self).__name__
        self.filter, self.bias, self.groups = filter, bias, groups
        self.stride = numbers(layer, "stride", stride, axes)
        self.padding = paddings(layer, padding, axes)
        self.dilation = numbers(layer, "dilation", dilation, axes)
        self._axes = axes

    def __call__(self, x: TensorValueLike) -> TensorValue:
        """The convolution.

        Args:
            x: ``[N, spatial axes…, in_channels]``.
        """
        layer, axes = type(self).__name__, self._axes
        return convolve(
            x,
            self.filter,
            self.bias,
            numbers(layer, "stride", self.stride, axes),
            paddings(layer, self.padding, axes),
            numbers(layer, "dilation", self.dilation, axes),
            self.groups,
        )


class Conv1DV1(_ConvV1):
    """Convolution over sequences with graph values instead of weights. Deprecated: use `Conv1D`.

    Args:
        filter: ``[taps, in_channels / groups, out_channels]``.
        bias: ``[out_channels]``.
        stride: The step between windows.
        padding: Zero padding before and after.
        dilation: The step between the taps of a window.
        groups: The number of channel groups.
    """

    __module__ = "max.nn.conv"

    def __init__(
        self,
        filter: TensorValueLike,
        bias: TensorValueLike | None = None,
        stride: int = 1,
        padding: int = 0,
        dilation: int = 1,
        groups: int = 1,
    ) -> None:
        super().__init__(1, filter, bias, stride, padding, dilation, groups)
        # kept as given, not expanded to one number per axis
        self.stride, self.padding, self.dilation = stride, padding, dilation


class Conv2dV1(_ConvV1):
    """Convolution over images with graph values instead of weights. Deprecated: use `Conv2d`.

    Args:
        filter: ``[R, S, in_channels / groups, out_channels]``.
        bias: ``[out_channels]``.
        stride: The step between windows along height and width, or one number for both.
        padding: Zero padding: one number, (height, width), or (top, bottom, left, right).
        dilation: The step between the taps of a window, as `stride`.
        groups: The number of channel groups.

    Raises:
        ValueError: An argument has the wrong number of values.
    """

    __module__ = "max.nn.conv"

    def __init__(
        self,
        filter: TensorValueLike,
        bias: TensorValueLike | None = None,
        stride: int | tuple[int, int] = (1, 1),
        padding: int | tuple[int, int] | tuple[int, int, int, int] = (0, 0, 0, 0),
        dilation: int | tuple[int, int] = (1, 1),
        groups: int = 1,
    ) -> None:
        super().__init__(2, filter, bias, stride, padding, dilation, groups)


class Conv3DV1(_ConvV1):
    """Convolution over volumes with graph values instead of weights. Deprecated: use `Conv3D`.

    Args:
        filter: ``[Q, R, S, in_channels / groups, out_channels]``.
        bias: ``[out_channels]``.
        stride: The step between windows along D, H and W, or one number for all.
        padding: Zero padding: one number, one for each of D, H and W, or two for each.
        dilation: The step between the taps of a window, as `stride`.
        groups: The number of channel groups.

    Raises:
        ValueError: An argument has the wrong number of values.
    """

    __module__ = "max.nn.conv"

    def __init__(
        self,
        filter: TensorValueLike,
        bias: TensorValueLike | None = None,
        stride: int | tuple[int, int, int] = (1, 1, 1),
        padding: int | tuple[int, int, int] | tuple[int, int, int, int, int, int] = _NO_PADDING,
        dilation: int | tuple[int, int, int] = (1, 1, 1),
        groups: int = 1,
    ) -> None:
        super().__init__(3, filter, bias, stride, padding, dilation, groups)
