"""Padding that repeats the tensor's own elements: the modes `reflect` and `edge` of `max.graph.ops.pad`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from max._errors import ArgumentError
from max.dtype import DType
from max.graph.dim import Dim
from max.graph.ops.creation.constant import constant
from max.graph.ops.creation.range import range as range_op
from max.graph.ops.elementwise.binary import maximum, minimum, mod
from max.graph.ops.movement.gather import gather
from max.graph.value import TensorValue
from max.mlir.dims import DimExpr

__all__ = ["BORDERS", "pad_by_elements"]

BORDERS = ("reflect", "edge")
"""Modes that take the new elements from the tensor, as ``numpy.pad`` does."""


def pad_by_elements(tensor: TensorValue, amounts: Sequence[DimExpr], mode: str) -> TensorValue:
    """Enlarges the axes of a tensor by its own elements.

    Args:
        tensor: The tensor.
        amounts: The number of elements before and after each axis: ``[before_0, after_0, …]``.
        mode: One of `BORDERS`.

    Returns:
        A tensor of the same dtype.

    Raises:
        ValueError: A padding is negative, or an axis without elements is padded.
    """
    for axis in range(tensor.rank):
        low, high = amounts[2 * axis], amounts[2 * axis + 1]
        for amount in (low, high):
            if amount.is_static and amount.value < 0:
                raise ArgumentError(f"pad: the padding {amount} of axis {axis} is negative")
        if low == 0 and high == 0:
            continue
        size = tensor.mlir_type.shape[axis]
        if size == 0:
            raise ArgumentError(f"pad: axis {axis} of {tensor!r} has no element for mode {mode!r}")
        tensor = gather(tensor, _indices(tensor, size, low, high, mode), axis)
    return tensor


def _indices(
    tensor: TensorValue, size: DimExpr, low: DimExpr, high: DimExpr, mode: str
) -> TensorValue:
    """For each position of the padded axis the position that it is read from: int64."""
    if size.is_static and low.is_static and high.is_static:
        positions = np.arange(-low.value, size.value + high.value)
        last = size.value - 1
        if mode == "edge":
            source = positions.clip(0, last)
        else:
            # a reflection repeats after 2 * last elements, and runs back in the second half
            source = positions % max(2 * last, 1)
            source = np.minimum(source, 2 * last - source)
        return constant(source.astype(np.int64), DType.int64, tensor.device)
    total, first, last = (Dim.from_mlir(d) for d in (size + low + high, low, size - 1))
    counted = range_op(0, total, 1, total, dtype=DType.int64, device=tensor.device)
    positions = counted - TensorValue(first).to(tensor.device)
    end = TensorValue(last).to(tensor.device)
    if mode == "edge":
        return minimum(maximum(positions, 0), end)
    # as above, for sizes that only a run tells
    source = mod(positions, maximum(end * 2, 1))
    return minimum(source, end * 2 - source)
