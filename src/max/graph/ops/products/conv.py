"""Convolutions."""

from __future__ import annotations

from collections.abc import Sequence

from max.graph.ops.movement.shape import permute, reshape
from max.graph.ops.products.matmul import matmul
from max.graph.ops.staging.promotion import cast_to, is_weak, promote_operands, promote_weak
from max.graph.ops.staging.stage import as_tensor, stage
from max.graph.type import ConvInputLayout, FilterLayout
from max.graph.value import TensorValue, TensorValueLike

__all__ = ["conv2d", "conv2d_transpose", "conv3d"]

# the permutation from each filter layout to [taps…, channels, features]
_CONV_2D = {FilterLayout.RSCF: (0, 1, 2, 3), FilterLayout.FCRS: (2, 3, 1, 0)}
_CONV_2D[FilterLayout.CFRS] = (2, 3, 0, 1)
_CONV_3D = {FilterLayout.QRSCF: (0, 1, 2, 3, 4), FilterLayout.FCQRS: (2, 3, 4, 1, 0)}
# the letters are those of the forward convolution: in RSCF, C are the channels of the transposed one's result
_TRANSPOSED = {FilterLayout.RSCF: (0, 1, 3, 2), FilterLayout.CFRS: (2, 3, 0, 1)}


def _numbers(op: str, name: str, values: Sequence[int], count: int, least: int) -> tuple[int, ...]:
    """Checks `count` numbers of the spatial axes, each `least` or more.

    Raises:
        ValueError: The count differs, or a number is less than `least`.
        TypeError: A number is not an int.
    """
    numbers = tuple(values)
    if any(isinstance(n, bool) or not hasattr(n, "__index__") for n in numbers):
        raise TypeError(f"{op}: {name} is {values!r}, expected ints")
    if len(numbers) != count or min(numbers, default=least) < least:
        raise ValueError(f"{op}: {name} is {values!r}, expected {count} ints, {least} or more")
    return tuple(n.__index__() for n in numbers)


def _channels_last_operands(
    op: str,
    x: TensorValueLike,
    filter: TensorValueLike,
    input_layout: ConvInputLayout,
    filter_layout: FilterLayout,
    layouts: dict[FilterLayout, tuple[int, ...]],
) -> tuple[TensorValue, TensorValue]:
    """Promotes input and filter to one dtype and permutes them to channels last."""
    rank = len(next(iter(layouts.values())))
    image, weight = promote_operands(op, x, filter)
    if image.rank != rank or weight.rank != rank:
        raise ValueError(
            f"{op}: the input is {image.mlir_type.short}, the filter {weight.mlir_type.short}; both "
            f"must have rank {rank}"
        )
    layout = FilterLayout(filter_layout)
    if layout not in layouts:
        valid_layouts = ", ".join(layouts)
        raise ValueError(f"{op}: the filter layout is {layout}, expected {valid_layouts}")
    if ConvInputLayout(input_layout) is ConvInputLayout.NCHW:
        image = permute(image, [0, *range(2, rank), 1])
    if layouts[layout] != tuple(range(rank)):
        weight = permute(weight, list(layouts[layout]))
    return image, weight


def _result_in_layout(
    op: str, y: TensorValue, bias: TensorValueLike | None, input_layout: ConvInputLayout
) -> TensorValue:
    """Adds the bias and permutes the result to the layout of the input."""
    if bias is not None:
        added = promote_weak(op, bias, y.dtype, y.device) if is_weak(bias) else as_tensor(bias)
        if added.rank != 1 or added.shape[0] != y.shape[-1]:
            raise ValueError(
                f"{op}: the bias is {added.mlir_type.short}, expected shape [{y.shape[-1]}], the "
                "channels of the result"
            )
        y = y + cast_to(added, y.dtype)
    if ConvInputLayout(input_layout) is ConvInputLayout.NCHW:
        y = permute(y, [0, y.rank - 1, *range(1, y.rank - 1)])  # channels second
    return y


def _conv(
    op: str,
    x: TensorValue,
    weight: TensorValue,
    stride: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    groups: int,
) -> TensorValue:
    spatial = x.rank - 2
    attrs = {
        "stride": _numbers(op, "stride", stride, spatial, 1),
        "dilation": _numbers(op, "dilation", dilation, spatial, 1),
        "padding": _numbers(op, "padding", padding, 2 * spatial, 0),
        "groups": _numbers(op, "groups", (groups,), 1, 1)[0],
    }
    # the dilation does not matter for one tap
    if groups == 1 and not any(padding) and set(stride) == {1} and _is_pointwise(x, weight):
        return matmul(x, reshape(weight, weight.shape[-2:]))
    return stage("conv", (x, weight), attrs)


def _is_pointwise(x: TensorValue, weight: TensorValue) -> bool:
    """Whether the filter has one tap, so that the convolution is a matrix product."""
    return all(dim == 1 for dim in weight.shape[:-2]) and x.shape[-1] == weight.shape[-2]


def conv2d(
    x: TensorValueLike,
    filter: TensorValueLike,
    stride: tuple[int, int] = (1, 1),
    dilation: tuple[int, int] = (1, 1),
    padding: tuple[int, int, int, int] = (0, 0, 0, 0),
    groups: int = 1,
    bias: TensorValueLike | None = None,
    input_layout: ConvInputLayout = ConvInputLayout.NHWC,
    filter_layout: FilterLayout = FilterLayout.RSCF,
) -> TensorValue:
    """2-d convolution (cross-correlation, as in PyTorch).

    Args:
        x: The images: ``[N, H, W, C]``, or ``[N, C, H, W]`` with `input_layout` NCHW.
        filter: The filter: ``[R, S, C / groups, F]`` (RSCF), ``[F, C / groups, R, S]`` (FCRS) or
            ``[C / groups, F, R, S]`` (CFRS).
        stride: The stride along H and W.
        dilation: The distance between the taps of a window along H and W.
        padding: The zeros before and after H, before and after W.
        groups: The number of groups that the channels are split into and convolved separately.
        bias: A bias ``[F]`` for the channels of the result.
        input_layout: The order of the axes of the images and of the result.
        filter_layout: The order of the axes of the filter.

    Returns:
        ``[N, OH, OW, F]``, or ``[N, F, OH, OW]`` with NCHW, of the promoted dtype.
        OH = (H + padding - dilation (R - 1) - 1) // stride + 1, where padding is the sum of both sides.

    Raises:
        ValueError: A rank, a number of channels, `groups`, or another number does not fit, or a window is larger than
            the padded image.
        TypeError: The operands are bool, or no dtype fits both.
    """
    image, weight = _channels_last_operands(
        "conv2d", x, filter, input_layout, filter_layout, _CONV_2D
    )
    y = _conv("conv2d", image, weight, stride, dilation, padding, groups)
    return _result_in_layout("conv2d", y, bias, input_layout)


def conv3d(
    x: TensorValueLike,
    filter: TensorValueLike,
    stride: tuple[int, int, int] = (1, 1, 1),
    dilation: tuple[int, int, int] = (1, 1, 1),
    padding: tuple[int, int, int, int, int, int] = (0, 0, 0, 0, 0, 0),
    groups: int = 1,
    bias: TensorValueLike | None = None,
    input_layout: ConvInputLayout = ConvInputLayout.NHWC,
    filter_layout: FilterLayout = FilterLayout.QRSCF,
) -> TensorValue:
    """3-d convolution (cross-correlation, as in PyTorch).

    Args:
        x: The volumes: ``[N, D, H, W, C]``, or ``[N, C, D, H, W]`` with `input_layout` NCHW.
        filter: The filter: ``[Q, R, S, C / groups, F]`` (QRSCF) or ``[F, C / groups, Q, R, S]`` (FCQRS).
        stride: The stride along D, H and W.
        dilation: The distance between the taps of a window along D, H and W.
        padding: The zeros before and after D, before and after H, before and after W.
        groups: The number of groups that the channels are split into and convolved separately.
        bias: A bias ``[F]`` for the channels of the result.
        input_layout: The order of the axes of the volumes and of the result.
        filter_layout: The order of the axes of the filter.

    Returns:
        ``[N, OD, OH, OW, F]``, or ``[N, F, OD, OH, OW]`` with NCHW, of the promoted dtype; sizes as of `conv2d`.

    Raises:
        ValueError: A rank, a number of channels, `groups`, or another number does not fit, or a window is larger than
            the padded volume.
        TypeError: The operands are bool, or no dtype fits both.
    """
    volume, weight = _channels_last_operands(
        "conv3d", x, filter, input_layout, filter_layout, _CONV_3D
    )
    y = _conv("conv3d", volume, weight, stride, dilation, padding, groups)
    return _result_in_layout("conv3d", y, bias, input_layout)


def conv2d_transpose(
    x: TensorValueLike,
    filter: TensorValueLike,
    stride: tuple[int, int] = (1, 1),
    dilation: tuple[int, int] = (1, 1),
    padding: tuple[int, int, int, int] = (0, 0, 0, 0),
    output_paddings: tuple[int, int] = (0, 0),
    bias: TensorValueLike | None = None,
    input_layout: ConvInputLayout = ConvInputLayout.NHWC,
    filter_layout: FilterLayout = FilterLayout.RSCF,
) -> TensorValue:
    """2-d transposed convolution: the gradient of `conv2d` with respect to its input.

    Args:
        x: The images: ``[N, H, W, C]``, or ``[N, C, H, W]`` with `input_layout` NCHW.
        filter: The filter: ``[R, S, F, C]`` (RSCF), where F are the channels of the result, or
            ``[C, F, R, S]`` (CFRS), PyTorch's layout.
        stride: The distance in the result between the windows of neighboring input elements, along H and W.
        dilation: The distance between the taps of a window along H and W.
        padding: The elements cropped from the result before and after H, before and after W.
        output_paddings: The elements appended to H and W of the result; less than the stride or the dilation.
        bias: A bias ``[F]`` for the channels of the result.
        input_layout: The order of the axes of the images and of the result.
        filter_layout: The order of the axes of the filter.

    Returns:
        ``[N, OH, OW, F]``, or ``[N, F, OH, OW]`` with NCHW, of the promoted dtype.
        OH = (H - 1) stride - padding + dilation (R - 1) + 1 + output_padding.

    Raises:
        ValueError: A rank, a number of channels or another number does not fit, or R or S is symbolic.
        TypeError: The operands are bool, or no dtype fits both.
    """
    op = "conv2d_transpose"
    image, weight = _channels_last_operands(op, x, filter, input_layout, filter_layout, _TRANSPOSED)
    attrs = {
        "stride": _numbers(op, "stride", stride, 2, 1),
        "dilation": _numbers(op, "dilation", dilation, 2, 1),
        "padding": _numbers(op, "padding", padding, 4, 0),
        "output_padding": _numbers(op, "output_paddings", output_paddings, 2, 0),
    }
    return _result_in_layout(
        op, stage("conv_transpose", (image, weight), attrs), bias, input_layout
    )
