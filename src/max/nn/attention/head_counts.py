"""The number of heads per device."""

from __future__ import annotations

__all__ = ["num_heads_for_device"]


def num_heads_for_device(*, num_heads: int, device_idx: int, num_devices: int) -> int:
    """The number of heads of one device: heads are divided evenly, and the first devices take the remainder.

    Args:
        num_heads: The number of all heads.
        device_idx: The index of the device.
        num_devices: The number of devices.

    Raises:
        ValueError: A number is negative, or there is no device.
        IndexError: The device index is out of range.
    """
    if num_heads < 0 or num_devices < 1:
        raise ValueError(
            f"num_heads_for_device: {num_heads} heads on {num_devices} devices, expected 0 or more on 1 or more"
        )
    if not 0 <= device_idx < num_devices:
        raise IndexError(f"num_heads_for_device: device {device_idx} of {num_devices}")
    each, left = divmod(num_heads, num_devices)
    return each + (device_idx < left)
