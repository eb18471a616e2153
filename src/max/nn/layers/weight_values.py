"""Checks of the values that are assigned to weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from max._errors import ArgumentError
from max.driver import DLPackArray, Tensor
from max.graph import Dim, StaticDim, Weight
from max.graph.weights import LaterCast, WeightData

MOST_LISTED = 8


def as_tensor(value: Any) -> Tensor:
    """A value as a tensor, without a copy."""
    if isinstance(value, Tensor):
        return value
    data = value.data if isinstance(value, WeightData) else value
    if isinstance(data, np.ndarray):
        return Tensor.from_numpy(data)
    return Tensor.from_dlpack(data)


def value_of(value: Any) -> DLPackArray:
    """A value as a state dict returns it: the array of a `WeightData`, else the value itself."""
    return value.data if isinstance(value, WeightData) else value


def zeros(name: str, weight: Weight) -> Tensor:
    """Zeros of a weight's dtype and shape.

    Raises:
        ValueError: The shape is not static.
    """
    try:
        shape = [int(dim) for dim in weight.shape]
    except TypeError as error:
        raise ValueError(
            f"the weight {name!r} has the symbolic shape {weight.shape}; give it a value"
        ) from error
    return Tensor.zeros(shape, weight.dtype)


def check_value(name: str, weight: Weight, value: Any, override: bool) -> str | None:
    """The error message for a value; None if it is valid."""
    encoding = getattr(value, "quantization_encoding", None)
    if encoding is not weight.quantization_encoding:
        if override and isinstance(value, WeightData):
            return _override_error(name, weight, value)
        if encoding is not None or isinstance(value, WeightData):
            return (
                f"{name} is encoded as {_encoding(encoding)}, the model takes "
                f"{_encoding(weight.quantization_encoding)}"
            )
    if isinstance(value, WeightData):
        dtype, shape = value.dtype, [int(dim) for dim in value.shape]
    else:
        try:
            tensor = as_tensor(value)
        except (TypeError, ValueError, BufferError) as error:
            raise ArgumentError(
                f"{name}: {error}; a NumPy array, a Tensor, a WeightData or another DLPack array fits"
            ) from error
        dtype, shape = tensor.dtype, list(tensor.shape)
    if not _fits(weight.shape, shape):
        takes = ", ".join(map(str, weight.shape))
        hint = "; it is transposed" if _fits(weight.shape, shape[::-1]) else ""
        return f"{name} has shape {shape}, the model takes [{takes}]{hint}"
    if dtype is not weight.dtype:
        return f"{name} is {dtype.name}, the model takes {weight.dtype.name}"
    return None


def _fits(dims: Sequence[Dim], sizes: Sequence[int]) -> bool:
    """Whether sizes match dimensions; a symbol matches any size."""
    # a symbol that occurs twice must have one size
    symbol_sizes: dict[Dim, int] = {}
    return len(dims) == len(sizes) and all(
        size == (dim if isinstance(dim, StaticDim) else symbol_sizes.setdefault(dim, size))
        for dim, size in zip(dims, sizes, strict=True)
    )


def _override_error(name: str, weight: Weight, value: WeightData) -> str | None:
    """The error message for a value whose encoding the weight takes on; None if it is valid."""
    # `element_shape` counts decoded elements, so shapes of different encodings compare
    own = WeightData(
        value.data, name, weight.dtype, weight.shape, weight.quantization_encoding
    ).element_shape
    if own != value.element_shape:
        return f"{name} has {list(value.element_shape)} elements, the model takes {list(own)}"
    if value.quantization_encoding is None and not value.dtype.is_float():
        return f"{name} is {value.dtype.name}, the model takes floats or encoded blocks"
    return None


def _encoding(encoding: Any) -> str:
    return "plain numbers" if encoding is None else str(encoding.value)


def alignment_error(name: str, value: Any, alignment: int | None) -> str | None:
    """The error message if the address of a value lacks the alignment that kernels assume; None if it is aligned."""
    data = value_of(value)
    if isinstance(data, LaterCast):
        return None  # the cast allocates aligned memory
    # read the address of the array itself: a tensor would copy unaligned data
    array = data if isinstance(data, np.ndarray) else as_tensor(data).to_numpy()
    if array.ctypes.data % (alignment or array.dtype.itemsize):
        return (
            f"{name} is at an address that is not a multiple of {alignment or array.dtype.itemsize} "
            "bytes; copy it, or say its alignment with weight_alignment"
        )
    return None


def _listed_names(names: Sequence[str]) -> str:
    shown = sorted(names)[:MOST_LISTED]
    unlisted = len(names) - len(shown)
    return ", ".join(shown) + (f" and {unlisted} more" if unlisted else "")


def state_dict_error(
    module: str, missing: Sequence[str], unused_names: Sequence[str], wrong: Sequence[str]
) -> ValueError:
    """The error message that lists all invalid values."""
    parts: list[str] = []
    if wrong:
        shown = "; ".join(wrong[:MOST_LISTED])
        unlisted = len(wrong) - MOST_LISTED
        parts.append(shown + (f"; and {unlisted} more" if unlisted > 0 else ""))
    if missing:
        parts.append(f"missing: {_listed_names(missing)}")
    if unused_names:
        parts.append(f"not used: {_listed_names(unused_names)}")
    return ValueError(f"{module}: the state dict does not fit. " + ". ".join(parts))
