"""Transfers between devices."""

from __future__ import annotations

from max import mlir
from max.driver import Device
from max.graph.ops.staging.stage import as_tensor, stage
from max.graph.type import DeviceRef
from max.graph.value import BufferValue, StrongTensorValueLike, TensorValue

__all__ = ["assert_same_device", "transfer_to"]


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


def assert_same_device(
    *values: TensorValue | BufferValue, **named_values: TensorValue | BufferValue
) -> None:
    """Checks that all values are on one device.

    Args:
        values: The values.
        named_values: Further values, with names for the error message.

    Raises:
        ValueError: The values are on different devices.
    """
    named = {f"value {i}": v for i, v in enumerate(values)} | named_values
    if len({v.device for v in named.values()}) > 1:
        where = ", ".join(f"{name} on {v.device}" for name, v in named.items())
        raise ValueError(f"the values are on different devices: {where}")
