"""Constants and weights."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from max import mlir
from max.driver import Device, DLPackArray, Tensor
from max.dtype import DType
from max.dtype.rounding import convert_rounding_once
from max.graph import graph
from max.graph.ops.staging.stage import stage
from max.graph.type import DeviceRef, TensorType
from max.graph.value import TensorValue

__all__ = ["constant", "constant_external"]

Array = npt.NDArray[Any]


def constant(
    value: Any,
    dtype: DType | None = None,
    device: Device | DeviceRef | None = None,
) -> TensorValue:
    """A tensor of values known at staging.

    A large array of the right dtype and layout is not copied: do not modify it afterwards.

    Args:
        value: A number, nested sequences of numbers, or an array (NumPy, DLPack).
        dtype: The element type; by default that of an array, int64 for ints, float32 for floats.
        device: The device of the constant; the CPU by default.

    Returns:
        A tensor of the shape of `value`; rank 0 for a number.

    Raises:
        ValueError: A value is out of range for `dtype`, or has a fraction and `dtype` is an integer type.
        TypeError: The value is not numeric.
    """
    array = to_array(value, dtype)
    where = DeviceRef.CPU() if device is None else DeviceRef.from_device(device)
    if array.size <= mlir.INLINE_LIMIT:
        # the op holds the array itself: later changes of the caller's must not change it
        array = array.copy()
    element = DType.from_numpy(array.dtype)
    on_cpu = mlir.TensorType.get(element, array.shape)
    attr = mlir.constant_attr(array, "")
    if isinstance(attr, mlir.ResourceAttr):
        attr = mlir.ResourceAttr.of(graph.Graph.current.resource_key(), array)
    on_host = stage("constant", (), {"value": attr}, on_cpu)
    return on_host if where.is_cpu() and where.id == 0 else on_host.to(where)


def to_array(value: Any, dtype: DType | None = None, op: str = "constant") -> Array:
    """Converts a constant's value to a contiguous NumPy array whose dtype has a `DType`.

    Raises:
        ValueError: A value is out of range for `dtype`, or has a fraction and `dtype` is an integer type.
        TypeError: The value is not numeric.
    """
    array: Array
    if isinstance(value, np.ndarray):
        array = cast(Array, value)
    elif isinstance(value, Tensor):
        array = value.to_numpy()
    elif isinstance(value, np.generic):
        array = np.asarray(cast("np.generic[Any]", value))
    elif isinstance(value, bool | int | float):
        return _convert(op, np.asarray(value), _default_dtype(value) if dtype is None else dtype)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        array = np.asarray(cast("Sequence[Any]", value))
        if dtype is None and array.dtype == np.float64 and not _has_arrays(value):
            dtype = DType.float32
        elif dtype is not None and dtype.is_integral() and array.dtype == np.float64:
            array = _exact_integers(op, cast("Sequence[Any]", value), array, dtype)
    elif isinstance(value, DLPackArray):
        array = Tensor.from_dlpack(value).to_numpy()
    else:
        raise TypeError(
            f"{op}: {value!r} of type {type(value).__name__} is not a number or an array"
        )
    # texts, bytes, objects, times and complex numbers
    if array.dtype == object or array.dtype.kind in "USOMmc":
        raise TypeError(f"{op}: an array of {array.dtype} is not numeric")
    return _convert(op, array, DType.from_numpy(array.dtype) if dtype is None else dtype)


def _exact_integers(op: str, value: Sequence[Any], array: Array, dtype: DType) -> Array:
    """The integers of lists that NumPy reads as float64, as it does where no one integer type holds all of them."""
    # a comparison with NaN is false
    if not (np.abs(array) >= 2.0**53).any():
        return array
    numbers = np.asarray(value, dtype=object)
    if any(isinstance(n, float) and not n.is_integer() for n in numbers.flat):
        return array
    integers = [int(n) for n in numbers.flat]
    limits = np.iinfo(dtype.to_numpy())
    for extreme in (min(integers), max(integers)):
        if not limits.min <= extreme <= limits.max:
            raise ValueError(
                f"{op}: {extreme} is out of range for {dtype.name} ({limits.min} to {limits.max})"
            )
    return np.array(integers, dtype.to_numpy()).reshape(numbers.shape)


def _has_arrays(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(_has_arrays(v) for v in cast("Sequence[Any]", value))
    return isinstance(value, np.ndarray | np.generic)


def _default_dtype(value: bool | int | float) -> DType:
    match value:
        case bool():
            return DType.bool
        case int():
            return DType.int64
        case _:
            return DType.float32


def _convert(op: str, array: Array, dtype: DType) -> Array:
    target = dtype.to_numpy()
    if array.dtype == target:
        return np.ascontiguousarray(array).reshape(array.shape)
    source_is_float = array.dtype.kind not in "biu"
    if dtype is DType.bool:
        if array.dtype.kind != "b" and not np.isin(array, (0, 1)).all():
            raise ValueError(f"{op}: the values do not fit bool, which has 0 and 1")
        return array.astype(target)
    if dtype.is_integral():
        if source_is_float:
            wide = array.astype(np.float64)
            if not np.isfinite(wide).all() or (wide != np.trunc(wide)).any():
                raise ValueError(
                    f"{op}: {_first(array, wide != np.trunc(wide))} is not a whole number, it "
                    f"does not fit {dtype.name}"
                )
        limits = np.iinfo(target)
        for extreme in (array.min(), array.max()) if array.size else ():
            if not limits.min <= int(extreme) <= limits.max:
                raise ValueError(
                    f"{op}: {extreme} is out of range for {dtype.name} ({limits.min} to "
                    f"{limits.max})"
                )
        return array.astype(target)
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = convert_rounding_once(array, target)
    if array.dtype.kind == "b":
        return rounded
    lost = ~np.isfinite(rounded.astype(np.float64)) & np.isfinite(array.astype(np.float64))
    if lost.any():
        raise ValueError(f"{op}: {_first(array, lost)} is out of range for {dtype.name}")
    return rounded


def _first(array: Array, mask: npt.NDArray[np.bool_]) -> Any:
    selected = array[mask]
    return selected.reshape(-1)[0] if selected.size else array.reshape(-1)[0]


def constant_external(name: str, type: TensorType, align: int | None = None) -> TensorValue:
    """A weight: a tensor whose values are bound by name when the graph is loaded.

    Args:
        name: The full name of the weight. External constants of one name share one weight.
        type: The type of the weight.
        align: The alignment of its memory in bytes; that of the dtype if None.

    Raises:
        ValueError: The name is empty.
        TypeError: The name is not a str, or the alignment not an int.
    """
    if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"constant_external: the name is {name!r}, expected text")
    attrs: dict[str, str | int] = {"name": name}
    if align is not None:
        attrs["align"] = operator.index(align)
    return stage("constant.external", (), attrs, type.to_mlir())
