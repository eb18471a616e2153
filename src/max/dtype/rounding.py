"""Conversions of NumPy arrays between element types, rounded once."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["convert_rounding_once"]

Array = npt.NDArray[Any]


def convert_rounding_once(x: Array, dtype: npt.DTypeLike) -> Array:
    """``x.astype(dtype)``, but a float64 is rounded once, to nearest, ties to even.

    ml_dtypes converts a float64 by way of float32, which moves values close to a tie onto the tie.

    Args:
        x: The array.
        dtype: The element type of the result.
    """
    dtype = np.dtype(dtype)
    if x.dtype == np.float64 and dtype.isbuiltin != 1:
        x = _rounded_to_odd(x)
    return x.astype(dtype)


def _rounded_to_odd(x: Array) -> Array:
    """float32 values; those that are inexact have a last bit of 1.

    Rounding the result to a type of fewer bits gives what rounding `x` gives: it lies on the same side of each tie.
    """
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        nearest = x.astype(np.float32)
        bits = nearest.view(np.int32)
        back = nearest.astype(np.float64)
        move = (back != x) & (back == back) & (bits & 1 == 0)
        step = np.where(np.abs(back) < np.abs(x), np.int32(1), np.int32(-1))
    return np.where(move, bits + step, bits).astype(np.int32).view(np.float32)
