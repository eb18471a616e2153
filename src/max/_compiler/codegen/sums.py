"""Long sums in parts: the error does not grow with their number.

Kernels add up some hundred elements in the type they compute in, then fold this part into a *wide sum*: f64 for parts
of 32 bits, and for parts of 64 bits an f64 with the roundings that it lost, which two-sum finds exactly::

    elements     ████████ ████████ ████████      each part: plain additions, one accumulator per lane
    parts           p0       p1       p2
    wide sum        └────────┴────────┴───>      total, lost
"""

from __future__ import annotations

from typing import Any

from max import kernel as k


@k.inline
def no_sum(part: Any) -> Any:
    """A wide sum of nothing, and its lost roundings, as vectors if the parts are."""
    zero = k.cast(part, k.f64) * 0.0
    return zero, zero


@k.inline
def add_part(total: Any, rounding_error: Any, part: Any) -> Any:
    """A wide sum and its lost roundings, with one more part."""
    if part.dtype is not k.f64:
        return total + k.cast(part, k.f64), rounding_error
    else:
        rounded = total + part
        # two-sum: the exact rounding error of `total + part`
        added = rounded - total
        return rounded, rounding_error + ((total - (rounded - added)) + (part - added))


@k.inline
def rounded_sum(total: Any, rounding_error: Any, dtype: Any) -> Any:
    """A wide sum in the dtype of its parts."""
    if dtype is not k.f64:
        return k.cast(total, dtype)
    else:
        # the roundings of a sum that overflows are NaN
        return k.select(k.isnan(rounding_error), total, total + rounding_error)
