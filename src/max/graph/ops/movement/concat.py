"""Ops that join, split and pad tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, cast

import numpy as np

from max import mlir
from max.graph.dim import Dim, DimLike
from max.graph.ops.movement.border_padding import BORDERS, pad_by_elements
from max.graph.ops.movement.shape import unsqueeze
from max.graph.ops.staging.promotion import cast_to, is_weak, promote_types, promote_weak
from max.graph.ops.staging.stage import as_tensor, normalize_axis, stage
from max.graph.value import TensorValue, TensorValueLike
from max.mlir.dims import DimExpr

__all__ = ["chunk", "concat", "pad", "split", "stack"]

_ZERO, _ONE = DimExpr.constant(0), DimExpr.constant(1)


def _tensors(op: str, values: Iterable[TensorValueLike]) -> list[TensorValue]:
    """Converts operands to tensors of their promoted dtype."""
    items = list(values)
    if not items:
        raise ValueError(f"{op}: expected at least one tensor")
    strong = [as_tensor(v) for v in items if not is_weak(v)]
    if not strong:
        # numbers and arrays only: the first one gives the dtype
        strong = [as_tensor(items[0])]
        items[0] = strong[0]
    dtype = strong[0].dtype
    for tensor in strong[1:]:
        dtype = promote_types(op, dtype, tensor.dtype)
    device = strong[0].device
    return [
        promote_weak(op, v, dtype, device) if is_weak(v) else cast_to(as_tensor(v), dtype)
        for v in items
    ]


def concat(original_vals: Iterable[TensorValueLike], axis: int = 0) -> TensorValue:
    """Joins tensors along an axis.

    Args:
        original_vals: One tensor or more, of equal rank, and of equal sizes except along `axis`.
        axis: The axis; negative counts from the last.

    Returns:
        A tensor of the promoted dtype; its size along `axis` is the sum of the operands' sizes.

    Raises:
        ValueError: There is no tensor, ranks or other sizes differ, or the axis is out of range.
        TypeError: No dtype fits all.
    """
    tensors = _tensors("concat", original_vals)
    attrs = {"axis": normalize_axis("concat", axis, tensors[0].rank)}
    return tensors[0] if len(tensors) == 1 else stage("concat", tensors, attrs)


def stack(values: Iterable[TensorValueLike], axis: int = 0) -> TensorValue:
    """Joins tensors along a new axis.

    Args:
        values: One tensor or more, of equal shape.
        axis: The position of the new axis in the result; negative counts from the last.

    Returns:
        A tensor of the promoted dtype, with one axis more than the operands.

    Raises:
        ValueError: There is no tensor, the shapes differ, or the axis is out of range.
        TypeError: No dtype fits all.
    """
    tensors = _tensors("stack", values)
    index = normalize_axis("stack", axis, tensors[0].rank + 1)
    first = tensors[0].mlir_type
    for i, tensor in enumerate(tensors[1:], 1):
        if (type_ := tensor.mlir_type).shape != first.shape:
            raise ValueError(
                f"stack: tensor {i} is {type_.short}, tensor 0 is {first.short}; expected one shape"
            )
    return concat([unsqueeze(tensor, index) for tensor in tensors], index)


def split(x: TensorValueLike, split_sizes: Sequence[DimLike], axis: int = 0) -> list[TensorValue]:
    """Splits a tensor into parts along an axis.

    Args:
        x: The tensor.
        split_sizes: The sizes of the parts; their sum is the size of the axis.
        axis: The axis; negative counts from the last.

    Returns:
        One tensor per size.

    Raises:
        ValueError: A size is negative, the sum differs from the size of the axis, or the axis is out of range.
    """
    tensor = as_tensor(x)
    type_ = tensor.mlir_type
    index = normalize_axis("split", axis, type_.rank)
    sizes = [Dim(size).expr for size in split_sizes]
    total = sum(sizes, start=_ZERO)
    if total != type_.shape[index]:
        raise ValueError(
            f"split: the sizes {[str(s) for s in sizes]} add up to {total}, axis {axis} of "
            f"{type_.short} has size {type_.shape[index]}"
        )
    if any(size.is_static and size.value < 0 for size in sizes):
        raise ValueError(f"split: the sizes {[str(s) for s in sizes]} must not be negative")
    parts: list[TensorValue] = []
    offset = _ZERO
    for size in sizes:
        shape = (*type_.shape[:index], size, *type_.shape[index + 1 :])
        # each part is a slice, that is a view: no elements are copied
        start = [_ZERO] * type_.rank
        stop = list(type_.shape)
        start[index], stop[index] = offset, offset + size
        offset = stop[index]
        attrs = {"start": tuple(start), "stop": tuple(stop), "step": (_ONE,) * type_.rank}
        parts.append(
            tensor
            if shape == type_.shape
            # the result's shape is stated, so that symbolic sizes stay as the caller wrote them
            else stage("slice", (tensor,), attrs, type_.with_shape(shape))
        )
    return parts


def chunk(x: TensorValueLike, chunks: int, axis: int = 0) -> list[TensorValue]:
    """Splits a tensor into equal parts along an axis.

    Args:
        x: The tensor.
        chunks: The number of parts; it must divide the size of the axis.
        axis: The axis; negative counts from the last.

    Returns:
        `chunks` tensors of equal shape.

    Raises:
        ValueError: The axis is out of range or not divisible, or `chunks` is not positive.
    """
    tensor = as_tensor(x)
    type_ = tensor.mlir_type
    index = normalize_axis("chunk", axis, type_.rank)
    if chunks < 1:
        raise ValueError(f"chunk: chunks is {chunks}, expected 1 or more")
    size = type_.shape[index].exact_quotient(chunks)
    if size is None:
        raise ValueError(
            f"chunk: axis {axis} of {type_.short} has size {type_.shape[index]}, which is not "
            f"known to be a multiple of {chunks}"
        )
    return split(tensor, [Dim.from_mlir(size)] * chunks, index)


def pad(
    input: TensorValueLike,
    paddings: Iterable[int],
    mode: Literal["constant", "reflect", "edge"] = "constant",
    value: TensorValueLike = 0,
) -> TensorValue:
    """Adds elements around a tensor.

    Args:
        input: The tensor.
        paddings: The number of elements before and after each axis: ``[before_0, after_0, …]``.
        mode: What the new elements are: ``constant`` (`value`), ``reflect`` (the tensor mirrored at its first and last
            element, which are not repeated) or ``edge`` (the nearest element), as in ``numpy.pad``.
        value: The value of the new elements in mode ``constant``: a number that the dtype can hold.

    Returns:
        A tensor of the same dtype, each axis enlarged by its two paddings.

    Raises:
        ValueError: The number of paddings differs from twice the rank, a padding is negative, the mode is unknown,
            the dtype cannot hold the value, or an axis without elements has none to repeat.
        TypeError: The value is not a number.
    """
    tensor = as_tensor(input)
    amounts = [Dim(p).expr for p in paddings]
    if len(amounts) != 2 * tensor.rank:
        raise ValueError(
            f"pad: {len(amounts)} paddings for a tensor of rank {tensor.rank}, expected "
            f"{2 * tensor.rank}"
        )
    if mode in BORDERS:
        return pad_by_elements(tensor, amounts, mode)
    if mode not in mlir.PAD_MODES:
        raise ValueError(
            f"pad: mode is {mode!r}, expected {', '.join((*mlir.PAD_MODES, *BORDERS))}"
        )
    if isinstance(value, TensorValue) or not np.isscalar(value):
        raise TypeError(f"pad: the value is {value!r}, expected a number")
    number = cast("int | float", value.item() if isinstance(value, np.generic) else value)
    if not tensor.dtype.is_float() and number % 1 != 0:
        raise ValueError(f"pad: the value {number} does not fit {tensor.dtype.name}")
    attrs = {
        "low": tuple(amounts[0::2]),
        "high": tuple(amounts[1::2]),
        "mode": mode,
        "value": float(number) if tensor.dtype.is_float() else int(number),
    }
    return stage("pad", (tensor,), attrs)
