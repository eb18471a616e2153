"""Conversion of tensors in memory to another element type, for programs that prepare weights and inputs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from max.driver import CPU, Device, DLPackArray, Tensor
from max.dtype import DType
from max.dtype.rounding import convert_rounding_once

__all__ = ["cast_dlpack_to", "cast_tensor_to", "cast_tensors_to"]


def cast_tensor_to(tensor: Tensor, new_dtype: DType, session: object = None) -> Tensor:
    """The tensor with another element type, on its device; itself if it has that type.

    Args:
        tensor: The tensor.
        new_dtype: The element type. Floats are rounded to nearest, ties to even.
        session: Has no effect: the conversion is done by the host.

    Raises:
        TypeError: `tensor` is not a tensor, or `new_dtype` not a `DType`.
    """
    if not isinstance(tensor, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"cast_tensor_to: expected a tensor, got {type(tensor).__name__}")
    if not isinstance(new_dtype, DType):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"cast_tensor_to: the dtype is {new_dtype!r}, expected a max.dtype.DType")
    if tensor.dtype is new_dtype:
        return tensor
    host = tensor if tensor.is_host else tensor.to(CPU())
    # values beyond a narrower type's range become infinite, without a warning
    with np.errstate(over="ignore", invalid="ignore"):
        elements = convert_rounding_once(host.to_numpy(), new_dtype.to_numpy())
    return Tensor.from_numpy(np.asarray(elements)).to(tensor.device)


def cast_tensors_to(
    tensors: Sequence[Tensor] | None, new_dtype: DType, session: object = None
) -> list[Tensor]:
    """`cast_tensor_to` of each tensor; an empty list for None.

    Args:
        tensors: The tensors.
        new_dtype: The element type.
        session: Has no effect.
    """
    return [cast_tensor_to(tensor, new_dtype, session) for tensor in tensors or ()]


def cast_dlpack_to(
    raw_tensor: DLPackArray,
    old_dtype: DType,
    new_dtype: DType,
    device: Device,
    session: object = None,
) -> Tensor:
    """Wraps an array, reads its bytes as elements of a type, and converts them.

    Args:
        raw_tensor: The array.
        old_dtype: The type of its elements, which the array may hold as integers of the same size.
        new_dtype: The element type of the result.
        device: The device of the result.
        session: Has no effect.

    Raises:
        ValueError: The array's elements are of another size than `old_dtype`.
    """
    tensor = Tensor.from_dlpack(raw_tensor)
    if tensor.dtype is not old_dtype:
        if tensor.dtype.size_in_bytes != old_dtype.size_in_bytes:
            raise ValueError(
                f"cast_dlpack_to: the array has elements of {tensor.dtype}, expected {old_dtype}"
            )
        tensor = tensor.view(old_dtype)
    return cast_tensor_to(tensor, new_dtype, session).to(device)
