"""Convolutions over sequences, images and volumes."""

from __future__ import annotations

from max._compat.nn.conv_v1 import Conv1DV1, Conv2dV1, Conv3DV1
from max.nn.layers.conv import Conv1D, Conv2d, Conv3D

__all__ = ["Conv1D", "Conv1DV1", "Conv2d", "Conv2dV1", "Conv3D", "Conv3DV1"]
