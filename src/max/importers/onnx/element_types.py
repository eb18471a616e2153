"""Element types of ONNX."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from max.dtype import DType
from max.importers.errors import ModelFileError, Unsupported

__all__ = ["STORAGE", "TEXT", "code_of", "dtype_of", "numpy_of", "storage_of"]

TEXT = 8
"""The code of strings."""

_CODES: dict[int, DType] = {
    1: DType.float32,
    2: DType.uint8,
    3: DType.int8,
    4: DType.uint16,
    5: DType.int16,
    6: DType.int32,
    7: DType.int64,
    9: DType.bool,
    10: DType.float16,
    11: DType.float64,
    12: DType.uint32,
    13: DType.uint64,
    16: DType.bfloat16,
    17: DType.float8_e4m3fn,
    18: DType.float8_e4m3fnuz,
    19: DType.float8_e5m2,
    20: DType.float8_e5m2fnuz,
    23: DType.float4_e2m1fn,
    24: DType.float8_e8m0fnu,
}
STORAGE: dict[int, tuple[str, DType]] = {
    21: ("uint4", DType.uint8),
    22: ("int4", DType.int8),
    25: ("uint2", DType.uint8),
    26: ("int2", DType.int8),
}
"""Integers of less than 8 bits: their NumPy names, and the type in which a graph holds them, one an element."""
_BY_DTYPE = {dtype: code for code, dtype in _CODES.items()}
_COMPLEX = {14: "complex64", 15: "complex128"}


def dtype_of(code: int) -> DType:
    """The type that holds elements of an ONNX type in a graph.

    Raises:
        Unsupported: There is none.
    """
    if code in _CODES:
        return _CODES[code]
    if code in STORAGE:
        return STORAGE[code][1]
    name = _COMPLEX.get(code, "strings" if code == TEXT else f"elements of type {code}")
    raise Unsupported(f"takes no {name} here")


def code_of(dtype: DType | None, stored_as: str = "") -> int:
    """The ONNX type of a type of the graph; of strings for None.

    Args:
        dtype: The type.
        stored_as: The name of a narrow integer that it holds.
    """
    if stored_as:
        return next(code for code, (name, _) in STORAGE.items() if name == stored_as)
    return TEXT if dtype is None else _BY_DTYPE[dtype]


def storage_of(code: int) -> str:
    """The NumPy name of a type that a graph holds in a wider one; "" for others."""
    return STORAGE[code][0] if code in STORAGE else ""


def numpy_of(name: str) -> np.dtype[Any]:
    """The NumPy type of a narrow integer, such as "int4".

    Raises:
        ModelFileError: There is none.
    """
    if not hasattr(ml_dtypes, name):
        raise ModelFileError(f"NumPy has no type {name}")
    return np.dtype(getattr(ml_dtypes, name))
