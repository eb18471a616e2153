"""Convolutions and transposed convolutions of one to three spatial axes."""

from __future__ import annotations

from collections.abc import Sequence

from max.graph import TensorValue, ops
from max.graph.type import ConvInputLayout, FilterLayout
from max.importers.errors import Unsupported
from max.importers.functions.indexing import pad_axes

__all__ = ["Pairs", "convolution", "insert_zeros", "transposed_convolution", "with_bias"]

Pairs = list[tuple[int, int]]
"""The padding before and after each spatial axis."""


def convolution(
    x: TensorValue,
    weight: TensorValue,
    strides: Sequence[int],
    dilations: Sequence[int],
    pairs: Pairs,
    groups: int,
) -> TensorValue:
    """A convolution ``[N, C, …]`` with a filter ``[F, C / groups, …]``."""
    n = x.rank - 2
    if any(amount < 0 for pair in pairs for amount in pair):
        # negative padding cuts, which convolutions cannot
        x = pad_axes(x, [(0, 0), (0, 0), *pairs], "constant", 0)
        pairs = [(0, 0)] * n
    pads = [amount for pair in pairs for amount in pair]
    if n == 1:
        # a sequence is an image of height 1
        y = convolution(
            ops.unsqueeze(x, 2), ops.unsqueeze(weight, 2), [1, *strides], [1, *dilations], [(0, 0), *pairs], groups
        )  # fmt: skip
        return ops.squeeze(y, 2)
    if n == 2:
        return ops.conv2d(
            x, weight, _two(strides), _two(dilations), (pads[0], pads[1], pads[2], pads[3]), groups,
            input_layout=ConvInputLayout.NCHW, filter_layout=FilterLayout.FCRS,
        )  # fmt: skip
    if n == 3:
        return ops.conv3d(
            x, weight, (strides[0], strides[1], strides[2]), (dilations[0], dilations[1], dilations[2]),
            (pads[0], pads[1], pads[2], pads[3], pads[4], pads[5]), groups,
            input_layout=ConvInputLayout.NCHW, filter_layout=FilterLayout.FCQRS,
        )  # fmt: skip
    raise Unsupported(f"has {n} spatial axes; 1 to 3 are supported")


def _two(values: Sequence[int]) -> tuple[int, int]:
    return values[0], values[1]


def transposed_convolution(
    x: TensorValue,
    weight: TensorValue,
    strides: Sequence[int],
    dilations: Sequence[int],
    pairs: Pairs,
    extra: Sequence[int],
    groups: int,
) -> TensorValue:
    """A transposed convolution ``[N, C, …]`` with a filter ``[C, F / groups, …]``.

    Args:
        x: The operand.
        weight: The filter.
        strides: The strides.
        dilations: The dilations.
        pairs: What is cut off the result before and after each spatial axis.
        extra: What is added behind each spatial axis.
        groups: The number of groups of channels.
    """
    parts = [
        # the op has no groups: each is a convolution of its own
        _transposed_convolution(part, w, strides, dilations)
        for part, w in zip(ops.chunk(x, groups, 1), ops.chunk(weight, groups, 0), strict=True)
    ]
    y = ops.concat(parts, 1)
    crop = [(-before, more - after) for (before, after), more in zip(pairs, extra, strict=True)]
    if any(amount for pair in crop for amount in pair):
        y = pad_axes(y, [(0, 0), (0, 0), *crop], "constant", 0)
    return y


def _transposed_convolution(
    x: TensorValue, weight: TensorValue, strides: Sequence[int], dilations: Sequence[int]
) -> TensorValue:
    """A transposed convolution without padding ``[N, C, …]`` with a filter ``[C, F, …]``."""
    n = x.rank - 2
    if n == 1:
        y = _transposed_convolution(
            ops.unsqueeze(x, 2), ops.unsqueeze(weight, 2), [1, *strides], [1, *dilations]
        )
        return ops.squeeze(y, 2)
    if n == 2:
        return ops.conv2d_transpose(
            x, weight, _two(strides), _two(dilations), input_layout=ConvInputLayout.NCHW,
            filter_layout=FilterLayout.CFRS,
        )  # fmt: skip
    if n != 3:
        raise Unsupported(f"has {n} spatial axes; 1 to 3 are supported")
    # the gradient of a convolution: the operand with zeros between its elements, and the filter reversed
    for axis, stride in enumerate(strides, 2):
        if stride > 1:
            x = insert_zeros(x, axis, stride)
    flipped = weight[(slice(None), slice(None), *[slice(None, None, -1)] * n)]
    flipped = ops.permute(flipped, [1, 0, *range(2, n + 2)])  # [F, C, …]
    # full padding: each element meets all taps
    reach = [d * (int(size) - 1) for d, size in zip(dilations, weight.shape[2:], strict=True)]
    return convolution(x, flipped, [1] * n, dilations, [(r, r) for r in reach], 1)


def insert_zeros(x: TensorValue, axis: int, stride: int) -> TensorValue:
    """A tensor with ``stride - 1`` zeros between the elements of an axis."""
    shape = x.shape
    wide = ops.unsqueeze(x, axis + 1)
    pads = [0] * (2 * wide.rank)
    pads[2 * (axis + 1) + 1] = stride - 1
    wide = ops.reshape(
        ops.pad(wide, pads), [*shape[:axis], shape[axis] * stride, *shape[axis + 1 :]]
    )
    index = [slice(None)] * x.rank
    index[axis] = slice(0, shape[axis] * stride - (stride - 1))  # no zeros behind the last element
    return wide[tuple(index)]


def with_bias(y: TensorValue, bias: TensorValue | None) -> TensorValue:
    """The result of a convolution with a bias for each channel."""
    return y if bias is None else y + ops.reshape(bias, [bias.shape[0], *[1] * (y.rank - 2)])
