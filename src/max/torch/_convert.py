"""Conversions of devices, dtypes and tensors between torch and MAX."""

# tensors are made directly: the checks of the public constructors would take longer than a small graph
# pyright: reportPrivateUsage=false
from __future__ import annotations

import torch

from max._host.process_caches import cached_results
from max.driver import Tensor
from max.driver._arguments import HOST
from max.driver._memory import ALIGNMENT
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
    """The graph device of a torch device.

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
    """The graph type of a torch tensor."""
    return TensorType(
        DType.from_torch(tensor.dtype), list(tensor.shape), max_device_ref(tensor.device)
    )


def buffer_type_of(tensor: torch.Tensor) -> BufferType:
    """The graph type of a torch tensor that a graph changes in place."""
    like = type_of(tensor)
    return BufferType(like.dtype, like.shape, like.device)


@cached_results()
def _dtype_of(dtype: torch.dtype) -> DType:
    return DType.from_torch(dtype)


def view_of(tensor: torch.Tensor) -> Tensor:
    """A contiguous tensor on the memory of a contiguous torch tensor of the CPU, which it keeps alive.

    Raises:
        ValueError: The tensor's dtype is not one of graphs, or its storage was made smaller than the tensor.
    """
    # as after tensor.untyped_storage().resize_(0), where torch's own operations crash
    storage, end = tensor.untyped_storage(), tensor.storage_offset() + tensor.numel()
    if storage.nbytes() < end * tensor.itemsize:
        raise ValueError(
            f"a torch tensor of shape {list(tensor.shape)} and {tensor.dtype} is on a storage of {storage.nbytes()} "
            f"bytes, expected {end * tensor.itemsize}"
        )
    # torch's own exports, by NumPy or DLPack, take several times as long
    ptr = tensor.data_ptr() or ALIGNMENT
    memory = (ptr, tensor)
    shape = tuple(tensor.shape)
    return Tensor._over(memory, _dtype_of(tensor.dtype), shape, HOST, HOST.default_stream)


def tensor_of(result: Tensor) -> torch.Tensor:
    """A torch tensor on the memory of a result."""
    return torch.from_dlpack(result)
