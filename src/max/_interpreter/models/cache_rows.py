"""The rows of a KV cache in NumPy: floats, or codes with a scale.

A row of int8 is a float32 scale, its codes, and padding to a multiple of 4 bytes; see
``KVCacheParams.stored_head_dim``.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from max._interpreter.core import Array

__all__ = ["decode_rows", "encode_rows"]

SCALE_BYTES = 4


def encode_rows(rows: Array, like: Array) -> Array:
    """Rows in the format of a cache.

    Args:
        rows: Floats ``[…, head_dim]``.
        like: The cache, or rows of it ``[…, row size]``.

    Raises:
        ValueError: Rows of the cache have another size.
    """
    size = rows.shape[-1]
    if like.dtype != np.int8:
        if like.dtype == ml_dtypes.float8_e4m3fn:
            # e4m3fn has no infinity: larger numbers would become NaN
            rows = np.clip(rows.astype(np.float32), -448, 448)
        return rows.astype(like.dtype)
    padded = -(-size // 4) * 4
    if like.shape[-1] != SCALE_BYTES + padded:
        raise ValueError(
            f"rows of the cache have {like.shape[-1]} bytes, expected {SCALE_BYTES + padded} for "
            f"{size} elements"
        )
    wide = rows.astype(np.float32)
    top = np.abs(wide).max(axis=-1, keepdims=True, initial=0)
    # 127 / top overflows for tiny rows, and NaN stays NaN: the clip and nan_to_num bound the codes
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        inverse = np.where(top > 0, np.float32(127) / top, np.float32(0))
        codes = np.nan_to_num(np.clip(np.rint(wide * inverse), -128, 127), nan=0)
    encoded = np.zeros((*rows.shape[:-1], SCALE_BYTES + padded), np.int8)
    encoded[..., :SCALE_BYTES] = (top * np.float32(1 / 127)).view(np.int8)
    encoded[..., SCALE_BYTES : SCALE_BYTES + size] = codes.astype(np.int8)
    return encoded


def decode_rows(rows: Array, head_dim: int) -> Array:
    """The elements of rows of a cache, ``[…, head_dim]``: of codes float32, else in the cache's dtype.

    Args:
        rows: ``[…, row size]``.
        head_dim: The size of a head.
    """
    if rows.dtype != np.int8:
        return rows
    scales = np.ascontiguousarray(rows[..., :SCALE_BYTES]).view(np.float32)
    return rows[..., SCALE_BYTES : SCALE_BYTES + head_dim] * scales
