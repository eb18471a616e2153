"""Devices and dtypes of torch, and ours."""

from __future__ import annotations

import torch

from max.driver import Tensor
from max.dtype import DType
from max.graph import BufferType, DeviceRef, TensorType


def torch_dtype_to_max(dtype: torch.dtype) -> DType:
    """The `DType` of a torch dtype.

    Args:
        dtype: The torch dtype.

    Raises:
        ValueError: It has none.
    """
    return DType.from_torch(dtype)


def max_dtype_to_torch(dtype: DType) -> torch.dtype:
    """The torch dtype of a `DType`.

    Args:
        dtype: The dtype.

    Raises:
        ValueError: torch has none.
    """
    return dtype.to_torch()


def max_device_ref(device: torch.device) -> DeviceRef:
    """The device of a graph that stands for a device of torch.

    Args:
        device: The device of torch.

    Raises:
        ValueError: Graphs do not run there.
    """
    if device.type == "cpu":
        return DeviceRef.CPU()
    raise ValueError(
        f"a torch tensor is on {device}, and graphs run on the CPU here; move it with .cpu()"
    )


def type_of(tensor: torch.Tensor) -> TensorType:
    """The type of a graph's value that a torch tensor is given for."""
    return TensorType(
        DType.from_torch(tensor.dtype), list(tensor.shape), max_device_ref(tensor.device)
    )


def buffer_type_of(tensor: torch.Tensor) -> BufferType:
    """The type of a graph's buffer on a torch tensor's memory."""
    like = type_of(tensor)
    return BufferType(like.dtype, like.shape, like.device)


# NumPy shares the memory of these for a third of what DLPack costs
_NUMPY = frozenset(
    {
        torch.bool, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8,
        torch.float16, torch.float32, torch.float64,
    }
)  # fmt: skip


def view_of(tensor: torch.Tensor) -> Tensor:
    """A tensor on the memory of a torch tensor."""
    plain = tensor.detach() if tensor.requires_grad else tensor
    if plain.dtype in _NUMPY:
        return Tensor.from_numpy(plain.numpy())
    return Tensor.from_dlpack(plain)


def tensor_of(result: Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A torch tensor on the memory of a result; `dtype` is the one that is expected."""
    if dtype in _NUMPY and result.dtype == DType.from_torch(dtype):
        return torch.from_numpy(result.to_numpy())
    return torch.from_dlpack(result)
