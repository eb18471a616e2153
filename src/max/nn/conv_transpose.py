"""Transposed convolutions over sequences."""

from __future__ import annotations

from max.dtype import DType
from max.graph import (
    ConvInputLayout,
    DeviceRef,
    FilterLayout,
    TensorValue,
    TensorValueLike,
    Weight,
    ops,
)
from max.nn.layer import Module

__all__ = ["ConvTranspose1d", "WeightNormConvTranspose1d"]


def _of_length(layer: str, what: str, value: int | tuple[int, ...], height: int) -> tuple[int, int]:
    """Expands a number for a sequence to height and width: a sequence is an image of height 1.

    Raises:
        ValueError: A tuple does not have two numbers.
    """
    pair = (height, value) if isinstance(value, int) else tuple(value)
    if len(pair) != 2:
        raise ValueError(
            f"{layer}: {what} is {value!r}, expected a number, or two: of the height, which is 1, and of the "
            "length"
        )
    return pair[0], pair[1]


class _ConvTranspose(Module):
    """Base of the transposed convolutions over sequences; subclasses define the parametrization of the filter."""

    bias: Weight | None
    """``[out_channels]``."""

    device: DeviceRef
    """The device of the computation."""

    permute: bool
    """Whether channels come second and the filter has PyTorch's layout."""

    stride: tuple[int, int]
    """The step in the result between two elements of the input, for height and length."""

    padding: tuple[int, int, int, int]
    """The number of elements cut from the result: above, below, before and after."""

    dilation: tuple[int, int]
    """The step between the taps of a window, for height and length."""

    output_padding: tuple[int, int]
    """The number of elements added at the end of the result, for height and length."""

    def __init__(
        self,
        length: int,
        in_channels: int,
        out_channels: int,
        dtype: DType,
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int, int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        output_padding: int | tuple[int, int] = 0,
        device: DeviceRef | None = None,
        has_bias: bool = False,
        permute: bool = False,
        name: str | None = None,
    ) -> None:
        layer = type(self).__name__
        self.device = DeviceRef.CPU() if device is None else device
        self.permute = permute
        self.stride = _of_length(layer, "stride", stride, 1)
        self.dilation = _of_length(layer, "dilation", dilation, 1)
        self.output_padding = _of_length(layer, "output_padding", output_padding, 0)
        # before and after the only line, then before and after the sequence
        sides = (0, 0, padding, padding) if isinstance(padding, int) else tuple(padding)
        if len(sides) != 4:
            raise ValueError(f"{layer}: padding is {padding!r}, expected a number, or 4 of them")
        self.padding = sides
        shape = (
            (in_channels, out_channels, length) if permute else (length, out_channels, in_channels)
        )
        prefix = f"{name}." if name else ""
        self.bias = (
            Weight(f"{prefix}bias", dtype, (out_channels,), self.device) if has_bias else None
        )
        self._add_filter(prefix, dtype, shape, in_channels)

    def _add_filter(
        self, prefix: str, dtype: DType, shape: tuple[int, int, int], in_channels: int
    ) -> None:
        """Creates the weights of the filter."""
        raise NotImplementedError(f"{type(self).__name__} is abstract")

    def apply(
        self, x: TensorValue, weight: TensorValueLike, bias: TensorValueLike | None
    ) -> TensorValue:
        """The transposed convolution with a filter.

        Args:
            x: The input.
            weight: The filter: ``[taps, out_channels, in_channels]``; with `permute`
                ``[in_channels, out_channels, taps]``.
            bias: The bias, or None.
        """
        if x.rank != 3:
            raise ValueError(f"{type(self).__name__}: the input is {x!r}, expected rank 3")
        axis = 2 if self.permute else 1
        # a sequence is an image with one line: [N, 1, L, C], or [N, C, 1, L] with `permute`
        y = ops.conv2d_transpose(
            ops.unsqueeze(x, axis),
            ops.unsqueeze(weight, 2 if self.permute else 0),
            stride=self.stride,
            dilation=self.dilation,
            padding=self.padding,
            output_paddings=self.output_padding,
            bias=bias,
            input_layout=ConvInputLayout.NCHW if self.permute else ConvInputLayout.NHWC,
            filter_layout=FilterLayout.CFRS if self.permute else FilterLayout.RSCF,
        )
        return ops.squeeze(y, axis)


class ConvTranspose1d(_ConvTranspose):
    """The transpose of a convolution over sequences: each element adds a window to the result.

    Shapes: ``[N, L, in_channels]`` gives ``[N, OL, out_channels]``, with `permute` channels second;
    OL = (L - 1) stride - padding + dilation (length - 1) + 1 + output_padding.

    Args:
        length: The filter's length.
        in_channels: The channels of the input.
        out_channels: The channels of the result.
        dtype: The dtype of filter and bias.
        stride: The step in the result between two elements of the input.
        padding: The number of elements cut from both ends of the result: a number, or (0, 0, before, after).
        dilation: The step between the taps of a window.
        output_padding: The number of elements added at the end of the result.
        device: The device of the computation; the CPU by default.
        has_bias: Whether there is a bias.
        permute: Whether channels come second, and the filter is ``[in, out, taps]`` as in PyTorch.
        name: The prefix of the weights' names.

    Raises:
        ValueError: An argument has the wrong number of values.
    """

    weight: Weight
    """``[taps, out_channels, in_channels]``; with `permute` ``[in_channels, out_channels, taps]``."""

    def _add_filter(
        self, prefix: str, dtype: DType, shape: tuple[int, int, int], in_channels: int
    ) -> None:
        self.weight = Weight(f"{prefix}weight", dtype, shape, self.device)

    def __call__(self, x: TensorValue) -> TensorValue:
        """The transposed convolution.

        Args:
            x: ``[N, L, in_channels]``, or ``[N, in_channels, L]`` with `permute`.

        Raises:
            ValueError: The input has another rank or other channels.
        """
        return self.apply(x, self.weight, self.bias)


class WeightNormConvTranspose1d(_ConvTranspose):
    """A `ConvTranspose1d` with weight normalization: the filter is ``g v / |v|`` (https://arxiv.org/abs/1602.07868).

    The norm ``|v|`` is over all axes except that of the input channels.

    Args:
        length: The filter's length.
        in_channels: The channels of the input.
        out_channels: The channels of the result.
        dtype: The dtype of the weights.
        stride: As for `ConvTranspose1d`.
        padding: As for `ConvTranspose1d`.
        dilation: As for `ConvTranspose1d`.
        output_padding: As for `ConvTranspose1d`.
        device: The device of the computation; the CPU by default.
        has_bias: Whether there is a bias.
        permute: As for `ConvTranspose1d`.
        name: The prefix of the weights' names.

    Raises:
        ValueError: An argument has the wrong number of values.
    """

    weight_g: Weight
    """The norms ``g``: ``[in_channels, 1, 1]``."""

    weight_v: Weight
    """The directions ``v``, of the shape of a `ConvTranspose1d`'s filter."""

    def _add_filter(
        self, prefix: str, dtype: DType, shape: tuple[int, int, int], in_channels: int
    ) -> None:
        self.weight_g = Weight(f"{prefix}weight_g", dtype, (in_channels, 1, 1), self.device)
        self.weight_v = Weight(f"{prefix}weight_v", dtype, shape, self.device)

    @property
    def conv(self) -> ConvTranspose1d:
        """A plain layer of the same form, with this layer's bias; its weight is not part of this layer."""
        shape = [int(size) for size in self.weight_v.shape]
        # [in, out, L] with `permute`, else [L, out, in]
        in_channels, out_channels, length = shape if self.permute else reversed(shape)
        conv = ConvTranspose1d(
            length, in_channels, out_channels, self.weight_v.dtype, self.stride, self.padding, self.dilation,
            self.output_padding, self.device, permute=self.permute,
        )  # fmt: skip
        conv.bias = self.bias
        return conv

    def __call__(self, x: TensorValue) -> TensorValue:
        """The transposed convolution.

        Args:
            x: As for `ConvTranspose1d`.
        """
        direction: TensorValue = self.weight_v
        lengths: TensorValue = self.weight_g
        axes = (1, 2) if self.permute else (0, 1)
        if not self.permute:
            lengths = ops.transpose(lengths, 0, 2)
        # |v|² of each input channel; the summed axes keep size 1
        square = direction * direction
        for axis in axes:
            square = ops.sum(square, axis=axis)
        return self.apply(x, direction * (lengths * ops.rsqrt(square)), self.bias)
