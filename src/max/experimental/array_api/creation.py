"""New arrays."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any

import numpy as np

from max.driver import Device
from max.dtype import DType
from max.experimental import functional as F
from max.experimental.array_api.arguments import Scalar, shape_of
from max.experimental.tensor import Tensor, defaults

__all__ = [
    "arange",
    "asarray",
    "empty",
    "empty_like",
    "eye",
    "from_dlpack",
    "full",
    "full_like",
    "linspace",
    "meshgrid",
    "ones",
    "ones_like",
    "tril",
    "triu",
    "zeros",
    "zeros_like",
]


def asarray(
    obj: Any,
    /,
    *,
    dtype: DType | None = None,
    device: Device | None = None,
    copy: builtins.bool | None = None,
) -> Tensor:
    """A tensor of a number, nested lists, or an array; a copy only where `copy` or a conversion needs one."""
    if isinstance(obj, Tensor):
        result = obj if dtype in (None, obj.dtype) else obj.cast(dtype)
    elif hasattr(obj, "__dlpack__"):
        result = Tensor.from_dlpack(obj)
        result = result if dtype in (None, result.dtype) else result.cast(dtype)
    else:
        array = np.asarray(obj)
        # Python's floats have the default dtype, integers and bools their own
        if dtype is None and array.dtype.kind in "biu":
            dtype = DType.from_numpy(array.dtype)
        return Tensor.constant(obj, dtype=dtype, device=device)
    if device is not None and device != result.device:
        result = result.to(device)
    if copy and result is obj:
        return Tensor.from_dlpack(np.array(result.to_numpy()))
    if copy is False and result is not obj and dtype not in (None, getattr(obj, "dtype", None)):
        raise ValueError(f"asarray: a conversion to {dtype} copies, and copy is False")
    return result


def from_dlpack(
    x: Any, /, *, device: Device | None = None, copy: builtins.bool | None = None
) -> Tensor:
    """A tensor on the memory of an array of another library."""
    return asarray(Tensor.from_dlpack(x), device=device, copy=copy)


def full(
    shape: int | tuple[int, ...],
    fill_value: Scalar,
    *,
    dtype: DType | None = None,
    device: Device | None = None,
) -> Tensor:
    """A tensor with one value everywhere; its dtype follows the value's kind."""
    if dtype is None:
        kinds = {builtins.bool: DType.bool, int: DType.int64}
        dtype = kinds.get(type(fill_value))
    return Tensor.full(
        shape if isinstance(shape, tuple) else (shape,), fill_value, dtype=dtype, device=device
    )


def zeros(
    shape: int | tuple[int, ...], *, dtype: DType | None = None, device: Device | None = None
) -> Tensor:
    """A tensor of zeros, of the default dtype if none is given."""
    return full(shape, 0.0, dtype=dtype, device=device)


def ones(
    shape: int | tuple[int, ...], *, dtype: DType | None = None, device: Device | None = None
) -> Tensor:
    """A tensor of ones, of the default dtype if none is given."""
    return full(shape, 1.0, dtype=dtype, device=device)


empty = zeros


def full_like(
    x: Tensor, /, fill_value: Scalar, *, dtype: DType | None = None, device: Device | None = None
) -> Tensor:
    """A tensor of the shape and dtype of another one, with one value everywhere."""
    return full(shape_of(x), fill_value, dtype=dtype or x.dtype, device=device or x.device)


def zeros_like(x: Tensor, /, *, dtype: DType | None = None, device: Device | None = None) -> Tensor:
    """A tensor of zeros of the shape and dtype of another one."""
    return full_like(x, 0, dtype=dtype, device=device)


def ones_like(x: Tensor, /, *, dtype: DType | None = None, device: Device | None = None) -> Tensor:
    """A tensor of ones of the shape and dtype of another one."""
    return full_like(x, 1, dtype=dtype, device=device)


empty_like = zeros_like


def arange(
    start: float,
    /,
    stop: float | None = None,
    step: float = 1,
    *,
    dtype: DType | None = None,
    device: Device | None = None,
) -> Tensor:
    """Values from `start` to before `stop`, `step` apart; int64 where all three are integers."""
    start, stop = (0, start) if stop is None else (start, stop)
    integers = builtins.all(isinstance(value, int) for value in (start, stop, step))
    if dtype is None:
        dtype = DType.int64 if integers else defaults()[0]
    values = np.arange(start, stop, step, dtype=None if integers else np.float64)
    return Tensor.constant(values.astype(dtype.to_numpy()), device=device)


def linspace(
    start: float,
    stop: float,
    /,
    num: int,
    *,
    dtype: DType | None = None,
    device: Device | None = None,
    endpoint: builtins.bool = True,
) -> Tensor:
    """`num` values at equal distances."""
    dtype = dtype or defaults()[0]
    values = np.linspace(start, stop, num, endpoint=endpoint)
    return Tensor.constant(values.astype(dtype.to_numpy()), device=device)


def eye(
    n_rows: int,
    n_cols: int | None = None,
    /,
    *,
    k: int = 0,
    dtype: DType | None = None,
    device: Device | None = None,
) -> Tensor:
    """Ones on the k-th diagonal."""
    dtype = dtype or defaults()[0]
    return Tensor.constant(np.eye(n_rows, n_cols, k).astype(dtype.to_numpy()), device=device)


def meshgrid(*arrays: Tensor, indexing: str = "xy") -> list[Tensor]:
    """The coordinates of a grid, of axes of rank 1."""
    if indexing not in ("xy", "ij"):
        raise ValueError(f"meshgrid: indexing is {indexing!r}, expected 'xy' or 'ij'")
    rank = len(arrays)
    sizes = [shape_of(a)[0] for a in arrays]
    grids = [
        F.broadcast_to(a.reshape([-1 if j == i else 1 for j in range(rank)]), sizes)
        for i, a in enumerate(arrays)
    ]
    return [g.transpose(0, 1) for g in grids] if indexing == "xy" and rank > 1 else grids


def tril(x: Tensor, /, *, k: int = 0) -> Tensor:
    """The part of matrices on and below the k-th diagonal."""
    return _part(x, lambda row, column: column - row <= k)


def triu(x: Tensor, /, *, k: int = 0) -> Tensor:
    """The part of matrices on and above the k-th diagonal."""
    return _part(x, lambda row, column: column - row >= k)


def _part(x: Tensor, inside: Callable[[Any, Any], Any]) -> Tensor:
    rows, columns = shape_of(x)[-2:]
    mask = inside(np.arange(rows)[:, None], np.arange(columns))
    return F.where(Tensor.constant(mask), x, zeros_like(x))
