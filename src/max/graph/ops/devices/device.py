"""Transfers between devices."""

from __future__ import annotations

from max import mlir
from max.driver import Device
from max.graph.ops.staging.stage import as_tensor, stage
from max.graph.type import DeviceRef
from max.graph.value import StrongTensorValueLike, TensorValue

__all__ = ["transfer_to"]


def transfer_to(x: StrongTensorValueLike, device: Device | DeviceRef) -> TensorValue:
    """Transfers a tensor to a device.

    Args:
        x: The tensor.
        device: The target device.

    Returns:
        A tensor of equal shape and dtype on `device`; `x` itself if it is already there.
    """
    tensor = as_tensor(x)
    type_ = tensor.mlir_type
    where = DeviceRef.from_device(device).to_mlir()
    if where == type_.device:
        return tensor
    return stage("transfer", (tensor,), None, mlir.TensorType.get(type_.dtype, type_.shape, where))
