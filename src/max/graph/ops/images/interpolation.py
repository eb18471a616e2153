"""Names of interpolations, in a module that imports no other: `max.graph.ops` shows them without a load."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["InterpolationMode"]


class InterpolationMode(StrEnum):
    """The interpolation of `resize`."""

    NEAREST = "nearest"
    """Element ``i * size // new_size`` along each axis."""
    BILINEAR = "bilinear"
    """Linear interpolation between two neighbors along each axis."""
    BICUBIC = "bicubic"
    """Cubic interpolation between four neighbors along each axis."""
