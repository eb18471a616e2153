"""Band masks and window functions, which depend on positions only."""

from __future__ import annotations

import numpy as np

from max.dtype import DType
from max.graph.ops.creation.constant import constant
from max.graph.ops.creation.range import range
from max.graph.ops.elementwise.binary import logical_and, where
from max.graph.ops.elementwise.unary import logical_not
from max.graph.ops.movement.shape import broadcast_to, reshape
from max.graph.ops.staging.stage import as_tensor
from max.graph.type import DeviceRef
from max.graph.value import TensorValue, TensorValueLike

__all__ = ["band_part", "hann_window"]


def band_part(
    x: TensorValueLike,
    num_lower: int | None = None,
    num_upper: int | None = None,
    exclude: bool = False,
) -> TensorValue:
    """Zeroes each matrix outside a band around its main diagonal.

    Element (m, n) of the last two axes is in the band if ``m - n <= num_lower`` and ``n - m <= num_upper``.

    Args:
        x: The tensor ``[…, M, N]``.
        num_lower: The number of diagonals below the main one in the band; None or -1 for all.
        num_upper: The number of diagonals above the main one in the band; None or -1 for all.
        exclude: Whether to zero the band instead.

    Returns:
        A tensor of the shape and dtype of `x`.

    Raises:
        ValueError: The rank is less than 2, or a number is below -1 or exceeds the diagonals of the matrix.
    """
    tensor = as_tensor(x)
    if tensor.rank < 2:
        raise ValueError(f"band_part: {tensor!r} has rank {tensor.rank}, expected 2 or more")
    rows, columns = tensor.shape[-2:]
    num_lower, num_upper = (None if _is_all(n) else n for n in (num_lower, num_upper))
    for name, number, size in (("num_lower", num_lower, rows), ("num_upper", num_upper, columns)):
        limit = size.expr.value if size.expr.is_static else None
        if number is not None and (
            number < 0 or (limit is not None and number > max(limit - 1, 0))
        ):
            raise ValueError(
                f"band_part: {name} is {number}, expected -1 (all) or 0 or more and less than {size}, "
                f"for {tensor!r}"
            )
    row = reshape(range(0, rows, dtype=DType.int64, device=tensor.device), [rows, 1])
    column = reshape(range(0, columns, dtype=DType.int64, device=tensor.device), [1, columns])
    mask: TensorValue | None = None
    for inside in (
        None if num_lower is None else row - column <= num_lower,
        None if num_upper is None else column - row <= num_upper,
    ):
        if inside is not None:
            mask = inside if mask is None else logical_and(mask, inside)
    if mask is None:
        mask = broadcast_to(constant(True, DType.bool, tensor.device), [rows, columns])
    return where(logical_not(mask) if exclude else mask, tensor, 0)


def _is_all(number: object) -> bool:
    return not isinstance(number, TensorValue | float) and number == -1


def hann_window(
    window_length: int,
    device: DeviceRef,
    periodic: bool = True,
    dtype: DType = DType.float32,
) -> TensorValue:
    """The Hann window, ``(1 - cos(2 π n / (N - 1))) / 2`` for n from 0 to N - 1.

    Args:
        window_length: The length N of the window.
        device: The device of the window.
        periodic: Whether to return the first N elements of the window of length N + 1, for spectral analysis.
        dtype: The element type, a floating-point type.

    Returns:
        A tensor of shape ``[window_length]``.

    Raises:
        ValueError: The length is negative.
        TypeError: The length is not an int.
    """
    if type(window_length) is not int:
        raise TypeError(f"hann_window: the length is {window_length!r}, expected an int")
    if window_length < 0:
        raise ValueError(f"hann_window: the length is {window_length}, expected 0 or more")
    # a periodic window lacks its last point, which is the first one of the next period
    points = np.arange(window_length) / max(window_length - 1 + periodic, 1)
    window = 0.5 - 0.5 * np.cos(2 * np.pi * points) if window_length > 1 else points + 1.0
    return constant(window, dtype, device)
