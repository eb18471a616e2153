"""The bounds of what a kernel fixes at compile time; the compiler and plain Python have the same ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

__all__ = [
    "MAX_INT_BITS",
    "MAX_TILE_BYTES",
    "MAX_TILES_BYTES",
    "MAX_UNROLL",
    "MAX_UNROLLED",
    "MAX_WIDTH",
    "tile_error",
    "unroll_error",
    "width_error",
]

MAX_WIDTH = 4096
"""The maximum number of lanes of a vector."""
MAX_UNROLL = 65536
"""The maximum number of iterations of an unrolled loop, and of items of a sequence that is built."""
MAX_UNROLLED = 1 << 18
"""The maximum number of unrolled iterations of a kernel, nested loops included."""
MAX_TILE_BYTES = 1 << 16
"""The maximum size of a tile in bytes."""
MAX_TILES_BYTES = 1 << 20
"""The maximum size of all tiles of a kernel in bytes: an eighth of the stack of a thread."""
MAX_INT_BITS = 4096
"""The maximum number of bits of an integer that is computed at compile time."""


def width_error(width: Any, text: str) -> str | None:
    """The message for a number of lanes that is out of range, else None.

    Args:
        width: The number.
        text: How the message shows it.
    """
    if isinstance(width, bool) or not isinstance(width, int) or not 1 <= width <= MAX_WIDTH:
        return f"width is an integer in [1, {MAX_WIDTH}] known at compile time, got {text}"
    return None


def unroll_error(items: range) -> str | None:
    """The message for a range that is too long to be unrolled, else None."""
    # len() fails for lengths beyond 63 bits
    if items and abs(items[-1] - items[0]) // abs(items.step) >= MAX_UNROLL:
        return f"{items} has more than {MAX_UNROLL} items to unroll; use a run-time loop"
    return None


def tile_error(shape: Sequence[int], bytes_per_element: int) -> str | None:
    """The message for a tile that is too large, else None."""
    size = math.prod(shape) * bytes_per_element
    if size > MAX_TILE_BYTES:
        return (
            f"a tile of shape {list(shape)} has {size} bytes, expected at most {MAX_TILE_BYTES}; ctx.scratch gives a "
            "worker more memory"
        )
    return None
