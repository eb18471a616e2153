"""The elements of new eager tensors."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from max import driver
from max.driver import CPU, Device
from max.dtype import DType
from max.graph import Dim, Shape, ShapeLike
from max.graph.ops.creation.constant import to_array

__all__ = ["constant", "dtype_of", "evenly_spaced", "full"]


def dtype_of(value: Any) -> DType | None:
    """The dtype of an array; None for numbers and lists."""
    if hasattr(value, "__dlpack__") or isinstance(value, np.ndarray):
        return driver.Tensor.from_dlpack(value).dtype
    return None


def constant(value: Any, dtype: DType, device: Device) -> driver.Tensor:
    """A tensor of given values, copied.

    Args:
        value: A number, nested lists of numbers, or an array of the dtype.
        dtype: The element type.
        device: The device.

    Raises:
        ValueError: Lists that are not rectangular, or an array of another dtype.
    """
    return _on(np.array(to_array(value, dtype)), device)


def full(shape: ShapeLike, number: driver.Tensor) -> driver.Tensor:
    """A tensor with one value everywhere.

    Args:
        shape: The shape.
        number: The value, a tensor of rank 0 of the dtype and on the device of the result.

    Raises:
        ValueError: A size is negative or a symbol.
    """
    sizes = _sizes("full", shape)
    return _on(np.full(sizes, number.to(CPU()).to_numpy()), number.device)


def evenly_spaced(
    start: float | Dim, stop: float | Dim, step: float | Dim
) -> list[int] | list[float]:
    """The values from `start` to before `stop`, `step` apart: integers where all three are.

    Raises:
        TypeError: One of them is not a number.
    """
    bounds = (start, stop, step)
    integers = [bound for bound in bounds if not isinstance(bound, float)]
    if len(integers) == len(bounds):
        return list(range(*map(operator.index, integers)))
    return np.arange(float(start), float(stop), float(step), dtype=np.float64).tolist()


def _on(array: np.ndarray[Any, Any], device: Device) -> driver.Tensor:
    tensor = driver.Tensor.from_numpy(array)
    return tensor if tensor.device == device else tensor.to(device)


def _sizes(op: str, shape: ShapeLike) -> tuple[int, ...]:
    sizes: list[int] = []
    for dim in Shape(shape):
        if not dim.expr.is_static or int(dim) < 0:
            raise ValueError(f"{op}: a size is {dim}, expected an int of 0 or more")
        sizes.append(int(dim))
    return tuple(sizes)
