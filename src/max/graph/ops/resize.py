"""Images in another size, and from their windows."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from max import mlir
from max.graph.dim import Dim, DimLike
from max.graph.ops._stage import as_tensor, stage
from max.graph.ops.pooling import pair
from max.graph.value import TensorValue, TensorValueLike

__all__ = ["InterpolationMode", "fold", "resize"]


class InterpolationMode(StrEnum):
    """How `resize` makes elements between those that there are."""

    NEAREST = "nearest"
    """The element before the place."""
    BILINEAR = "bilinear"
    """Between two neighbours along each axis, weighted by their distance."""
    BICUBIC = "bicubic"
    """A cubic through four neighbours along each axis."""


def resize(
    input: TensorValueLike,
    shape: Iterable[DimLike],
    interpolation: InterpolationMode = InterpolationMode.BILINEAR,
) -> TensorValue:
    """Images in another size.

    Elements are at the centres of pixels, and the image's edge goes on beyond it, as in PyTorch's
    ``interpolate`` without ``align_corners``. An image that gets smaller is not smoothed before.

    Args:
        input: The images: ``[N, C, H, W]``.
        shape: The new shape: N and C as they are, another H and W.
        interpolation: How elements are made.

    Raises:
        ValueError: The rank is not 4, `shape` has not four sizes or other N and C, or the mode is unknown.
        TypeError: The images are bool; or integers, and the mode is not NEAREST.
    """
    x = as_tensor(input)
    dims = [Dim(dim) for dim in shape]
    if x.rank != 4 or len(dims) != 4:
        raise ValueError(
            f"resize: {x.mlir_type.short} to {mlir.dims_text([d.expr for d in dims])}; both must have rank 4"
        )
    mode = InterpolationMode(interpolation)
    result = x.mlir_type.with_shape([dim.expr for dim in dims])
    return stage("resize", (x,), {"mode": mode.value}, result)


def fold(
    input: TensorValueLike,
    output_size: tuple[DimLike, DimLike],
    kernel_size: tuple[DimLike, DimLike],
    stride: int | tuple[int, int] = 1,
    dilation: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] = 0,
) -> TensorValue:
    """Images as the sum of their windows: each window is added where it was taken from.

    Args:
        input: The windows: ``[N, C * kernel, L]``. ``kernel`` are the elements of a window, L is the number
            of windows: the product over both axes of
            ``(output + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1``.
        output_size: Height and width of the images.
        kernel_size: Height and width of a window.
        stride: The distance of windows.
        dilation: The distance of a window's elements.
        padding: How far windows reach beyond the image on each side; what lies there is dropped.

    Returns:
        ``[N, C, *output_size]``.

    Raises:
        ValueError: The rank is not 3, the channels are no multiple of the window's elements, or the number of
            windows does not fit (where it is symbolic, when the graph runs).
        TypeError: A number is not an int.
    """
    x = as_tensor(input)
    kernel = pair("fold", "kernel_size", kernel_size, 1)
    high, wide = pair("fold", "padding", padding, 0)
    size = tuple(output_size)
    if x.rank != 3 or len(size) != 2:
        raise ValueError(
            f"fold: the input is {x.mlir_type.short}, expected rank 3: [N, C * kernel, L]; the size of "
            f"the result is {output_size!r}, expected height and width"
        )
    taps = kernel[0] * kernel[1]
    depth = x.mlir_type.shape[1]
    if depth.is_static and depth.value % taps:
        raise ValueError(
            f"fold: axis 1 of {x.mlir_type.short} is no multiple of {taps}, the elements of a window"
        )
    attrs = {
        "kernel": kernel,
        "stride": pair("fold", "stride", stride, 1),
        "dilation": pair("fold", "dilation", dilation, 1),
        "padding": (high, high, wide, wide),
    }
    result = mlir.TensorType.get(
        x.dtype,
        (x.mlir_type.shape[0], depth // taps, *(Dim(n).expr for n in size)),
        x.mlir_type.device,
    )
    return stage("fold", (x,), attrs, result)
