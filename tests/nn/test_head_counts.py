"""Heads of several devices."""

from __future__ import annotations

import numpy as np
import pytest

from max.nn.attention import num_heads_for_device


def test_heads_are_split_as_arrays_are() -> None:
    for heads in range(12):
        for devices in range(1, 6):
            want = [len(part) for part in np.array_split(np.arange(heads), devices)]
            got = [
                num_heads_for_device(num_heads=heads, device_idx=i, num_devices=devices)
                for i in range(devices)
            ]
            assert got == want


def test_what_does_not_fit() -> None:
    for index in (-1, 2):
        with pytest.raises(IndexError, match=f"device {index} of 2"):
            num_heads_for_device(num_heads=4, device_idx=index, num_devices=2)
    for heads, devices in ((-1, 2), (4, 0)):
        with pytest.raises(ValueError, match=f"{heads} heads on {devices} devices"):
            num_heads_for_device(num_heads=heads, device_idx=0, num_devices=devices)
