"""Data types: limits, kinds, promotion, casts."""

from __future__ import annotations

import builtins
from typing import NamedTuple

import ml_dtypes
import numpy as np

from max.driver import Device
from max.dtype import DType
from max.experimental import functional as F
from max.experimental.array_api.arguments import Scalar, duplicate
from max.experimental.tensor import Tensor

__all__ = [
    "UNSIGNED",
    "astype",
    "can_cast",
    "finfo",
    "iinfo",
    "isdtype",
    "result_type",
]


class _FInfo(NamedTuple):
    bits: int
    eps: float
    max: float
    min: float
    smallest_normal: float
    dtype: DType


class _IInfo(NamedTuple):
    bits: int
    max: int
    min: int
    dtype: DType


def finfo(type: DType | Tensor, /) -> _FInfo:
    """The limits of a float dtype."""
    dtype = type.dtype if isinstance(type, Tensor) else type
    info = ml_dtypes.finfo(dtype.to_numpy())
    eps, top, bottom = float(info.eps), float(info.max), float(info.min)
    return _FInfo(info.bits, eps, top, bottom, float(info.smallest_normal), dtype)


def iinfo(type: DType | Tensor, /) -> _IInfo:
    """The limits of an integer dtype."""
    dtype = type.dtype if isinstance(type, Tensor) else type
    info = np.iinfo(dtype.to_numpy())
    return _IInfo(info.bits, int(info.max), int(info.min), dtype)


_SIGNED = (DType.int8, DType.int16, DType.int32, DType.int64)
UNSIGNED = (DType.uint8, DType.uint16, DType.uint32, DType.uint64)
_FLOATING = (DType.float32, DType.float64, DType.float16, DType.bfloat16)
_KINDS: dict[str, tuple[DType, ...]] = {
    "bool": (DType.bool,),
    "signed integer": _SIGNED,
    "unsigned integer": UNSIGNED,
    "integral": _SIGNED + UNSIGNED,
    "real floating": _FLOATING,
    "complex floating": (),
    "numeric": _SIGNED + UNSIGNED + _FLOATING,
}


def isdtype(dtype: DType, kind: DType | str | tuple[DType | str, ...]) -> builtins.bool:
    """Whether a dtype is another one, or of a kind such as ``"integral"``."""
    if isinstance(kind, tuple):
        return builtins.any(isdtype(dtype, one) for one in kind)
    if isinstance(kind, DType):
        return dtype == kind
    if kind not in _KINDS:
        raise ValueError(
            f"isdtype: kind is {kind!r}, expected a DType or one of {', '.join(_KINDS)}"
        )
    return dtype in _KINDS[kind]


def result_type(*arrays_and_dtypes: Tensor | DType | Scalar) -> DType:
    """The dtype of a computation with tensors, dtypes and Python's numbers."""
    types = [a.dtype if isinstance(a, Tensor) else a for a in arrays_and_dtypes]
    dtypes = [t for t in types if isinstance(t, DType)]
    if not dtypes:
        raise ValueError("result_type: expected a tensor or dtype among the arguments")
    operands = [Tensor.zeros((), dtype=d) for d in dtypes]
    numbers = [t for t in types if not isinstance(t, DType)]
    # promoted as the ops promote their operands
    total = operands[0]
    for operand in [*operands[1:], *numbers]:
        total = F.where(Tensor.constant(True, dtype=DType.bool), total, operand)
    return total.dtype


def can_cast(from_: DType | Tensor, to: DType, /) -> builtins.bool:
    """Whether the promotion of both dtypes is `to`."""
    dtype = from_.dtype if isinstance(from_, Tensor) else from_
    if dtype == to:
        return True
    # NumPy casts bools to numbers, the standard does not
    if (dtype == DType.bool) != (to == DType.bool) or (dtype in _FLOATING and to not in _FLOATING):
        return False
    return np.can_cast(dtype.to_numpy(), to.to_numpy())


def astype(
    x: Tensor, dtype: DType, /, *, copy: builtins.bool = True, device: Device | None = None
) -> Tensor:
    """The elements in another dtype.

    Args:
        x: The tensor.
        dtype: The element type.
        copy: Whether the result has memory of its own also where it has the dtype of `x`.
        device: The device; that of `x` if None.
    """
    result = x if x.dtype == dtype else x.cast(dtype)
    if device is not None and device != x.device:
        result = result.to(device)
    return duplicate(x) if copy and result is x else result
