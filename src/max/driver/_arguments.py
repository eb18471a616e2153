"""Checks of the arguments of :class:`Tensor`'s methods, and their error messages."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import numpy as np

from max._errors import ArgumentError, ForeignTypeError
from max.driver._device import CPU, Device, DeviceStream
from max.driver._memory import Array
from max.dtype import DType

__all__ = [
    "HOST",
    "ShapeLike",
    "as_shape",
    "check_dtype",
    "dtype_of",
    "target_of",
    "view_shape",
    "writable_value",
]

ShapeLike: TypeAlias = Sequence[int]

HOST = CPU()


def as_shape(op: str, shape: object) -> tuple[int, ...]:
    """Converts a shape to a tuple of non-negative ints.

    Args:
        op: The call, for error messages.
        shape: The argument of the call.

    Raises:
        TypeError: It is not a sequence of integers.
        ArgumentError: A size is negative.
    """
    if isinstance(shape, (str, bytes)) or not isinstance(shape, (Sequence, np.ndarray)):
        raise TypeError(f"{op}: expected shape as a sequence of integers, got {shape!r}")
    try:
        sizes = tuple(operator.index(size) for size in cast("Sequence[Any]", shape))
    except TypeError as error:
        raise TypeError(f"{op}: expected shape as integers, got {shape!r}") from error
    if any(size < 0 for size in sizes):
        raise ArgumentError(f"{op}: sizes are not negative, got shape {sizes}")
    return sizes


def check_dtype(op: str, dtype: object) -> DType:
    """Checks that an argument is a DType.

    Raises:
        TypeError: It is not.
    """
    if not isinstance(dtype, DType):
        hint = "; the order is dtype, shape, device" if isinstance(dtype, (tuple, list)) else ""
        raise TypeError(f"{op}: expected a DType, got {dtype!r}{hint}")
    return dtype


def target_of(op: str, target: Device | DeviceStream | None) -> tuple[Device, DeviceStream]:
    """The device and stream of an argument that may be either; the host by default."""
    if target is None:
        return HOST, HOST.default_stream
    if isinstance(target, Device):
        return target, target.default_stream
    if isinstance(target, DeviceStream):  # pyright: ignore[reportUnnecessaryIsInstance]
        return target.device, target
    raise TypeError(f"{op}: expected a Device or a DeviceStream, got {type(target).__name__}")


def dtype_of(op: str, array: Array) -> DType:
    """The DType of an array.

    Raises:
        ForeignTypeError: No DType corresponds to the array's.
    """
    try:
        return DType.from_numpy(array.dtype)
    except ValueError as error:
        raise ForeignTypeError(f"{op}: {str(error).removeprefix('DType.from_numpy: ')}") from error


def view_shape(
    dtype: DType, shape: tuple[int, ...], new_dtype: DType, new_shape: ShapeLike | None
) -> tuple[int, ...]:
    """The shape of a view with another element type: `new_shape`, or with the last size converted.

    Args:
        dtype: The element type of the tensor.
        shape: The shape of the tensor.
        new_dtype: The element type of the view.
        new_shape: The shape of the view, or None.

    Raises:
        ValueError: The view has another number of bytes, or the last size is not a whole number.
    """
    old_size, new_size = dtype.size_in_bytes, new_dtype.size_in_bytes
    if new_shape is not None:
        sizes = as_shape("Tensor.view", new_shape)
    elif new_size == old_size:
        sizes = shape
    elif not shape or shape[-1] * old_size % new_size:
        raise ValueError(
            f"Tensor.view: {shape} {dtype} does not determine a shape as {new_dtype}; pass the shape"
        )
    else:
        sizes = (*shape[:-1], shape[-1] * old_size // new_size)
    nbytes = math.prod(shape) * old_size
    if math.prod(sizes) * new_size != nbytes:
        raise ValueError(
            f"Tensor.view: {shape} {dtype} has {nbytes} bytes, {sizes} {new_dtype} has "
            f"{math.prod(sizes) * new_size}"
        )
    return sizes


def writable_value(value: object, dtype: DType) -> Any:
    """Checks that a number or array can be written to a tensor of a dtype; returns what NumPy writes.

    Raises:
        ValueError: An integer type would lose the value's fraction.
        TypeError: The value is not a number, or its dtype does not convert.
    """
    target = dtype.to_numpy()
    if isinstance(value, np.generic) and target.isbuiltin == 1:
        value = cast("Any", value).item()
    if isinstance(value, (np.ndarray, np.generic)):
        source = np.dtype(cast("Any", value).dtype)
        if source != target and not np.can_cast(source, target, "same_kind"):
            raise TypeError(f"Tensor: {source} does not convert to {target}; use astype first")
    elif value is None:
        raise TypeError(f"Tensor: expected a number or an array to write, got {value}")
    elif isinstance(value, float) and not value.is_integer() and dtype.is_integral():
        raise ValueError(f"Tensor: {value} is not an integer, the tensor is {dtype}")
    return cast("Any", value)
