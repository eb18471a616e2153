"""New arrays."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any

import numpy as np

from max.driver import Device
from max.dtype import DType
from max.experimental import functional as F
from max.experimental.array_api.arguments import Scalar, duplicate, shape_of
from max.experimental.tensor import Tensor, defaults
from max.graph import ShapeLike

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
    """A tensor of a number, nested lists, or an array.

    Args:
        obj: The numbers. The memory of an array is shared where nothing needs a copy of it.
        dtype: The element type; that of an array, or one for the numbers.
        device: The device; that of an array, or the default.
        copy: Whether the result has memory of its own; None where it must.

    Raises:
        ValueError: A number does not fit the dtype; or `copy` is False, and a copy is needed.
    """
    if isinstance(obj, Tensor) or hasattr(obj, "__dlpack__"):
        shared = Tensor.from_dlpack(obj)
        result = shared if dtype in (None, shared.dtype) else shared.cast(dtype)
        if device is not None and device != result.device:
            result = result.to(device)
        if copy is False and (result is not shared or not _contiguous(obj)):
            raise ValueError(
                f"asarray: {shared.dtype} on {shared.device} as {dtype or shared.dtype} on {device or shared.device} "
                "takes a copy, and copy is False"
            )
        return duplicate(result) if copy and result is shared else result
    if copy is False:
        raise ValueError(f"asarray: an object of {type(obj).__name__} is copied, and copy is False")
    if dtype is None:
        array = np.asarray(obj)
        # Python's floats have the default dtype, integers and bools their own
        if array.dtype.kind in "biu":
            dtype = DType.from_numpy(array.dtype)
        elif not _has_floats(obj):
            raise ValueError("asarray: no dtype holds all of the integers; give a float dtype")
    return Tensor.constant(obj, dtype=dtype, device=device)


def _contiguous(obj: Any) -> builtins.bool:
    return not isinstance(obj, np.ndarray) or obj.flags.c_contiguous


def _has_floats(obj: Any) -> builtins.bool:
    if isinstance(obj, list | tuple):
        return not obj or builtins.any(_has_floats(one) for one in obj)
    return not isinstance(obj, int)


def from_dlpack(
    x: Any, /, *, device: Device | None = None, copy: builtins.bool | None = None
) -> Tensor:
    """A tensor on the memory of an array of another library."""
    return asarray(Tensor.from_dlpack(x), device=device, copy=copy)


def full(
    shape: int | ShapeLike,
    fill_value: Scalar,
    *,
    dtype: DType | None = None,
    device: Device | None = None,
) -> Tensor:
    """A tensor with one value everywhere; its dtype follows the value's kind."""
    if dtype is None:
        # a float has the default dtype; a bool is an int, too
        kinds = {builtins.bool: DType.bool, int: DType.int64}
        dtype = kinds.get(type(fill_value))
    return Tensor.full(
        (shape,) if isinstance(shape, int) else shape, fill_value, dtype=dtype, device=device
    )


def zeros(
    shape: int | ShapeLike, *, dtype: DType | None = None, device: Device | None = None
) -> Tensor:
    """A tensor of zeros, of the default dtype if none is given."""
    return full(shape, 0.0, dtype=dtype, device=device)


def ones(
    shape: int | ShapeLike, *, dtype: DType | None = None, device: Device | None = None
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
    """Values from `start` to before `stop`, `step` apart; int64 where all three are integers.

    Args:
        start: The first value; where `stop` is None the end, and the first value is 0.
        stop: The end, which is not among the values.
        step: The distance of values; negative to count down.
        dtype: The element type; int64 or the default if None.
        device: The device; the default if None.

    Raises:
        ValueError: The step is 0, or a value does not fit the dtype.
    """
    start, stop = (0, start) if stop is None else (start, stop)
    integers = builtins.all(isinstance(value, int) for value in (start, stop, step))
    if dtype is None:
        dtype = DType.int64 if integers else defaults()[0]
    if step == 0:
        raise ValueError("arange: the step is 0")
    if integers:
        return Tensor.constant(_integers(range(start, stop, step), dtype), device=device)  # type: ignore[arg-type]
    return Tensor.constant(
        np.arange(start, stop, step, dtype=np.float64), dtype=dtype, device=device
    )


def _integers(values: range, dtype: DType) -> np.ndarray[Any, Any]:
    """The values as an array of a dtype, exact for all of 64 bits."""
    if dtype.is_float():
        return np.array(values, np.float64).astype(dtype.to_numpy())
    limits = np.iinfo(dtype.to_numpy())
    for value in (values[0], values[-1]) if values else ():
        if not limits.min <= value <= limits.max:
            raise ValueError(
                f"arange: {value} is out of range for {dtype.name} ({limits.min} to {limits.max})"
            )
    # integers wrap, so that the result is exact
    first, step = (np.uint64(number % 2**64) for number in (values.start, values.step))
    return (np.arange(len(values), dtype=np.uint64) * step + first).astype(dtype.to_numpy())


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
    # "xy" has the first coordinate along the columns
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
