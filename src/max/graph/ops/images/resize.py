"""Resizing of images, and `fold`, which adds up windows."""

from __future__ import annotations

from collections.abc import Iterable

from max import mlir
from max.graph.dim import Dim, DimLike
from max.graph.ops.images.interpolation import InterpolationMode
from max.graph.ops.images.pooling import pair
from max.graph.ops.staging.stage import as_tensor, stage
from max.graph.value import TensorValue, TensorValueLike

__all__ = ["fold", "resize"]


def resize(
    input: TensorValueLike,
    shape: Iterable[DimLike],
    interpolation: InterpolationMode = InterpolationMode.BILINEAR,
) -> TensorValue:
    """Resizes images.

    Elements lie at pixel centers, and positions beyond the image take the edge elements, as in PyTorch's
    ``interpolate`` without ``align_corners``. There is no antialiasing.

    Args:
        input: The images: ``[N, C, H, W]``.
        shape: The shape of the result: the same N and C, and the new H and W.
        interpolation: The interpolation.

    Returns:
        A tensor of shape `shape` and of the input's dtype.

    Raises:
        ValueError: The rank is not 4, `shape` does not have four sizes, N or C differs, or the mode is unknown.
        TypeError: The images are bool, or they are integers and the mode is not NEAREST.
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
    """Sums overlapping windows into images, as PyTorch's ``fold``; the adjoint of extracting the windows.

    Args:
        input: The windows: ``[N, C * kernel, L]``. ``kernel`` is the number of elements of a window, L the number of
            windows: the product over both axes of
            ``(output + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1``. A symbolic L is checked when the
            graph runs.
        output_size: Height and width of the images.
        kernel_size: Height and width of a window.
        stride: The distance between windows.
        dilation: The distance between the elements of a window.
        padding: The padding of the image on each side; elements of windows that lie there are dropped.

    Returns:
        ``[N, C, *output_size]``, of the input's dtype.

    Raises:
        ValueError: The rank is not 3, axis 1 is not a multiple of the window's elements, or L does not match.
        TypeError: A number is not an int.
    """
    x = as_tensor(input)
    kernel = pair("fold", "kernel_size", kernel_size, 1)
    rows, columns = pair("fold", "padding", padding, 0)
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
            f"fold: axis 1 of {x.mlir_type.short} is not a multiple of {taps}, the elements of a window"
        )
    attrs = {
        "kernel": kernel,
        "stride": pair("fold", "stride", stride, 1),
        "dilation": pair("fold", "dilation", dilation, 1),
        "padding": (rows, rows, columns, columns),  # top, bottom, left, right
    }
    result = mlir.TensorType.get(
        x.dtype,
        (x.mlir_type.shape[0], depth // taps, *(Dim(n).expr for n in size)),
        x.mlir_type.device,
    )
    return stage("fold", (x,), attrs, result)
