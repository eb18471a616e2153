"""Gather and scatter."""

from __future__ import annotations

import operator

from max.dtype import DType
from max.graph.ops.creation.constant import constant
from max.graph.ops.staging.promotion import is_weak, promote_weak
from max.graph.ops.staging.stage import as_tensor, normalize_axis, stage
from max.graph.value import TensorValue, TensorValueLike

__all__ = [
    "gather", "gather_nd", "scatter", "scatter_add", "scatter_max", "scatter_min", "scatter_mul", "scatter_nd",
    "scatter_nd_add", "scatter_nd_max", "scatter_nd_min", "scatter_nd_mul",
]  # fmt: skip


def _indices(op: str, value: TensorValueLike, like: TensorValue) -> TensorValue:
    # a number or a list gets the device of the tensor
    if not is_weak(value):
        return as_tensor(value)
    if isinstance(value, int):
        return constant(value, DType.int64, like.device)
    return as_tensor(value).to(like.device)


def _updates(op: str, value: TensorValueLike, like: TensorValue) -> TensorValue:
    if is_weak(value):
        return promote_weak(op, value, like.dtype, like.device)
    updates = as_tensor(value)
    if updates.dtype is not like.dtype:
        raise TypeError(
            f"{op}: the updates are {updates.dtype.name}, the input is {like.dtype.name}; cast one"
        )
    return updates


def gather(input: TensorValueLike, indices: TensorValueLike, axis: int) -> TensorValue:
    """Gathers slices along an axis, as ``numpy.take``.

    Args:
        input: The tensor.
        indices: Integers of any shape; negative ones count from the last. An index out of range raises when the
            graph runs.
        axis: The axis; negative counts from the last.

    Returns:
        A tensor of shape ``input.shape[:axis] + indices.shape + input.shape[axis + 1:]``.

    Raises:
        ValueError: The axis is out of range.
        TypeError: The indices are not integers.
    """
    tensor = as_tensor(input)
    index = normalize_axis("gather", axis, tensor.rank)
    return stage("gather", (tensor, _indices("gather", indices, tensor)), {"axis": index})


def gather_nd(input: TensorValueLike, indices: TensorValueLike, batch_dims: int = 0) -> TensorValue:
    """Gathers slices by index vectors.

    Args:
        input: The tensor.
        indices: Integers. The last axis, of static size, holds index vectors for the axes of `input` after the
            batch dims.
        batch_dims: The number of equal leading axes of `input` and `indices`.

    Returns:
        A tensor of shape ``indices.shape[:-1] + input.shape[batch_dims + indices.shape[-1]:]``.

    Raises:
        ValueError: The batch dims differ, or the index vectors are longer than the remaining rank.
        TypeError: The indices are not integers.
    """
    tensor = as_tensor(input)
    operands = (tensor, _indices("gather_nd", indices, tensor))
    return stage("gather_nd", operands, {"batch_dims": operator.index(batch_dims)})


def scatter(
    input: TensorValueLike,
    updates: TensorValueLike,
    indices: TensorValueLike,
    axis: int = -1,
) -> TensorValue:
    """Replaces elements along an axis in a copy of a tensor, as ``numpy.put_along_axis``.

    Args:
        input: The tensor.
        updates: The new elements, of the input's dtype and rank.
        indices: The index along `axis` of each update: integers of the shape of `updates`.
        axis: The axis; negative counts from the last.

    Returns:
        A tensor of the input's shape and dtype.

    Raises:
        ValueError: The shapes do not match, or the axis is out of range.
        TypeError: The updates are of another dtype, or the indices are not integers.
    """
    tensor = as_tensor(input)
    index = normalize_axis("scatter", axis, tensor.rank)
    operands = _scatter_operands("scatter", tensor, updates, indices)
    return stage("scatter", operands, {"axis": index})


def _scatter_operands(
    op: str, tensor: TensorValue, updates: TensorValueLike, indices: TensorValueLike
) -> tuple[TensorValue, TensorValue, TensorValue]:
    return tensor, _updates(op, updates, tensor), _indices(op, indices, tensor)


def scatter_nd(
    input: TensorValueLike, updates: TensorValueLike, indices: TensorValueLike
) -> TensorValue:
    """Replaces slices, addressed by index vectors, in a copy of a tensor.

    Args:
        input: The tensor.
        updates: The new slices, of shape ``indices.shape[:-1] + input.shape[indices.shape[-1]:]``.
        indices: Integers. The last axis, of static size, holds the index vectors.

    Returns:
        A tensor of the input's shape and dtype.

    Raises:
        ValueError: The shapes do not match.
        TypeError: The updates are of another dtype, or the indices are not integers.
    """
    return stage("scatter_nd", _scatter_operands("scatter_nd", as_tensor(input), updates, indices))


def _scatter_reduce(
    reduction: str,
    input: TensorValueLike,
    updates: TensorValueLike,
    indices: TensorValueLike,
    axis: int,
) -> TensorValue:
    op = f"scatter_{reduction}"
    tensor = as_tensor(input)
    attrs = {"axis": normalize_axis(op, axis, tensor.rank), "reduction": reduction}
    return stage("scatter_reduce", _scatter_operands(op, tensor, updates, indices), attrs)


def scatter_add(
    input: TensorValueLike, updates: TensorValueLike, indices: TensorValueLike, axis: int = -1
) -> TensorValue:
    """Adds updates to elements along an axis in a copy of a tensor.

    Updates of equal indices are all added, in their order along the axis, each sum rounded to the dtype.

    Args:
        input: The tensor, a number type.
        updates: The numbers to add, of the input's dtype and rank.
        indices: The index along `axis` of each update: integers of the shape of `updates`; negative ones count from
            the last. An index out of range raises when the graph runs.
        axis: The axis; negative counts from the last.

    Returns:
        A tensor of the input's shape and dtype.

    Raises:
        ValueError: The shapes do not match, or the axis is out of range.
        TypeError: The input is bool, the updates are of another dtype, or the indices are not integers.
    """
    return _scatter_reduce("add", input, updates, indices, axis)


def scatter_max(
    input: TensorValueLike, updates: TensorValueLike, indices: TensorValueLike, axis: int = -1
) -> TensorValue:
    """The greater of an element and its updates along an axis, NaN where one is; arguments as of `scatter_add`."""
    return _scatter_reduce("max", input, updates, indices, axis)


def scatter_min(
    input: TensorValueLike, updates: TensorValueLike, indices: TensorValueLike, axis: int = -1
) -> TensorValue:
    """The smaller of an element and its updates along an axis, NaN where one is; arguments as of `scatter_add`."""
    return _scatter_reduce("min", input, updates, indices, axis)


def scatter_mul(
    input: TensorValueLike, updates: TensorValueLike, indices: TensorValueLike, axis: int = -1
) -> TensorValue:
    """The product of an element and its updates along an axis; arguments as of `scatter_add`."""
    return _scatter_reduce("mul", input, updates, indices, axis)


def _scatter_nd_reduce(
    reduction: str, input: TensorValueLike, updates: TensorValueLike, indices: TensorValueLike
) -> TensorValue:
    operands = _scatter_operands(f"scatter_nd_{reduction}", as_tensor(input), updates, indices)
    return stage("scatter_nd_reduce", operands, {"reduction": reduction})


def scatter_nd_add(
    input: TensorValueLike, updates: TensorValueLike, indices: TensorValueLike
) -> TensorValue:
    """Adds updates to slices, addressed by index vectors, in a copy of a tensor.

    Updates of equal index vectors are all added, in their order, each sum rounded to the dtype.

    Args:
        input: The tensor, a number type.
        updates: The numbers to add, of shape ``indices.shape[:-1] + input.shape[indices.shape[-1]:]``.
        indices: Integers. The last axis, of static size, holds the index vectors. An index out of range raises when
            the graph runs.

    Returns:
        A tensor of the input's shape and dtype.

    Raises:
        ValueError: The shapes do not match.
        TypeError: The input is bool, the updates are of another dtype, or the indices are not integers.
    """
    return _scatter_nd_reduce("add", input, updates, indices)


def scatter_nd_max(
    input: TensorValueLike, updates: TensorValueLike, indices: TensorValueLike
) -> TensorValue:
    """The greater of a slice's elements and their updates, NaN where one is; arguments as of `scatter_nd_add`."""
    return _scatter_nd_reduce("max", input, updates, indices)


def scatter_nd_min(
    input: TensorValueLike, updates: TensorValueLike, indices: TensorValueLike
) -> TensorValue:
    """The smaller of a slice's elements and their updates, NaN where one is; arguments as of `scatter_nd_add`."""
    return _scatter_nd_reduce("min", input, updates, indices)


def scatter_nd_mul(
    input: TensorValueLike, updates: TensorValueLike, indices: TensorValueLike
) -> TensorValue:
    """The product of a slice's elements and their updates; arguments as of `scatter_nd_add`."""
    return _scatter_nd_reduce("mul", input, updates, indices)
