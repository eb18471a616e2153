"""Arithmetic sequences."""

from __future__ import annotations

import math
from typing import Any

from max import mlir
from max.driver import Device
from max.dtype import DType
from max.graph.dim import Dim, DimLike
from max.graph.ops.creation.constant import constant
from max.graph.ops.elementwise.unary import cast
from max.graph.ops.staging.stage import as_tensor, stage
from max.graph.type import DeviceRef
from max.graph.value import TensorValue, TensorValueLike
from max.mlir.dims import DimExpr

__all__ = ["range"]


def range(
    start: TensorValueLike,
    stop: TensorValueLike,
    step: TensorValueLike = 1,
    out_dim: DimLike | None = None,
    *,
    dtype: DType,
    device: Device | DeviceRef,
) -> TensorValue:
    """The sequence ``start, start + step, …`` up to, and excluding, `stop`.

    Args:
        start: The first element: a number, a dimension or a tensor of rank 0.
        stop: The exclusive end, as `start`.
        step: The step, not 0, as `start`.
        out_dim: The size of the result; it may be omitted if it follows from numbers and dimensions.
        dtype: The element type of the result.
        device: The device of the result.

    Returns:
        A tensor of shape ``[out_dim]``.

    Raises:
        ValueError: The step is 0 or leads away from `stop`, `out_dim` is missing, or differs from the size.
        TypeError: A bound is a tensor of rank 1 or more.
    """
    size = _size(start, stop, step)
    if out_dim is not None:
        length = Dim(out_dim).expr
        if size is not None and size.is_static and length.is_static and size != length:
            raise ValueError(f"range: the range has {size} elements, out_dim is {length}")
        size = length
    if size is None:
        raise ValueError(
            f"range: the size of the range from {start!r} to {stop!r} in steps of {step!r} is not "
            "known at staging; set out_dim"
        )
    operands = [_bound_operand(v, dtype) for v in (start, stop, step)]
    result = mlir.TensorType.get(dtype, (size,))
    return stage("range", operands, None, result).to(DeviceRef.from_device(device))


def _bound_operand(value: TensorValueLike, dtype: DType) -> TensorValue:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return constant(value, dtype)
    scalar = as_tensor(value)
    if scalar.rank != 0:
        raise TypeError(f"range: {scalar!r} is not a scalar")
    return cast(scalar.to(DeviceRef.CPU()), dtype)


def _size(start: Any, stop: Any, step: Any) -> DimExpr | None:
    """The number of elements, or None if a bound is a tensor or the sign of the step is unknown."""
    values = (start, stop, step)
    if all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
        if step == 0:
            raise ValueError("range: the step is 0")
        if (stop - start) * step < 0:
            raise ValueError(f"range: steps of {step} do not lead from {start} to {stop}")
        return DimExpr.constant(max(0, math.ceil((stop - start) / step)))
    if not all(isinstance(v, int | Dim) and not isinstance(v, bool) for v in values):
        return None
    by = Dim(step).expr
    if not by.is_static or by.value == 0:
        return None
    span = Dim(stop).expr - Dim(start).expr
    # both quotients are rounded up
    if by.value < 0:
        return (-span - by - 1) // -by.value
    return (span + by - 1) // by
