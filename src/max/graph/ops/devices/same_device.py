"""A check of devices, in a module that imports no other: `max.graph.ops` shows it without a load."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from max.graph.value import BufferValue, TensorValue

__all__ = ["assert_same_device"]


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
