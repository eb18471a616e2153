"""Pooling over images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from max.graph.dim import Dim, DimLike
from max.graph.ops.staging.stage import as_tensor, stage
from max.graph.value import TensorValue, TensorValueLike

__all__ = ["avg_pool2d", "max_pool2d"]


def pair(op: str, name: str, value: Any, least: int) -> tuple[int, int]:
    """Expands an argument that is one number for both axes of an image, or a number per axis.

    Raises:
        ValueError: There are not two numbers, one is less than `least`, or one is a symbolic dimension.
        TypeError: A number is not an int.
    """
    values: Sequence[Any] = (value, value) if hasattr(value, "__index__") else value
    sizes: list[int] = []
    for n in values:
        if isinstance(n, bool) or not (isinstance(n, Dim | str) or hasattr(n, "__index__")):
            raise TypeError(f"{op}: {name} is {value!r}, expected an int or two")
        size = Dim(n).expr
        if not size.is_static:
            raise ValueError(f"{op}: {name} is {value!r}, expected static sizes")
        sizes.append(size.value)
    if len(sizes) != 2 or min(sizes) < least:
        raise ValueError(f"{op}: {name} is {value!r}, expected one int or two, {least} or more")
    return sizes[0], sizes[1]


def _attrs(
    op: str,
    kernel_size: tuple[DimLike, DimLike],
    stride: int | tuple[int, int],
    dilation: int | tuple[int, int],
    padding: int | tuple[int, int],
    ceil_mode: bool,
) -> dict[str, Any]:
    rows, columns = pair(op, "padding", padding, 0)
    return {
        "kernel": pair(op, "kernel_size", kernel_size, 1),
        "stride": pair(op, "stride", stride, 1),
        "dilation": pair(op, "dilation", dilation, 1),
        "padding": (rows, rows, columns, columns),  # top, bottom, left, right
        "ceil_mode": bool(ceil_mode),
    }


def max_pool2d(
    input: TensorValueLike,
    kernel_size: tuple[DimLike, DimLike],
    stride: int | tuple[int, int] = 1,
    dilation: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] = 0,
    ceil_mode: bool = False,
) -> TensorValue:
    """Max pooling over windows of an image, per channel.

    Padding never is the maximum: only elements inside the image count.

    Args:
        input: The images: ``[N, H, W, C]``.
        kernel_size: Height and width of the window.
        stride: The distance between windows.
        dilation: The distance between the elements of a window.
        padding: The padding on each side; at most half a window.
        ceil_mode: Whether to round the output size up: a last window may exceed the padding if it starts inside the
            image or its leading padding.

    Returns:
        ``[N, OH, OW, C]`` with OH = (H + 2 padding - dilation (kernel - 1) - 1) / stride + 1,
        rounded down, or up in `ceil_mode`.

    Raises:
        ValueError: The rank is not 4, a number does not fit, or a window is larger than the image.
        TypeError: The images are bool.
    """
    attrs = _attrs("max_pool2d", kernel_size, stride, dilation, padding, ceil_mode)
    return stage("max_pool", (as_tensor(input),), attrs)


def avg_pool2d(
    input: TensorValueLike,
    kernel_size: tuple[DimLike, DimLike],
    stride: int | tuple[int, int] = 1,
    dilation: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] = 0,
    ceil_mode: bool = False,
    count_boundary: bool = True,
) -> TensorValue:
    """Average pooling over windows of an image, per channel; integer means are rounded down.

    Args:
        input: The images: ``[N, H, W, C]``.
        kernel_size: Height and width of the window.
        stride: The distance between windows.
        dilation: The distance between the elements of a window.
        padding: The zeros on each side; at most half a window.
        ceil_mode: Whether to round the output size up; see `max_pool2d`.
        count_boundary: Whether zeros of the padding count as elements of the mean. Elements beyond the padding never
            count.

    Returns:
        ``[N, OH, OW, C]``; see `max_pool2d`.

    Raises:
        ValueError: The rank is not 4, a number does not fit, or a window is larger than the image.
        TypeError: The images are bool.
    """
    attrs = _attrs("avg_pool2d", kernel_size, stride, dilation, padding, ceil_mode)
    return stage("avg_pool", (as_tensor(input),), {**attrs, "count_boundary": bool(count_boundary)})
