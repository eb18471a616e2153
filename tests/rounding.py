"""A reference of rounding to narrow floats: the nearest of all their values, ties to the even code."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def positive_values(dtype: Any) -> Array:
    """All finite values from 0 on as float64, in the order of their codes."""
    bits = 4 if "float4" in str(np.dtype(dtype)) else 8 * np.dtype(dtype).itemsize
    codes = np.arange(2 ** (bits - 1)).astype(f"u{np.dtype(dtype).itemsize}")
    with np.errstate(invalid="ignore"):
        values = codes.view(dtype).astype(np.float64)
    return values[np.isfinite(values)]


def nearest(x: Array, dtype: Any) -> Array:
    """float64 values of `x` rounded to `dtype`; NaN stands for infinity too."""
    values = positive_values(dtype)
    # what is too large is nearest to the number that the next code would be
    grid = np.append(values, 2 * values[-1] - values[-2])
    ties = (grid[1:] + grid[:-1]) / 2
    magnitude = np.abs(x)
    code = np.searchsorted(ties, magnitude, side="left")
    on_tie = (code < len(ties)) & (ties[np.minimum(code, len(ties) - 1)] == magnitude)
    code = code + (on_tie & (code % 2 == 1))
    result = np.append(values, np.nan)[np.minimum(code, len(values))]
    return np.copysign(np.where(np.isnan(x), np.nan, result), x)


def near_ties(dtype: Any, rng: np.random.Generator, count: int) -> Array:
    """float64 values on ties of `dtype`, next to them, and within what a float32 distinguishes from them; of either
    sign.
    """
    values = positive_values(dtype)
    grid = np.append(values, 2 * values[-1] - values[-2])
    ties = (grid[1:] + grid[:-1]) / 2
    # the ends too: subnormal numbers, and the tie beyond the greatest number
    picked = np.concatenate([ties[:4], ties[-4:], rng.choice(ties, max(count - 8, 0))])
    away = picked * 2.0 ** rng.integers(-52, -20, picked.size) * rng.choice([-1, 1], picked.size)
    steps = [picked, np.nextafter(picked, 0), np.nextafter(picked, np.inf), picked + away]
    x = np.concatenate([*steps, [0.0, 5e-324, 1e-310, 1e-46, 3e38, 1e300, np.inf, np.nan]])
    return x * rng.choice([-1.0, 1.0], x.size)
