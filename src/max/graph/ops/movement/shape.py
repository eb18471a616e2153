"""Ops on shapes: reshape, transpose, broadcast, rebind and their relatives."""

from __future__ import annotations

from typing import Any

from max import mlir
from max.graph import graph
from max.graph.dim import Dim, DimLike
from max.graph.ops.staging.stage import as_tensor, normalize_axis, stage
from max.graph.shape import Shape, ShapeLike
from max.graph.type import FilterLayout
from max.graph.value import StrongTensorValueLike, TensorValue, TensorValueLike
from max.mlir.dims import DimExpr

__all__ = [
    "as_interleaved_complex",
    "broadcast_to",
    "flatten",
    "permute",
    "rebind",
    "reshape",
    "shape_to_tensor",
    "squeeze",
    "transpose",
    "unsqueeze",
]


def _dims(op: str, shape: ShapeLike, may_follow: bool = False) -> tuple[DimExpr, ...]:
    """Converts a target shape, and checks that its symbols are bound in the graph, or may be by a later op."""
    if isinstance(shape, str) or not hasattr(shape, "__iter__"):
        raise TypeError(f"{op}: the shape is {shape!r}, expected a sequence of dimensions")
    try:
        dims = Shape(shape).exprs
    except TypeError as error:
        raise TypeError(f"{op}: {error}") from error
    if any(not dim.is_static for dim in dims):
        graph.Graph.current.check_symbols(op, dims, may_follow)
    return dims


def reshape(x: TensorValueLike, shape: ShapeLike) -> TensorValue:
    """Changes the shape; the elements keep their row-major order.

    Args:
        x: The tensor.
        shape: The new shape. One dimension may be -1: it is inferred from the number of elements.

    Returns:
        A tensor of the new shape; `x` itself if it has the shape.

    Raises:
        ValueError: The number of elements differs, more than one dimension is -1, or a symbol is not bound in the
            graph.
    """
    tensor = as_tensor(x)
    type_ = tensor.mlir_type
    dims = list(_dims("reshape", shape))
    free = [i for i, dim in enumerate(dims) if dim == -1]
    if len(free) > 1:
        raise ValueError(
            f"reshape: {mlir.dims_text(dims)} has {len(free)} dimensions of -1, at most 1"
        )
    for axis, dim in enumerate(dims):
        if dim.is_static and dim.value < -1:
            raise ValueError(f"reshape: dimension {axis} of {mlir.dims_text(dims)} is negative")
    if free:
        dims[free[0]] = _remaining_size(type_, dims, free[0])
    if tuple(dims) == type_.shape:
        return tensor
    return stage("reshape", (tensor,), None, type_.with_shape(dims))


def _remaining_size(type_: mlir.TensorType, dims: list[DimExpr], free: int) -> DimExpr:
    """The size of the dimension that is -1."""
    other_sizes = DimExpr.constant(1)
    for axis, dim in enumerate(dims):
        if axis != free:
            other_sizes = other_sizes * dim
    total = type_.num_elements
    if other_sizes == 0:
        raise ValueError(
            f"reshape: {mlir.dims_text(dims)} leaves -1 open for {type_.short}: the others have no "
            "elements"
        )
    # exact for all sizes of the symbols
    quotient = total.exact_quotient(other_sizes)
    if quotient is None:
        raise ValueError(
            f"reshape: the {total} elements of {type_.short} do not fill {mlir.dims_text(dims)}: they "
            f"are not a multiple of {other_sizes}"
        )
    return quotient


def flatten(x: TensorValueLike, start_dim: int = 0, end_dim: int = -1) -> TensorValue:
    """Merges the axes from `start_dim` to `end_dim`, inclusive, into one.

    Args:
        x: The tensor; rank 0 becomes rank 1.
        start_dim: The first axis; negative counts from the last.
        end_dim: The last axis; negative counts from the last.

    Raises:
        ValueError: An axis is out of range, or the last comes before the first.
    """
    tensor = as_tensor(x)
    shape = tensor.mlir_type.shape
    rank = max(len(shape), 1)
    first = normalize_axis("flatten", start_dim, rank, "start_dim")
    last = normalize_axis("flatten", end_dim, rank, "end_dim")
    if first > last:
        raise ValueError(f"flatten: start_dim {start_dim} comes after end_dim {end_dim}")
    merged = Dim(1)
    for dim in shape[first : last + 1]:
        merged = merged * Dim.from_mlir(dim)
    before = [Dim.from_mlir(dim) for dim in shape[:first]]
    after = [Dim.from_mlir(dim) for dim in shape[last + 1 :]]
    return reshape(tensor, [*before, merged, *after])


def broadcast_to(x: StrongTensorValueLike, shape: ShapeLike) -> TensorValue:
    """Broadcasts a tensor to a shape by NumPy's rules.

    Args:
        x: The tensor.
        shape: The shape of the result.

    Raises:
        ValueError: A dimension of `x` is neither 1 nor equal, or a symbol is not bound in the graph.
    """
    tensor = as_tensor(x)
    dims = _dims("broadcast_to", shape, may_follow=True)
    type_ = tensor.mlir_type
    if dims == type_.shape:
        return tensor
    for axis, dim in enumerate(dims):
        if dim.is_static and dim.value < 0:
            raise ValueError(
                f"broadcast_to: dimension {axis} of {mlir.dims_text(dims)} is negative"
            )
    return stage("broadcast_to", (tensor,), None, type_.with_shape(dims))


def rebind(
    x: TensorValueLike,
    shape: ShapeLike,
    message: str = "",
    layout: FilterLayout | None = None,
) -> TensorValue:
    """Asserts a shape: dimensions that the graph cannot prove equal are checked when it runs.

    A symbol that is new to the graph is bound to the actual size.

    Args:
        x: The tensor.
        shape: The asserted shape, of equal rank.
        message: The message of the error raised if the check fails.
        layout: The layout to attach to a convolution filter.

    Returns:
        The tensor, with type ``shape``.

    Raises:
        ValueError: The rank differs, or a dimension can never be equal.
    """
    tensor = as_tensor(x)
    type_ = tensor.mlir_type
    dims = Shape(shape).exprs
    for axis, dim in enumerate(dims):
        if dim.is_static and dim.value < 0:
            raise ValueError(f"rebind: dimension {axis} of {mlir.dims_text(dims)} is negative")
    name = type_.layout if layout is None else layout.value
    target = mlir.TensorType.get(type_.dtype, dims, type_.device, name)
    if target == type_:
        return tensor
    return stage("rebind", (tensor,), {"message": message}, target)


def transpose(x: TensorValueLike, axis_1: int, axis_2: int) -> TensorValue:
    """Swaps two axes.

    Args:
        x: The tensor.
        axis_1: One axis; negative counts from the last.
        axis_2: The other axis; negative counts from the last.

    Raises:
        ValueError: An axis is out of range.
    """
    tensor = as_tensor(x)
    rank = tensor.rank
    first = normalize_axis("transpose", axis_1, rank, "axis_1")
    second = normalize_axis("transpose", axis_2, rank, "axis_2")
    perm = list(range(rank))
    perm[first], perm[second] = perm[second], perm[first]
    return stage("transpose", (tensor,), {"perm": tuple(perm)}) if first != second else tensor


def permute(x: TensorValueLike, dims: list[int]) -> TensorValue:
    """Permutes the axes.

    Args:
        x: The tensor.
        dims: For each axis of the result, the axis of `x`; negative counts from the last.

    Raises:
        ValueError: An axis is out of range, missing or repeated.
    """
    tensor = as_tensor(x)
    rank = tensor.rank
    if len(dims) != rank:
        raise ValueError(f"permute: {list(dims)} has {len(dims)} axes, the tensor has {rank}")
    perm = tuple(normalize_axis("permute", axis, rank) for axis in dims)
    if len(set(perm)) != rank:
        raise ValueError(f"permute: {list(dims)} names an axis twice")
    return stage("transpose", (tensor,), {"perm": perm})


def squeeze(x: TensorValueLike, axis: int) -> TensorValue:
    """Removes an axis of size 1.

    Args:
        x: The tensor.
        axis: The axis; negative counts from the last.

    Raises:
        ValueError: The axis is out of range, or its size is not 1.
    """
    tensor = as_tensor(x)
    shape = list(tensor.shape)
    index = normalize_axis("squeeze", axis, len(shape))
    if shape[index] != 1:
        raise ValueError(f"squeeze: axis {axis} of {tensor!r} has size {shape[index]}, not 1")
    del shape[index]
    return reshape(tensor, shape)


def unsqueeze(x: TensorValueLike, axis: int) -> TensorValue:
    """Inserts an axis of size 1.

    Args:
        x: The tensor.
        axis: The position of the new axis in the result; negative counts from the last.

    Raises:
        ValueError: The axis is out of range.
    """
    tensor = as_tensor(x)
    shape: list[DimLike] = list(tensor.shape)
    shape.insert(normalize_axis("unsqueeze", axis, len(shape) + 1), 1)
    return reshape(tensor, shape)


def as_interleaved_complex(x: TensorValueLike) -> TensorValue:
    """Splits the last axis into pairs of real and imaginary part.

    Args:
        x: The tensor ``[…, n]``, n even.

    Returns:
        ``[…, n / 2, 2]``.

    Raises:
        ValueError: The rank is 0, or n is not known to be even.
    """
    tensor = as_tensor(x)
    shape = tensor.shape
    if not shape:
        raise ValueError(f"as_interleaved_complex: {tensor!r} has no last axis")
    half = shape[-1].expr.exact_quotient(2)
    if half is None:
        raise ValueError(
            f"as_interleaved_complex: the last axis of {tensor!r} has size {shape[-1]}, expected "
            "an even one"
        )
    return reshape(tensor, [*shape[:-1], Dim.from_mlir(half), 2])


def shape_to_tensor(shape: ShapeLike) -> TensorValue:
    """Converts dimensions to an int64 tensor on the CPU.

    Args:
        shape: The dimensions.

    Returns:
        int64 ``[rank]``.

    Raises:
        ValueError: A symbol is not bound in the graph.
    """
    attrs: dict[str, Any] = {"shape": _dims("shape_to_tensor", shape, may_follow=True)}
    return stage("shape_to_tensor", (), attrs)
