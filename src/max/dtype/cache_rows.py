"""The size of a head's key or value in a page of a KV cache."""

from __future__ import annotations

from typing import Any

__all__ = ["SCALE_BYTES", "cache_row_elements"]

SCALE_BYTES = 4
"""The bytes of the float32 scale before the codes of an int8 row."""


def cache_row_elements(dtype: Any, head_dim: int) -> int:
    """The elements of a head's row in a page: `head_dim`, or the bytes of an int8 row.

    An int8 row has a float32 scale, then the codes, padded to a multiple of 4 bytes.

    Args:
        dtype: The cache's type: a `DType`, or a type of the kernel language.
        head_dim: The size of a head.
    """
    if dtype.name not in ("i8", "int8"):
        return head_dim
    return SCALE_BYTES + -(-head_dim // 4) * 4
