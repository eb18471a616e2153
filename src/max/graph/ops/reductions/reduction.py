"""Reductions along an axis, which stays with size 1; scans, sorting and top-k along an axis."""

from __future__ import annotations

import operator

from max.dtype import DType
from max.graph import graph
from max.graph.ops.elementwise.binary import maximum, minimum
from max.graph.ops.staging.promotion import cast_to
from max.graph.ops.staging.stage import as_tensor, normalize_axis, stage
from max.graph.value import TensorValue, TensorValueLike, tensor_of

__all__ = [
    "argmax",
    "argmin",
    "argsort",
    "bottom_k",
    "cumsum",
    "logsoftmax",
    "max",
    "mean",
    "min",
    "prod",
    "softmax",
    "sum",
    "top_k",
]


def _reduce(name: str, op: str, x: TensorValueLike, axis: int) -> TensorValue:
    tensor = as_tensor(x)
    attrs = {"axis": normalize_axis(name, axis, tensor.rank)}
    if name in ("max", "min") and tensor.dtype is DType.bool:
        # "any" and "all" are computed on uint8
        return cast_to(stage(op, (cast_to(tensor, DType.uint8),), attrs), DType.bool)
    return stage(op, (_ordered_operand(tensor) if name in ("argmax", "argmin") else tensor,), attrs)


def _ordered_operand(tensor: TensorValue) -> TensorValue:
    """The tensor, or its bools as numbers: False is less than True."""
    return cast_to(tensor, DType.uint8) if tensor.dtype is DType.bool else tensor


def sum(x: TensorValueLike, axis: int = -1) -> TensorValue:
    """The sum along an axis, which stays with size 1.

    Args:
        x: The operand, a number type. Floats narrower than 32 bits are accumulated in float32.
        axis: The axis; negative counts from the last.

    Raises:
        ValueError: The axis is out of range.
        TypeError: The operand is bool.
    """
    return _reduce("sum", "reduce_sum", x, axis)


def prod(x: TensorValueLike, axis: int = -1) -> TensorValue:
    """The product along an axis, which stays with size 1; 1 for an empty axis.

    Args:
        x: The operand, a number type. Floats narrower than 32 bits are accumulated in float32; integers wrap around.
        axis: The axis; negative counts from the last.

    Raises:
        ValueError: The axis is out of range.
        TypeError: The operand is bool.
    """
    return _reduce("prod", "reduce_mul", x, axis)


def mean(x: TensorValueLike, axis: int = -1) -> TensorValue:
    """The mean along an axis, which stays with size 1.

    Args:
        x: The operand, a number type; integer means are rounded down.
        axis: The axis; negative counts from the last.

    Raises:
        ValueError: The axis is out of range.
        TypeError: The operand is bool.
    """
    return _reduce("mean", "reduce_mean", x, axis)


def max(
    x: TensorValueLike, y: TensorValueLike | None = None, /, axis: int | None = None
) -> TensorValue:
    """The element-wise maximum of two tensors, or the maximum along an axis of one.

    Args:
        x: The operand.
        y: The second operand; broadcasts with `x`. None reduces `x`.
        axis: The axis to reduce (the last by default), which stays with size 1; negative counts from the last.

    Raises:
        ValueError: The axis is out of range or empty, the shapes do not broadcast, or two operands have an axis.
        TypeError: No dtype fits both.
    """
    if y is not None:
        _no_axis("max", axis)
        return maximum(x, y)
    return _reduce("max", "reduce_max", x, -1 if axis is None else axis)


def min(
    x: TensorValueLike, y: TensorValueLike | None = None, /, axis: int | None = None
) -> TensorValue:
    """The element-wise minimum of two tensors, or the minimum along an axis of one.

    Args:
        x: The operand.
        y: The second operand; broadcasts with `x`. None reduces `x`.
        axis: The axis to reduce (the last by default), which stays with size 1; negative counts from the last.

    Raises:
        ValueError: The axis is out of range or empty, the shapes do not broadcast, or two operands have an axis.
        TypeError: No dtype fits both.
    """
    if y is not None:
        _no_axis("min", axis)
        return minimum(x, y)
    return _reduce("min", "reduce_min", x, -1 if axis is None else axis)


def _no_axis(op: str, axis: int | None) -> None:
    if axis is not None:
        raise ValueError(
            f"{op}: axis={axis} with two operands, which are compared element by element; reduce one operand, as "
            f"{op}(x, axis={axis}), or leave out the axis"
        )


def argmax(x: TensorValueLike, axis: int = -1) -> TensorValue:
    """The index of the maximum along an axis, which stays with size 1; int64.

    Args:
        x: The operand; False is less than True. Ties give the first index.
        axis: The axis; negative counts from the last.

    Raises:
        ValueError: The axis is out of range or empty.
    """
    return _reduce("argmax", "argmax", x, axis)


def argmin(x: TensorValueLike, axis: int = -1) -> TensorValue:
    """The index of the minimum along an axis, which stays with size 1; int64.

    Args:
        x: The operand; False is less than True. Ties give the first index.
        axis: The axis; negative counts from the last.

    Raises:
        ValueError: The axis is out of range or empty.
    """
    return _reduce("argmin", "argmin", x, axis)


def softmax(value: TensorValueLike, axis: int = -1) -> TensorValue:
    """``exp(x) / sum(exp(x))`` along an axis.

    Args:
        value: The operand, of a floating-point type.
        axis: The axis; negative counts from the last.

    Raises:
        ValueError: The axis is out of range.
        TypeError: The operand is not of a floating-point type.
    """
    return _reduce("softmax", "softmax", value, axis)


def logsoftmax(value: TensorValueLike, axis: int = -1) -> TensorValue:
    """The logarithm of `softmax` along an axis.

    Args:
        value: The operand, of a floating-point type.
        axis: The axis; negative counts from the last.

    Raises:
        ValueError: The axis is out of range.
        TypeError: The operand is not of a floating-point type.
    """
    return _reduce("logsoftmax", "logsoftmax", value, axis)


def cumsum(
    x: TensorValueLike, axis: int = -1, exclusive: bool = False, reverse: bool = False
) -> TensorValue:
    """The cumulative sum along an axis.

    Args:
        x: The operand, a number type.
        axis: The axis; negative counts from the last.
        exclusive: Whether to exclude an element from its own sum; the first sum is then 0.
        reverse: Whether to sum from the end.

    Returns:
        A tensor of the shape and dtype of `x`.

    Raises:
        ValueError: The axis is out of range.
        TypeError: The operand is bool.
    """
    tensor = as_tensor(x)
    attrs = {
        "axis": normalize_axis("cumsum", axis, tensor.rank),
        "exclusive": bool(exclusive),
        "reverse": bool(reverse),
    }
    return stage("cumsum", (tensor,), attrs)


def top_k(input: TensorValueLike, k: int, axis: int = -1) -> tuple[TensorValue, TensorValue]:
    """The k greatest elements along an axis, in descending order, and their indices.

    Args:
        input: The operand; False is less than True.
        k: The number of elements, from 1 to the size of the axis.
        axis: The axis; negative counts from the last.

    Returns:
        The values, and their indices along the axis (int64), both with size k along it. Ties keep their order.

    Raises:
        ValueError: The axis or `k` is out of range.
    """
    return _select("top_k", input, k, axis)


def bottom_k(input: TensorValueLike, k: int, axis: int = -1) -> tuple[TensorValue, TensorValue]:
    """The k smallest elements along an axis, in ascending order, and their indices.

    Args:
        input: The operand; False is less than True, and NaN is the greatest element.
        k: The number of elements, from 1 to the size of the axis.
        axis: The axis; negative counts from the last.

    Returns:
        The values, and their indices along the axis (int64), both with size k along it. Ties keep their order.

    Raises:
        ValueError: The axis or `k` is out of range.
    """
    return _select("bottom_k", input, k, axis)


def _select(op: str, input: TensorValueLike, k: int, axis: int) -> tuple[TensorValue, TensorValue]:
    tensor = as_tensor(input)
    attrs = {"k": operator.index(k), "axis": normalize_axis(op, axis, tensor.rank)}
    values, indices = graph.Graph.current.stage(f"mo.{op}", (_ordered_operand(tensor),), attrs)
    return cast_to(tensor_of(values), tensor.dtype), tensor_of(indices)


def argsort(x: TensorValueLike, ascending: bool = True) -> TensorValue:
    """The indices that sort a tensor along its first axis.

    The sort is stable. NaN counts as the greatest element, and False is less than True.

    Args:
        x: The operand, of rank 1 or more.
        ascending: Whether to sort in ascending order.

    Returns:
        The indices along the first axis (int64), of the shape of `x`.

    Raises:
        ValueError: The operand has rank 0.
    """
    tensor = as_tensor(x)
    attrs = {"axis": normalize_axis("argsort", 0, tensor.rank), "ascending": bool(ascending)}
    return stage("argsort", (_ordered_operand(tensor),), attrs)
